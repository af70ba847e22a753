"""What may be given as a model: modules by hand, one stage each; what torch.export has traced; anything else as it is.

    [encoder, middle, decoder]                 stages as they are: each is called with what the one before it gives,
    forward(x) ── (h, skip) ──▶ forward(h, skip) ──▶ …        a tuple as several arguments, as torch's stages are

torch.export bakes the mode into what it has traced: dropout stays on in evaluation, or off in training, and torch 2.13
refuses `.train()` and `.eval()`. Its operations are told `training=`, and p, so dropout can be a module again; where
that is not enough to know what the other mode would do (attention's own dropout, BatchNorm), it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.nn.parallel import DistributedDataParallel

from samestep.errors import ModelError

__all__: list[str] = []

Given = nn.Module | ExportedProgram | Sequence[nn.Module]


_DROPOUT = torch.ops.aten.dropout.default
_BY_MODE = ("dropout", "batch_norm", "rrelu", "instance_norm", "bernoulli")  # in the names of operations that have one


def opened(model: Given) -> nn.Module:
    """Returns a model that can be cut; modules and parameters are the same.

    Raises:
        ModelError: it is none, or its modules cannot be told apart any more.
    """
    if isinstance(model, list | tuple):
        strange = next((each for each in model if not isinstance(each, nn.Module)), None)
        if strange is not None or not model:
            what = f"a {type(strange).__name__} is among the stages" if model else "there are no stages"
            raise ModelError(f"{what}: give a list of modules, one for each stage")
        return nn.ModuleList(model)
    if isinstance(model, ExportedProgram):
        return _in_any_mode(model.module())
    if isinstance(model, fx.GraphModule) and any(map(_is_of_aten, model.graph.nodes)):
        return _in_any_mode(model)
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


def _is_of_aten(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload)  # noqa: SLF001


def _in_any_mode(traced: fx.GraphModule) -> nn.Module:
    """Returns a traced model whose dropout is that of its mode.

    Raises:
        ModelError: it was traced for one size of batch, or has operations of one mode alone.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(traced.graph, {}))
    graph.set_codegen(traced.graph._codegen)  # noqa: SLF001  (which knows how inputs and outputs are nested)
    made = fx.GraphModule(traced, graph, "Exported")
    for node in list(graph.nodes):
        if node.op == "placeholder":
            _check_size(node)
        elif node.target is _DROPOUT:
            made.add_module(name := f"dropout_{node.name}", nn.Dropout(node.args[1]))
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.call_module(name, (node.args[0],)))
            graph.erase_node(node)
        elif _is_of_aten(node):
            _check_mode(node)
    made.recompile()
    return made.train(bool(getattr(traced, "training", True)))


def _check_size(node: fx.Node) -> None:
    value: Any = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.dim() and isinstance(value.shape[0], int):
        raise ModelError(
            f"{node.name} was exported for {value.shape[0]} samples alone, and a micro-batch has fewer: "
            "torch.export.export(…, dynamic_shapes=…) with {0: torch.export.Dim.DYNAMIC} for each input, or give the "
            "model itself"
        )


def _check_mode(node: fx.Node) -> None:
    name = str(node.target)
    p = node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0)
    if "attention" in name and p == 0.0 and "dropout" not in name:
        return
    if "attention" in name or any(word in name for word in _BY_MODE):
        raise ModelError(
            f"{node.name} ({name}) was exported in one mode, and does something else in the other: give the model "
            "itself and not what torch.export has made of it"
        )


class Spread(nn.Module):
    """A module as a layer, which is given one argument: what comes in a tuple are several to the module.

    Args:
        name: under which the model has it.
        module: whose parameters keep their names.
    """

    named_in_full = True

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.add_module(name, module)
        self._name = name
        self.likeness = type(module)

    def forward(self, given: Any) -> Any:
        module = self._modules[self._name]
        assert module is not None
        return module(*given) if isinstance(given, tuple) else module(given)
