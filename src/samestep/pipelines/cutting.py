"""A traced forward as a chain of layers: cut where all that is alive can be sent, between one weight and the next.

    operations   size(0) ── conv1 ── relu ── conv2 ── add(relu) ── view(size) ── head
    layers       └── conv1 ─────────────┘ └─ conv2 ─────────────────────────┘ └─ head
    alive                                │ relu and size                     │ view

A cut is put where the fewest bytes are alive, so what follows a weight stays with it. Numbers that are alive (a size,
say) travel as tensors and are numbers again behind the cut. The cuts depend on the sample; whoever cuts the same model
without one is told where, and what was answered (see :mod:`samestep.pipelines.tracing`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor, fx, nn

from samestep.errors import ModelError
from samestep.pipelines.tracing import Trace, line_of, trace

__all__: list[str] = []

MOST_ALIVE = 8  # tensors across a cut, as one message takes
_NUMBERS = {bool: "bool", int: "int", float: "float", torch.Size: "size"}
Call = Callable[[Any], Any]  # what one layer gives -> what the next gives; several tensors are a tuple


@dataclass(frozen=True)
class Recipe:
    """How a model was cut: plain data, with which every rank cuts its own in the same way.

    Attributes:
        inputs: that the forward takes.
        leaves: modules that were not looked into.
        answers: to what the forward asked, in training and in evaluation.
        ends: by layer, the operation behind its last.
        numbers: operation -> kind, of those alive across a cut that are numbers.
        digest: of the operations.
    """

    inputs: int
    leaves: tuple[str, ...]
    answers: tuple[tuple[Any, ...], tuple[Any, ...]]
    ends: tuple[int, ...]
    numbers: dict[int, str]
    digest: str

    def told(self) -> dict[str, Any]:
        """Returns it as JSON holds it."""
        return asdict(self) | {"numbers": list(self.numbers.items())}

    @classmethod
    def heard(cls, told: dict[str, Any]) -> Self:
        """Returns what was told."""
        training, evaluating = told["answers"]
        return cls(
            told["inputs"],
            tuple(told["leaves"]),
            (tuple(training), tuple(evaluating)),
            tuple(told["ends"]),
            dict(told["numbers"]),
            told["digest"],
        )


@dataclass(frozen=True)
class Stretch:
    """Operations that follow one another, as functions of a module that has what they use under the model's names.

    Attributes:
        name: of the first module in it that has a weight.
        targets: names of the modules, parameters and buffers that it uses.
        training: its function there: that module, and what is alive before -> what is alive behind.
        evaluating: likewise.
        likeness: what it does, the same for stretches that do the same with other weights.
    """

    name: str
    targets: tuple[str, ...]
    training: Callable[..., Any]
    evaluating: Callable[..., Any]
    likeness: str

    def call(self, home: nn.Module, given: Any) -> Any:
        """Computes it with the modules of `home`, in its mode."""
        do = self.training if home.training else self.evaluating
        return do(home, *given) if isinstance(given, tuple) else do(home, given)


class Segment(nn.Module):
    """A stretch as a layer by itself."""

    named_in_full = True  # its parameters have the names that they have in the model

    def __init__(self, traced: Traced, stretch: Stretch) -> None:
        super().__init__()
        self.stretch, self.likeness = stretch, stretch.likeness
        traced.furnish(self, stretch.targets)

    def forward(self, given: Any) -> Any:
        return self.stretch.call(self, given)


class Traced:
    """An ordinary model as a chain.

    Args:
        model: any whose forward can be followed.
        sample: inputs, of one micro-batch; None where there is a recipe.
        recipe: of the same model, cut elsewhere.

    Attributes:
        recipe: how it was cut.
        layers: names and modules, called one after another; each has its parameters under the model's names.
        obstacles: what stands in the way of more layers, in words.

    Raises:
        ModelError: its forward cannot be followed, does something else in evaluation, or is another than the recipe's.
    """

    def __init__(self, model: nn.Module, sample: Sequence[Any] | None, recipe: Recipe | None = None) -> None:
        self._model = model
        self._order = {name: place for place, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
        inputs, leaves, answers = (
            (len(sample or ()), set[str](), ((), ()))
            if recipe is None
            else (recipe.inputs, set(recipe.leaves), recipe.answers)
        )
        both = _in_both_modes(model, inputs, sample, answers, leaves)
        self.obstacles: list[str] = []
        self._constants = {name: value for one in both for name, value in one.constants.items()}
        nodes = [_operations(one.graph) for one in both]
        _alike(model, *nodes)
        digest = hashlib.sha256("\n".join(map(_shown, nodes[0])).encode()).hexdigest()
        if recipe is not None and digest != recipe.digest:
            raise ModelError(
                f"{type(model).__name__}'s forward is not what it was where the plan was made: all ranks must have one "
                "model, of one size"
            )
        if recipe is None:
            ends, numbers, self.obstacles = _cuts(nodes[0], both[0].values, model)
            told = (tuple(both[0].answers), tuple(both[1].answers))
            recipe = Recipe(inputs, tuple(sorted(leaves)), told, ends, numbers, digest)
        self.recipe: Recipe | None = recipe
        self._stretches = list(_stretches(model, nodes, recipe))
        self.layers: list[tuple[str, nn.Module]] = [(one.name, Segment(self, one)) for one in self._stretches]

    def part(self, begin: int, end: int) -> tuple[nn.Module, list[Call]]:
        """Returns a module with what some layers use, under the model's names, and what computes each of them."""
        own = self._stretches[begin:end]
        home = nn.Module()
        self.furnish(home, {name for one in own for name in one.targets})
        return home, [partial(one.call, home) for one in own]

    def furnish(self, home: nn.Module, targets: Iterable[str]) -> None:
        """Gives a module what the model has under some names, in its order: the same modules and tensors."""
        for target in sorted(targets, key=self._rank):
            *path, name = target.split(".")
            place, source = home, self._model
            for one in path:
                source = getattr(source, one)
                if one not in place._modules:  # noqa: SLF001
                    place.add_module(one, nn.Module())
                place = getattr(place, one)
                if place is source:  # the whole of it is there already
                    break
            else:
                self._attach(place, name, source, target)
        home.train(self._model.training)

    def _rank(self, target: str) -> tuple[int, int]:
        """The place of a name in the model, whose order a part keeps."""
        if target in self._order:
            return self._order[target], -1
        owner, _, name = target.rpartition(".")
        return self._order[owner], [*vars(self._model.get_submodule(owner)).get("_parameters", {}), name].index(name)

    def _attach(self, place: nn.Module, name: str, source: nn.Module, target: str) -> None:
        if target in self._constants:
            place.register_buffer(name, self._constants[target], persistent=False)
            return
        value = getattr(source, name)
        if isinstance(value, nn.Module):
            place.add_module(name, value)
        elif isinstance(value, nn.Parameter):
            place.register_parameter(name, value)
        elif name in source._buffers:  # noqa: SLF001
            stays = name not in source._non_persistent_buffers_set  # noqa: SLF001
            place.register_buffer(name, value, persistent=stays)
        else:
            setattr(place, name, value)


