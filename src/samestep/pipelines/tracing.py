"""What an ordinary model's forward does, operation by operation, told by running it once on a sample.

    def forward(self, x):                        x                   placeholder
        b = x.size(0)                            size                x.size(0)                    a number
        x = F.relu(self.conv(x))        ──▶      conv, relu          self.conv(x), relu(conv)
        return self.head(x.view(b, -1))          view, head          …                            output

Layers of torch.nn are not looked into, but for its Transformers; nor is a module whose forward cannot be followed. What
the forward decides by shapes (`if t > 64`, `range(t)`) it decides in every run as in this one: a check is put there,
and a batch that would decide otherwise is an error. What it decides by values cannot be followed: the line is named.

Tracing is torch.fx's; that leaves what a forward asks of a number without an answer.
"""

from __future__ import annotations

import functools
import operator
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from samestep.errors import ModelError
from samestep.launch.failure import is_user_file, own_line, relative_path
from samestep.runtime import rng

__all__: list[str] = []

_MAKERS = (
    "arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "tensor",
    "zeros",
)  # fmt: skip
_QUESTIONS: dict[str, Callable[[Any], Any]] = {"bool": bool, "int": int, "float": float, "len": len}
_FRAME = re.compile(r'File "(.+)", line (\d+), in .*\n\s+(.*)')


@dataclass
class Trace:
    """A forward.

    Attributes:
        graph: its operations.
        answers: what it was told of its numbers, in order.
        values: of the operations, if it ran on a sample.
        constants: tensors that it makes by itself, under names that the graph has for them.
    """

    graph: fx.Graph
    answers: list[Any]
    values: dict[str, Any]
    constants: dict[str, Tensor]


def trace(
    model: nn.Module, inputs: int, sample: Sequence[Any] | None, answers: Sequence[Any], leaves: set[str]
) -> Trace:
    """Follows a model's forward in its present mode; the model stays as it is.

    Args:
        model: whose forward takes tensors.
        inputs: how many it is given; the others have their defaults.
        sample: for them; None where `answers` say what it would.
        answers: of another trace of the same forward.
        leaves: modules that are not looked into; those that cannot be followed are added.

    Raises:
        ModelError: the forward decides by values, or keeps values of a batch.
    """
    while True:
        tracer = _Tracer(inputs, sample, list(answers), leaves)
        try:
            with _left_as_it_is(model) as constants, rng.keep_generators(), torch.no_grad():
                graph = tracer.trace(model)
        except ModelError:
            raise
        except Exception as error:  # anything may come of a forward that meets proxies
            inside = tracer.failed_in
            if not inside or inside in leaves:
                raise ModelError(_why_not(model, error)) from error
            leaves.add(inside)
        else:
            return Trace(graph, tracer.answers, tracer.values, constants)


def line_of(node: fx.Node) -> str:
    """Returns the line of the user's code that a node comes from, as file:line and text, if one is known."""
    frames = _FRAME.findall(node.stack_trace or "")
    if not frames:
        return ""
    file, number, text = ([frame for frame in frames if is_user_file(frame[0])] or frames)[-1]
    return f"{relative_path(file)}:{number}  {text.strip()}"


def as_before(value: Any, ask: str, answer: Any, where: str) -> None:
    """Stands in a graph where the forward has asked something of a number, or how long something is.

    Raises:
        ModelError: the answer would be another now.
    """
    found = _QUESTIONS[ask](value)
    if found != answer:
        raise ModelError(
            f"{where}: this decides by a shape, which was {answer} where the model was cut, and is {found} here: give "
            "all batches one such shape, or put that line into a module of its own"
        )


class _Proxy(fx.Proxy):
    """A value that is followed; asked for a number, it answers."""

    tracer: _Tracer

    def __bool__(self) -> bool:
        return bool(self.tracer.answer(self, "bool"))

    def __int__(self) -> int:
        return int(self.tracer.answer(self, "int"))

    def __index__(self) -> int:
        return int(self.tracer.answer(self, "int"))

    def __float__(self) -> float:
        return float(self.tracer.answer(self, "float"))

    def __len__(self) -> int:
        return int(self.tracer.answer(self, "len"))

    def __iter__(self) -> Iterator[fx.Proxy]:
        return self.tracer.iter(self)


