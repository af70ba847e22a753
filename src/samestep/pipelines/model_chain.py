"""Any model that can be cut as a chain of layers, and a stage's part of it: the same modules under their own names.

    Sequential(                     0                 layers, in the order in which they are called, by the names that
      0: Linear                     1.proj            their parameters have in the state_dict
      1: Sequential(                1.act
        proj: Linear                2
        act: ReLU)
      2: Linear)                    the part of layers [1, 3) has   1.proj, 1.act

    [encoder, middle, decoder]                 stages as they are: each is called with what the one before it gives,
    forward(x) ── (h, skip) ──▶ forward(h, skip) ──▶ …        a tuple as several arguments, as torch's stages are

Of any other model the forward is traced, and split (see :mod:`samestep.pipelines.splitting`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from samestep.errors import ModelError, UsageError
from samestep.pipelines.chain_layer import ChainLayer, LayerChain, extract
from samestep.pipelines.splitting import split_forward
from samestep.pipelines.tied_weights import TiedWeight, parameter_places

AnyModel = nn.Module | ExportedProgram | Sequence[nn.Module]

_DROPOUT = torch.ops.aten.dropout.default
_BY_MODE = ("dropout", "batch_norm", "rrelu", "instance_norm", "bernoulli")  # in the names of operations that have one


def build_chain(model: nn.Module, sample: Sequence[Any] | None = None, splits: Sequence[int] = ()) -> LayerChain:
    """Returns a model as a chain of layers.

    Args:
        model: an nn.Sequential, an nn.ModuleList of modules by hand, or any whose forward can be traced.
        sample: inputs of some samples, to trace it with.
        splits: where another rank has split the same model.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 1)))
        >>> [layer.name for layer in build_chain(model).layers]
        ['0', '1.0', '1.1']
    """
    if isinstance(model, nn.ModuleList):
        named = [(name, child) for name, child in model._modules.items() if child is not None]  # noqa: SLF001
        chain = LayerChain(model, [_layer_of(model, name, child, unpacks=True) for name, child in named])
    elif type(model) is nn.Sequential:
        chain = LayerChain(model, [_layer_of(model, name, child, unpacks=False) for name, child in _flatten(model, "")])
    elif sample is None:
        raise ModelError(f"{type(model).__name__} is no nn.Sequential: samestep.plan_pipeline cuts it, with a sample")
    else:
        chain = split_forward(model, sample, splits)
    for layer in chain.layers:
        norm = next((inner for inner in layer.modules() if isinstance(inner, _BatchNorm)), None)
        if norm is not None:
            raise ModelError(
                f"layer {layer.name} has a {type(norm).__name__}, whose statistics would be those of a micro-batch and "
                "not of the batch: use GroupNorm or LayerNorm in a pipeline"
            )
    return chain


def _layer_of(model: nn.Module, name: str, module: nn.Module, *, unpacks: bool) -> ChainLayer:
    def run(home: nn.Module, given: Any) -> Any:
        own = home.get_submodule(name)
        return own(*given) if unpacks and isinstance(given, tuple) else own(given)

    return ChainLayer(extract(model, [name]), name, [name], run, type(module))


def _flatten(module: nn.Sequential, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module._modules.items():  # noqa: SLF001  (named_children leaves out what comes again)
        if type(child) is nn.Sequential and len(child):
            yield from _flatten(child, f"{prefix}{name}.")
        elif child is not None:
            yield prefix + name, child


def shared_layers(layers: Sequence[ChainLayer], copied: Sequence[TiedWeight] = ()) -> list[frozenset[int]]:
    """Returns the sets of layers that share a parameter or a buffer, but for weights that each has a copy of.

    >>> tied = nn.Linear(2, 2)
    >>> shared_layers(build_chain(nn.Sequential(tied, nn.ReLU(), tied)).layers)
    [frozenset({0, 2})]
    """
    holders: defaultdict[int, set[int]] = defaultdict(set)
    free = {(layer, name) for one in copied for layer, name in zip(one.layers, one.names, strict=True)}
    for place, parameter in parameter_places(layers):
        if (place.layer, place.name) not in free:
            holders[id(parameter)].add(place.layer)
    for number, layer in enumerate(layers):
        for buffer in layer.buffers():
            holders[id(buffer)].add(number)
    return list(dict.fromkeys(frozenset(numbers) for numbers in holders.values() if len(numbers) > 1))


def stage_ranges(
    layers: Sequence[ChainLayer], ends: Sequence[int], ranks: int, copied: Sequence[TiedWeight] = ()
) -> list[tuple[int, int]]:
    """Returns begin and end of the stages, if they are all layers and can be computed apart.

    `ends` are, by stage, the layer behind its last one; of `copied` weights each layer can have a copy.

    Example:
        >>> stage_ranges(build_chain(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))).layers, [2, 3], 2)
        [(0, 2), (2, 3)]
    """
    ranges = list(zip((0, *ends), ends, strict=False))
    if not ranges or ends[-1] != len(layers) or any(begin >= end for begin, end in ranges):
        raise UsageError(
            f"ends={list(ends)} do not cut {len(layers)} layers into stages: give them in order, each stage one layer "
            f"at least, and {len(layers)} as the last"
        )
    if len(ranges) % ranks:
        raise UsageError(
            f"{len(ranges)} stages cannot be divided evenly among {ranks} ranks: give a multiple of {ranks}"
        )
    stage_of = {layer: stage for stage, one in enumerate(ranges) for layer in range(*one)}
    for group in shared_layers(layers, copied):
        if len({stage_of[layer] for layer in group}) > 1:
            names = " and ".join(layers[layer].name for layer in sorted(group))
            raise ModelError(f"layers {names} share a weight, and are in different stages: put them into one")
    return ranges


# --- what users may give as a model -----------------------------------------------------------------


def normalize_model(model: AnyModel) -> nn.Module:
    """Returns a model that can be cut; modules and parameters are the same.

    torch.export bakes the mode into what it has traced: dropout stays on in evaluation, or off in training, and torch
    2.13 refuses `.train()` and `.eval()`. Dropout becomes a module again; where it cannot be known what the other mode
    would do (attention's own dropout, BatchNorm), the model is refused.

    Raises:
        ModelError: it is no model, its modules cannot be told apart any more, or it was exported for one size of batch.
    """
    if isinstance(model, list | tuple):
        other = next((each for each in model if not isinstance(each, nn.Module)), None)
        if other is not None or not model:
            what = f"a {type(other).__name__} is among the stages" if model else "there are no stages"
            raise ModelError(f"{what}: give a list of modules, one for each stage")
        return nn.ModuleList(model)
    if isinstance(model, ExportedProgram):
        return _with_modes(model.module())
    if isinstance(model, fx.GraphModule) and any(map(_is_aten, model.graph.nodes)):
        return _with_modes(model)
    hides = isinstance(model, torch.jit.ScriptModule | nn.DataParallel | DistributedDataParallel)
    if hides or hasattr(model, "_orig_mod"):
        raise ModelError(
            f"{type(model).__name__} hides the model's layers: give the model that it was made of; layers in it may be "
            "compiled, each by itself"
        )
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"a {type(model).__name__} is no model: give an nn.Module, or a list of them, one for each stage"
        )
    return model


def _is_aten(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload)  # noqa: SLF001


def _with_modes(exported: fx.GraphModule) -> nn.Module:
    """Returns an exported model whose dropout follows its mode."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(exported.graph, {}))
    graph.set_codegen(exported.graph._codegen)  # noqa: SLF001  (which knows how inputs and outputs are nested)
    made = fx.GraphModule(exported, graph, "Exported")
    for node in list(graph.nodes):
        if node.op == "placeholder":
            _check_dynamic_batch(node)
        elif node.target is _DROPOUT:
            made.add_module(name := f"dropout_{node.name}", nn.Dropout(node.args[1]))
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.call_module(name, (node.args[0],)))
            graph.erase_node(node)
        elif _is_aten(node):
            _check_without_mode(node)
    made.recompile()
    return made.train(bool(getattr(exported, "training", True)))


def _check_dynamic_batch(node: fx.Node) -> None:
    value: Any = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.dim() and isinstance(value.shape[0], int):
        raise ModelError(
            f"{node.name} was exported for {value.shape[0]} samples alone, and a micro-batch has fewer: "
            "torch.export.export(…, dynamic_shapes=…) with {0: torch.export.Dim.DYNAMIC} for each input, or give the "
            "model itself"
        )


def _check_without_mode(node: fx.Node) -> None:
    name = str(node.target)
    p = node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0)
    if "attention" in name and p == 0.0 and "dropout" not in name:
        return
    if "attention" in name or any(word in name for word in _BY_MODE):
        raise ModelError(
            f"{node.name} ({name}) was exported in one mode, and does something else in the other: give the model "
            "itself and not what torch.export has made of it"
        )