def _in_both_modes(
    model: nn.Module, inputs: int, sample: Sequence[Any] | None, answers: Any, leaves: set[str]
) -> tuple[Trace, Trace]:
    """Returns the forward in training and in evaluation, with the same modules as leaves; modes stay as they are."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        while True:
            known = len(leaves)
            model.train()
            training = trace(model, inputs, sample, answers[0], leaves)
            model.eval()
            evaluating = trace(model, inputs, sample, answers[1], leaves)
            if len(leaves) == known:
                return training, evaluating
    finally:
        for module, mode in modes:
            module.training = mode


def _operations(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.nodes)


def _shown(node: fx.Node) -> str:
    """Returns what an operation does to which others; without constants, which may differ by mode."""
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return f"{node.name} {node.op} {target} {[one.name for one in node.all_input_nodes]}"


def _alike(model: nn.Module, training: list[fx.Node], evaluating: list[fx.Node]) -> None:
    for one, other in zip(training, evaluating, strict=False):
        if _shown(one) != _shown(other):
            where = line_of(one) or line_of(other)
            raise ModelError(
                f"{type(model).__name__} does something else in evaluation than in training, at {where}: put that into "
                "a module of its own, which is then one layer"
            )
    if len(training) != len(evaluating):
        raise ModelError(f"{type(model).__name__} does more or less in evaluation than in training: it cannot be cut")


# --- where to cut -----------------------------------------------------------------------------------


def _cuts(
    nodes: list[fx.Node], values: dict[str, Any], model: nn.Module
) -> tuple[tuple[int, ...], dict[int, str], list[str]]:
    """Returns where layers end, which operations that are alive there give numbers, and where no cut was possible."""
    heavy = [place for place, node in enumerate(nodes) if _weight_of(node, model)]
    ends: list[int] = []
    numbers: dict[int, str] = {}
    obstacles: list[str] = []
    for first, second in pairwise(heavy):
        possible = {end: _alive(nodes, end) for end in range(first + 1, second + 1)}
        refused = {end: _why_not(alive, nodes, values) for end, alive in possible.items()}
        found = [end for end in possible if refused[end] is None]
        if not found:
            where = f"between {_weight_of(nodes[first], model)} and {_weight_of(nodes[second], model)}"
            obstacles.append(f"{where} it cannot be cut, because {refused[second]}")
            continue
        end = min(found, key=lambda end: (sum(_size(values[nodes[place].name]) for place in possible[end]), -end))
        ends.append(end)
        alive = {place: values[nodes[place].name] for place in possible[end]}
        numbers |= {place: _NUMBERS[type(value)] for place, value in alive.items() if not isinstance(value, Tensor)}
    return (*ends, len(nodes) - 1), numbers, obstacles


def _weight_of(node: fx.Node, model: nn.Module) -> str | None:
    """Returns the name of the module or parameter that makes an operation one with weights; None for others."""
    if node.op == "call_module":
        name = str(node.target)
        return name if any(True for _ in model.get_submodule(name).parameters()) else None
    read = [str(one.target) for one in node.all_input_nodes if one.op == "get_attr"]
    owned = {name for name, _ in model.named_parameters(remove_duplicate=False)} if read else set()
    return next((name for name in read if name in owned), None)


def _alive(nodes: list[fx.Node], end: int) -> list[int]:
    """Returns the operations before `end` whose values are used from there on; what the model has is everywhere."""
    behind = set(nodes[end:])
    return [
        place for place, node in enumerate(nodes[:end]) if node.op != "get_attr" and not behind.isdisjoint(node.users)
    ]


def _why_not(alive: Sequence[int], nodes: list[fx.Node], values: dict[str, Any]) -> str | None:
    """Returns why what is alive cannot be sent; None where it can."""
    for place in alive:
        value = values[nodes[place].name]
        if not isinstance(value, Tensor) and type(value) not in _NUMBERS:
            return f"a {type(value).__name__} would have to be sent: {line_of(nodes[place])}"
    tensors = sum(isinstance(values[nodes[place].name], Tensor) for place in alive)
    if not tensors or len(alive) > MOST_ALIVE:
        return f"{len(alive)} values are alive there, {tensors} of them tensors: 1 to {MOST_ALIVE} can be sent"
    return None


def _size(value: Any) -> int:
    return value.nbytes if isinstance(value, Tensor) else 8


# --- what was cut -----------------------------------------------------------------------------------


def _stretches(model: nn.Module, modes: list[list[fx.Node]], recipe: Recipe) -> Iterator[Stretch]:
    begin, used = recipe.inputs, set[str]()
    for end in recipe.ends:
        training, evaluating = (_Function(nodes, begin, end, recipe) for nodes in modes)
        own = modes[0][begin:end]
        first = next((name for node in own if (name := _weight_of(node, model))), "forward")
        name = next(name for name in _names(first) if name not in used)
        used.add(name)
        targets = tuple(dict.fromkeys(training.targets + evaluating.targets))
        yield Stretch(name, targets, training.compiled(), evaluating.compiled(), _likeness(model, own))
        begin = end


def _names(first: str) -> Iterator[str]:
    """Yields names for a stretch; a module that is called twice has two."""
    yield first
    yield from (f"{first} ({number})" for number in range(2, 1 << 30))


def _likeness(model: nn.Module, nodes: list[fx.Node]) -> str:
    """Returns what is the same for stretches that do the same with other weights."""
    nodes = [node for node in nodes if node.op != "get_attr"]
    place_of = {node: place for place, node in enumerate(nodes)}

    def told(node: fx.Node) -> str:
        given = fx.map_arg((node.args, node.kwargs), lambda one: f"%{place_of.get(one, -1)}")
        if node.op == "call_module":
            return f"{model.get_submodule(str(node.target))} {given}"
        return f"{node.target} {given}"

    return "\n".join(map(told, nodes))


class _Function:
    """The operations from `begin` to `end` as a function."""

    def __init__(self, nodes: list[fx.Node], begin: int, end: int, recipe: Recipe) -> None:
        self.targets: list[str] = []
        self._graph, self._copies = fx.Graph(), dict[fx.Node, fx.Node]()
        given = range(recipe.inputs) if begin == recipe.inputs else _alive(nodes, begin)
        holders = [(nodes[place], self._graph.placeholder(nodes[place].name)) for place in given]
        self._copies |= dict(holders)
        for place, (node, holder) in zip(given, holders, strict=True):
            if place in recipe.numbers and begin != recipe.inputs:
                self._copies[node] = self._graph.call_function(number, (holder, recipe.numbers[place]))
        for node in nodes[begin:end]:
            if node.op != "get_attr":  # which is read where it is used
                self._copied(node)
        if end == len(nodes) - 1:
            self._graph.output(fx.map_arg(nodes[end].args[0], self._copied))
            return
        alive = _alive(nodes, end)
        like = next(self._copies[nodes[place]] for place in alive if place not in recipe.numbers)
        found = [self._copied(nodes[place]) for place in alive]
        for position, place in enumerate(alive):
            if place in recipe.numbers:
                found[position] = self._graph.call_function(as_tensor, (found[position], like))
        self._graph.output(tuple(found) if len(found) > 1 else found[0])

    def _copied(self, node: fx.Node) -> fx.Node:
        if node not in self._copies:
            if node.op in {"call_module", "get_attr"}:
                self.targets.append(str(node.target))
            self._copies[node] = self._graph.node_copy(node, self._copied)
        return self._copies[node]

    def compiled(self) -> Callable[..., Any]:
        """Returns it as Python."""
        code = self._graph.python_code("self")
        found: dict[str, Any] = dict(code.globals)
        exec(compile(code.src, "<a stretch of the model's forward>", "exec"), found)  # noqa: S102  (fx wrote it)
        call: Callable[..., Any] = found["forward"]
        return call


def as_tensor(value: Any, like: Tensor) -> Tensor:
    """Returns a number, or a size, as a message can hold it."""
    kind = torch.float64 if isinstance(value, float) else torch.int64
    return torch.tensor(value, dtype=kind, device=like.device)


def number(tensor: Tensor, kind: str) -> Any:
    """Returns what :func:`as_tensor` was given.

    >>> number(as_tensor(torch.Size([2, 3]), torch.ones(1)), "size")
    torch.Size([2, 3])
    """
    value = tensor.tolist()
    return {"bool": bool, "int": int, "float": float, "size": torch.Size}[kind](value)