class _Tracer(fx.Tracer):
    """Follows one forward, and computes it meanwhile where there is a sample."""

    def __init__(self, inputs: int, sample: Sequence[Any] | None, answers: list[Any], leaves: set[str]) -> None:
        super().__init__()
        self.record_stack_traces = True
        self.answers: list[Any] = []
        self.values: dict[str, Any] = {}
        self.failed_in = ""
        self._inputs, self._sample, self._leaves = inputs, sample, leaves
        self._known = answers
        self.computing = False  # what is called now is not followed

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        stacked = type(m) in {nn.Transformer, *_STACKS}
        return module_qualified_name in self._leaves or (
            not stacked and super().is_leaf_module(m, module_qualified_name)
        )

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        del is_module, concrete_args
        given = [self.create_proxy("placeholder", f"input_{place}", (), {}) for place in range(self._inputs)]
        return root_fn, [self.root, *given]

    def trace(self, root: Any, concrete_args: Any = None) -> fx.Graph:
        with _followed_makers(self):
            return super().trace(root, concrete_args)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.computing:
            return forward(*args, **kwargs)
        if type(m) in _STACKS:
            forward = functools.partial(_STACKS[type(m)], m)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:  # goes on; `trace` wants to know in which module it began
            self.failed_in = self.failed_in or self.path_of_module(m)
            raise

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val if self.computing else super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any) -> Any:
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **named)
        if self._sample is not None and kind != "output":
            self.computing = True
            try:
                self.values[proxy.node.name] = self._computed(proxy.node)
            finally:
                self.computing = False
        return proxy

    def _computed(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return (self._sample or ())[int(str(node.target).rpartition("_")[2])]
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._value)
        if node.op == "call_function":
            return node.target(*args, **kwargs)  # type: ignore[operator]
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        found = self._attribute(str(node.target))
        return found if node.op == "get_attr" else found(*args, **kwargs)

    def _value(self, node: fx.Node) -> Any:
        return self._attribute(str(node.target)) if node.op == "get_attr" else self.values[node.name]

    def _attribute(self, target: str) -> Any:
        return functools.reduce(getattr, target.split("."), self.root)

    def to_bool(self, obj: fx.Proxy) -> bool:
        return bool(self.answer(obj, "bool"))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        places = range(int(self.answer(obj, "len")))
        return iter([self.create_proxy("call_function", operator.getitem, (obj, place), {}) for place in places])

    def answer(self, proxy: fx.Proxy, ask: str) -> Any:
        """Returns what a number is, and has it checked in every run."""
        if self._sample is None:
            answer = self._known[len(self.answers)]
        else:
            value = self.values[proxy.node.name]
            if isinstance(value, Tensor) and ask != "len":
                raise _DecidesByValueError
            answer = _QUESTIONS[ask](value)
        self.answers.append(answer)
        checked = self.create_proxy("call_function", as_before, (proxy, ask, answer, ""), {})
        checked.node.args = (proxy.node, ask, answer, line_of(checked.node))
        return answer


def _encoded(
    encoder: Any, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool | None = None
) -> Any:
    """What an nn.TransformerEncoder does, without looking whether a mask's values are causal."""
    for layer in encoder.layers:
        src = layer(src, src_mask=mask, src_key_padding_mask=src_key_padding_mask, is_causal=bool(is_causal))
    return src if encoder.norm is None else encoder.norm(src)


def _decoded(decoder: Any, tgt: Any, memory: Any, *masks: Any, tgt_is_causal: bool | None = None, **named: Any) -> Any:
    """What an nn.TransformerDecoder does, likewise."""
    names = ("tgt_mask", "memory_mask", "tgt_key_padding_mask", "memory_key_padding_mask")
    named |= dict(zip(names, masks, strict=False))
    for layer in decoder.layers:
        tgt = layer(tgt, memory, tgt_is_causal=bool(tgt_is_causal), **named)
    return tgt if decoder.norm is None else decoder.norm(tgt)


_STACKS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.TransformerEncoder: _encoded,
    nn.TransformerDecoder: _decoded,
}


class _DecidesByValueError(Exception):
    """The forward asks what a tensor holds."""


def _why_not(model: nn.Module, error: Exception) -> str:
    where, source = own_line(traceback.extract_tb(error.__traceback__))
    at = f" at {where}  {source}" if where else ""
    by = "decides by the values of a tensor" if isinstance(error, _DecidesByValueError) else "cannot be followed"
    told = "" if isinstance(error, _DecidesByValueError) else f" ({type(error).__name__}: {str(error)[:120]})"
    return (
        f"{type(model).__name__} {by}{at}{told}: put that into a module of its own, which is then one layer, or the "
        "layers into an nn.Sequential"
    )


@contextmanager
def _followed_makers(tracer: _Tracer) -> Iterator[None]:
    """Functions that make tensors of numbers are followed too; fx follows those that take tensors."""

    def followed(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def call(*args: Any, **kwargs: Any) -> Any:
            if tracer.computing:
                return make(*args, **kwargs)
            return tracer.create_proxy("call_function", make, args, kwargs)

        return call

    makers = {name: getattr(torch, name) for name in _MAKERS}
    for name, make in makers.items():
        setattr(torch, name, followed(make))
    try:
        yield
    finally:
        for name, make in makers.items():
            setattr(torch, name, make)


@dataclass
class _Attributes:
    """Those of one module."""

    module: nn.Module
    own: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.own = dict(vars(self.module))
        self.kept = {name: dict(vars(self.module)[name]) for name in ("_parameters", "_buffers", "_modules")}

    def restore(self) -> Iterator[tuple[str, Any]]:
        """Sets all back; yields what was assigned."""
        now = dict(vars(self.module))
        yield from ((name, value) for name, value in now.items() if self.own.get(name) is not value)
        for name, before in self.kept.items():
            yield from ((one, value) for one, value in now[name].items() if before.get(one) is not value)
            now[name].clear()
            now[name].update(before)
        vars(self.module).clear()
        vars(self.module).update(self.own)


@contextmanager
def _left_as_it_is(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Sets back what the forward assigns to attributes; yields the tensors that fx has put there.

    Raises:
        ModelError: it assigns what depends on its inputs.
    """
    before = [_Attributes(module) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    constants: dict[str, Tensor] = {}
    assigned: list[tuple[nn.Module, str, Any]] = []
    try:
        yield constants
    finally:
        for one in before:
            assigned += [(one.module, name, value) for name, value in one.restore()]
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    for module, name, value in assigned:
        if isinstance(value, fx.Proxy):
            raise ModelError(
                f"{type(module).__name__}'s forward keeps a value of the batch in self.{name}, which other stages "
                "would not see: return it instead"
            )
        if name.startswith("_tensor_constant") and isinstance(value, Tensor):
            constants[name] = value
