"""Where a traced forward is split into layers: between one weight and the next, where all live values can be sent.

    operations   size(0) ── conv1 ── relu ── conv2 ── add(relu) ── view(size) ── head
    layers       └── conv1 ─────────────┘ └─ conv2 ─────────────────────────┘ └─ head
    live                                 │ relu and size                     │ view

A split is put where the live values have the fewest bytes, so what follows a weight stays with it. Numbers that are
live (a size, say) travel as tensors and are numbers again after it. The splits depend on the sample, so a plan keeps
them.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from samestep.errors import ModelError
from samestep.pipelines.chain_layer import ChainLayer, LayerChain, extract, preserve_state, sequential
from samestep.pipelines.tensor_meta import MAX_TENSORS
from samestep.pipelines.tracing import Trace, line_of, trace
from samestep.runtime import rng

_NUMBERS = {bool: "bool", int: "int", float: "float", torch.Size: "size"}
_TOLERANCE = 1e-5  # of a norm, on devices that add in another order each time


def split_forward(model: nn.Module, sample: Sequence[Any], ends: Sequence[int] = ()) -> LayerChain:
    """Returns the layers of an ordinary model, split at `ends` if they are given.

    Raises:
        ModelError: its forward cannot be followed, or does something else in evaluation than in training.
    """
    training, evaluation = _trace_both_modes(model, sample)
    nodes = [list(one.graph.nodes) for one in (training, evaluation)]
    _check_same_operations(model, *nodes)
    constants = training.constants | evaluation.constants
    digest = hashlib.sha256("\n".join(map(_describe_node, nodes[0])).encode()).hexdigest()
    ends, obstacles = (list(ends), []) if ends else _split_places(nodes[0], training.values, model)
    live = {place for end in ends[:-1] for place in _live_values(nodes[0], end)}
    kinds = {place: type(training.values[nodes[0][place].name]) for place in live}
    numbers = {place: _NUMBERS[kind] for place, kind in kinds.items() if kind in _NUMBERS}
    layers: list[ChainLayer] = []
    called: Counter[str] = Counter()
    for begin, end in itertools.pairwise([len(sample), *ends]):
        own = nodes[0][begin:end]
        first = next((name for node in own if (name := _weight_of(node, model))), "forward")
        called[first] += 1
        name = first if called[first] == 1 else f"{first} ({called[first]})"
        functions, used = zip(*(_compile(each, begin, end, len(sample), numbers) for each in nodes), strict=True)
        targets = list(dict.fromkeys(itertools.chain(*used)))
        home = extract(model, targets, constants)
        run = _by_mode(*functions)
        layers.append(ChainLayer(home, name, targets, run, _signature(model, own)))
    return LayerChain(model, layers, obstacles, digest, ends, constants)


def _by_mode(training: Callable[..., Any], evaluation: Callable[..., Any]) -> Callable[[nn.Module, Any], Any]:
    def run(home: nn.Module, given: Any) -> Any:
        function = training if home.training else evaluation
        return function(home, *given) if isinstance(given, tuple) else function(home, given)

    return run


def _trace_both_modes(model: nn.Module, sample: Sequence[Any]) -> tuple[Trace, Trace]:
    """Traces in training and in evaluation, until both have the same modules as leaves."""
    leaves: set[str] = set()
    with preserve_state(model):
        while True:
            known = len(leaves)
            training = trace(model.train(), sample, leaves)
            evaluation = trace(model.eval(), sample, leaves)
            if len(leaves) == known:
                return training, evaluation


def _describe_node(node: fx.Node) -> str:
    """Returns what an operation does to which others; without constants, which may differ by mode."""
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return f"{node.name} {node.op} {target} {[one.name for one in node.all_input_nodes]}"


def _check_same_operations(model: nn.Module, training: list[fx.Node], evaluation: list[fx.Node]) -> None:
    for one, other in zip(training, evaluation, strict=False):
        if _describe_node(one) != _describe_node(other):
            raise ModelError(
                f"{type(model).__name__} does something else in evaluation than in training, at "
                f"{line_of(one) or line_of(other)}: put that into a module of its own, which is then one layer"
            )
    if len(training) != len(evaluation):
        raise ModelError(f"{type(model).__name__} does more or less in evaluation than in training: it cannot be cut")


def _split_places(nodes: list[fx.Node], values: Mapping[str, Any], model: nn.Module) -> tuple[list[int], list[str]]:
    """Returns where layers end, and where no split was possible."""
    heavy = [place for place, node in enumerate(nodes) if _weight_of(node, model)]
    ends: list[int] = []
    obstacles: list[str] = []
    for first, second in itertools.pairwise(heavy):
        live = {end: _live_values(nodes, end) for end in range(first + 1, second + 1)}
        refused = {end: _cannot_send(places, nodes, values) for end, places in live.items()}
        possible = [end for end in live if refused[end] is None]
        if not possible:
            where = f"between {_weight_of(nodes[first], model)} and {_weight_of(nodes[second], model)}"
            obstacles.append(f"{where} it cannot be cut, because {refused[second]}")
            continue
        end = min(possible, key=lambda end: (sum(_nbytes(values[nodes[place].name]) for place in live[end]), -end))
        ends.append(end)
    return [*ends, len(nodes) - 1], obstacles


def _weight_of(node: fx.Node, model: nn.Module) -> str | None:
    """Returns the name of the module or parameter that makes an operation one with weights; None for others."""
    if node.op == "call_module":
        name = str(node.target)
        return name if any(True for _ in model.get_submodule(name).parameters()) else None
    read = [str(one.target) for one in node.all_input_nodes if one.op == "get_attr"]
    owned = {name for name, _ in model.named_parameters(remove_duplicate=False)} if read else set()
    return next((name for name in read if name in owned), None)


def _live_values(nodes: list[fx.Node], end: int) -> list[int]:
    """Returns the operations before `end` whose values are used from there on; what the model has is everywhere."""
    later = set(nodes[end:])
    return [
        place for place, node in enumerate(nodes[:end]) if node.op != "get_attr" and not later.isdisjoint(node.users)
    ]


def _cannot_send(live: Sequence[int], nodes: list[fx.Node], values: Mapping[str, Any]) -> str | None:
    """Returns why live values cannot be sent; None where they can."""
    for place in live:
        value = values[nodes[place].name]
        if not isinstance(value, Tensor) and type(value) not in _NUMBERS:
            return f"a {type(value).__name__} would have to be sent: {line_of(nodes[place])}"
    tensors = sum(isinstance(values[nodes[place].name], Tensor) for place in live)
    if not tensors or len(live) > MAX_TENSORS:
        return f"{len(live)} values are alive there, {tensors} of them tensors: 1 to {MAX_TENSORS} can be sent"
    return None


def _nbytes(value: Any) -> int:
    return value.nbytes if isinstance(value, Tensor) else 8


def _signature(model: nn.Module, nodes: list[fx.Node]) -> str:
    """Returns what is equal for layers that do the same with other weights."""
    nodes = [node for node in nodes if node.op != "get_attr"]
    place_of = {node: place for place, node in enumerate(nodes)}

    def describe(node: fx.Node) -> str:
        args = fx.map_arg((node.args, node.kwargs), lambda one: f"%{place_of.get(one, -1)}")
        return f"{model.get_submodule(str(node.target)) if node.op == 'call_module' else node.target} {args}"

    return "\n".join(map(describe, nodes))


def _compile(
    nodes: list[fx.Node], begin: int, end: int, inputs: int, numbers: Mapping[int, str]
) -> tuple[Callable[..., Any], list[str]]:
    """Returns the operations from `begin` to `end` as a function of what is live before them, and its targets."""
    graph, copies, targets = fx.Graph(), dict[fx.Node, fx.Node](), list[str]()

    def copy(node: fx.Node) -> fx.Node:
        if node not in copies:
            if node.op in {"call_module", "get_attr"}:
                targets.append(str(node.target))
            copies[node] = graph.node_copy(node, copy)
        return copies[node]

    given = range(inputs) if begin == inputs else _live_values(nodes, begin)
    for place in given:
        copies[nodes[place]] = graph.placeholder(nodes[place].name)
    for place in given:
        if place in numbers and begin != inputs:
            copies[nodes[place]] = graph.call_function(to_number, (copies[nodes[place]], numbers[place]))
    for node in nodes[begin:end]:
        if node.op != "get_attr":  # which is read where it is used
            copy(node)
    if end == len(nodes) - 1:
        graph.output(fx.map_arg(nodes[end].args[0], copy))
    else:
        live = _live_values(nodes, end)
        like = next(copies[nodes[place]] for place in live if place not in numbers)
        found = [copy(nodes[place]) for place in live]
        for position, place in enumerate(live):
            if place in numbers:
                found[position] = graph.call_function(to_tensor, (found[position], like))
        graph.output(tuple(found) if len(found) > 1 else found[0])
    code = graph.python_code("self")
    names: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, "<a layer of the model's forward>", "exec"), names)  # noqa: S102  (fx wrote it)
    return names["forward"], targets


def to_tensor(value: Any, like: Tensor) -> Tensor:
    """Returns a number, or a size, as a tensor that can be sent."""
    dtype = torch.float64 if isinstance(value, float) else torch.int64
    return torch.tensor(value, dtype=dtype, device=like.device)


def to_number(tensor: Tensor, kind: str) -> Any:
    """Returns what :func:`to_tensor` was given.

    >>> to_number(to_tensor(torch.Size([2, 3]), torch.ones(1)), "size")
    torch.Size([2, 3])
    """
    value = tensor.tolist()
    return {"bool": bool, "int": int, "float": float, "size": torch.Size}[kind](value)


# --- whether the layers are still the model ---------------------------------------------------------


def check_equivalence(model: nn.Module, layers: Sequence[nn.Module], sample: Sequence[Tensor]) -> None:
    """Compares layers, called one after another, with the model's own forward: values, and gradients in training.

    Model and layers stay as they are.

    Raises:
        ModelError: the model gives something else than tensors, or they differ; what a forward does beside its
            operations (a precision, a block without gradients) is not followed.
    """
    parameters = [each for each in model.parameters() if each.requires_grad]
    with preserve_state(model, *layers):
        for training in (True, False):
            for one in (model, *layers):
                one.train(training)
            expected = _outputs(model, sample, model, parameters if training else [])
            found = _outputs(sequential(layers), sample, model, parameters if training else [])
            if len(expected) != len(found) or not all(map(_close, expected, found)):
                what = "values or gradients in training" if training else "values in evaluation"
                raise ModelError(
                    f"cut into layers, {type(model).__name__} gives other {what}: its forward does something beside "
                    "its operations (autocast, no_grad, random numbers of its own), which belongs into a module of its "
                    "own"
                )


def _outputs(
    call: Callable[..., Any], sample: Sequence[Tensor], model: nn.Module, parameters: Sequence[Tensor]
) -> list[Tensor]:
    """Returns the tensors that a call gives, and their gradients; buffers stay as they are."""
    with preserve_state(model), rng.keep_generators():
        torch.manual_seed(0)
        given = call(*sample)
        outputs: list[Tensor] = list(given) if isinstance(given, tuple | list) else [given]
        if not all(isinstance(each, Tensor) for each in outputs):
            name, what = type(model).__name__, type(given).__name__
            raise ModelError(f"{name} gives a {what}: in a pipeline a tensor is given, or several in a tuple")
        roots = [each for each in outputs if each.requires_grad]
        gradients: Sequence[Tensor | None] = ()
        if parameters and roots:
            ones = [torch.ones_like(each) for each in roots]
            gradients = torch.autograd.grad(roots, parameters, ones, allow_unused=True)
    found = [*outputs, *(each if each is not None else torch.zeros(()) for each in gradients)]
    return [each.detach() for each in found]


def _close(expected: Tensor, found: Tensor) -> bool:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    difference = (expected.double() - found.double()).norm()
    return torch.equal(expected, found) or bool(difference <= _TOLERANCE * expected.double().norm())
