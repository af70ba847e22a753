"""What an ordinary model's forward does, operation by operation, found by running it once on a sample.

    def forward(self, x):                        x                   placeholder
        b = x.size(0)                            size                x.size(0)                    a number
        x = F.relu(self.conv(x))        ──▶      conv, relu          self.conv(x), relu(conv)
        return self.head(x.view(b, -1))          view, head          …                            output

Layers of torch.nn are leaves, except its Transformers; so is a module whose forward cannot be followed. What the
forward decides by shapes (`if t > 64`, `range(t)`) is fixed as in this run: a guard is put there, and a batch that
would decide otherwise is an error. What it decides by values cannot be followed: the line is named.

Tracing is torch.fx's, which does not answer what a forward asks of a number.
"""

from __future__ import annotations

import functools
import operator
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from samestep.errors import ModelError
from samestep.launch.rank.user_code import is_user_file, own_line, relative_path
from samestep.pipelines.chain_layer import preserve_state
from samestep.runtime import rng

FACTORIES = (
    "arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "tensor",
    "zeros",
)  # fmt: skip
_QUESTIONS: dict[str, Callable[[Any], Any]] = {"bool": bool, "int": int, "float": float, "len": len}
_FRAME = re.compile(r'File "(.+)", line (\d+), in .*\n\s+(.*)')


@dataclass
class Trace:
    graph: fx.Graph  # its operations
    values: dict[str, Any]  # of the operations on the sample, by name
    constants: dict[str, Tensor]  # tensors that it creates, under names that the graph has for them


def trace(model: nn.Module, sample: Sequence[Any], leaves: set[str]) -> Trace:
    """Follows a model's forward in its present mode; the model stays as it is.

    Of `leaves` the forward is not followed; the names of modules that cannot be followed are added to them.
    """
    while True:
        tracer = _Tracer(sample, leaves)
        try:
            with _restore_attributes(model) as constants, rng.keep_generators(), torch.no_grad():
                graph = tracer.trace(model)
        except ModelError:
            raise
        except Exception as error:  # a forward that meets proxies may raise anything
            inside = tracer.failed_in
            if not inside or inside in leaves:
                raise ModelError(_reason(model, error)) from error
            leaves.add(inside)
        else:
            return Trace(graph, tracer.values, constants)


def line_of(node: fx.Node) -> str:
    """Returns the line of the user's code that a node comes from, as file:line and text, if one is known."""
    frames = _FRAME.findall(node.stack_trace or "")
    if not frames:
        return ""
    file, number, text = ([frame for frame in frames if is_user_file(frame[0])] or frames)[-1]
    return f"{relative_path(file)}:{number}  {text.strip()}"


def guard(value: Any, ask: str, answer: Any, where: str) -> None:
    """Stands in a graph where the forward has asked something of a number, or how long something is."""
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

    __index__ = __int__

    def __float__(self) -> float:
        return float(self.tracer.answer(self, "float"))

    def __len__(self) -> int:
        return int(self.tracer.answer(self, "len"))

    def __iter__(self) -> Iterator[fx.Proxy]:
        return self.tracer.iter(self)


class _Tracer(fx.Tracer):
    """Follows one forward, and computes it on the sample meanwhile."""

    def __init__(self, sample: Sequence[Any], leaves: set[str]) -> None:
        super().__init__()
        self.record_stack_traces = True
        self.values: dict[str, Any] = {}
        self.failed_in = ""
        self._sample, self._leaves = sample, leaves
        self.computing = False  # what is called now is not followed

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        stacked = type(m) in {nn.Transformer, *_STACKS}
        return module_qualified_name in self._leaves or (
            not stacked and super().is_leaf_module(m, module_qualified_name)
        )

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        del is_module, concrete_args
        inputs = [self.create_proxy("placeholder", f"input_{place}", (), {}) for place in range(len(self._sample))]
        return root_fn, [self.root, *inputs]

    def trace(self, root: Any, concrete_args: Any = None) -> fx.Graph:
        with _follow_factories(self):
            return super().trace(root, concrete_args)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.computing:
            return forward(*args, **kwargs)
        if type(m) in _STACKS:
            forward = functools.partial(_STACKS[type(m)], m)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:  # `trace` needs to know in which module it began
            self.failed_in = self.failed_in or self.path_of_module(m)
            raise

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val if self.computing else super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any) -> Any:
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **named)
        if kind != "output":
            self.computing = True
            try:
                self.values[proxy.node.name] = self._compute(proxy.node)
            finally:
                self.computing = False
        return proxy

    def _compute(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._sample[int(str(node.target).rpartition("_")[2])]
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
        """Returns what a number is, and puts a guard into the graph."""
        value = self.values[proxy.node.name]
        if isinstance(value, Tensor) and ask != "len":
            raise _DataDependentError
        answer = _QUESTIONS[ask](value)
        guarded = self.create_proxy("call_function", guard, (proxy, ask, answer, ""), {})
        guarded.node.args = (proxy.node, ask, answer, line_of(guarded.node))
        return answer


def _run_encoder(
    encoder: Any, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool | None = None
) -> Any:
    """An nn.TransformerEncoder's forward, without looking whether a mask's values are causal."""
    for layer in encoder.layers:
        src = layer(src, src_mask=mask, src_key_padding_mask=src_key_padding_mask, is_causal=bool(is_causal))
    return src if encoder.norm is None else encoder.norm(src)


def _run_decoder(
    decoder: Any, tgt: Any, memory: Any, *masks: Any, tgt_is_causal: bool | None = None, **named: Any
) -> Any:
    """An nn.TransformerDecoder's forward, likewise."""
    names = ("tgt_mask", "memory_mask", "tgt_key_padding_mask", "memory_key_padding_mask")
    named |= dict(zip(names, masks, strict=False))
    for layer in decoder.layers:
        tgt = layer(tgt, memory, tgt_is_causal=bool(tgt_is_causal), **named)
    return tgt if decoder.norm is None else decoder.norm(tgt)


_STACKS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.TransformerEncoder: _run_encoder,
    nn.TransformerDecoder: _run_decoder,
}


class _DataDependentError(Exception):
    """The forward asks for a tensor's values."""


def _reason(model: nn.Module, error: Exception) -> str:
    where, source = own_line(traceback.extract_tb(error.__traceback__))
    at = f" at {where}  {source}" if where else ""
    if isinstance(error, _DataDependentError):
        what = f"decides by the values of a tensor{at}"
    else:
        what = f"cannot be followed{at} ({type(error).__name__}: {str(error)[:120]})"
    return (
        f"{type(model).__name__} {what}: put that into a module of its own, which is then one layer, or the layers "
        "into an nn.Sequential"
    )


@contextmanager
def _follow_factories(tracer: _Tracer) -> Iterator[None]:
    """Makes functions that create tensors from numbers followed; fx follows those that take tensors."""

    def followed(create: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(create)
        def call(*args: Any, **kwargs: Any) -> Any:
            if tracer.computing:
                return create(*args, **kwargs)
            return tracer.create_proxy("call_function", create, args, kwargs)

        return call

    originals = {name: getattr(torch, name) for name in FACTORIES}
    for name, create in originals.items():
        setattr(torch, name, followed(create))
    try:
        yield
    finally:
        for name, create in originals.items():
            setattr(torch, name, create)


@contextmanager
def _restore_attributes(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Restores what the forward assigns to attributes; yields the tensors that fx has put there."""
    registries = ("_parameters", "_buffers", "_modules")
    before = [
        (module, dict(vars(module)), {name: dict(vars(module)[name]) for name in registries})
        for module in model.modules()
    ]
    constants: dict[str, Tensor] = {}
    assigned: list[tuple[nn.Module, str, Any]] = []
    try:
        with preserve_state(model):
            yield constants
    finally:
        for module, attributes, registered in before:
            now = dict(vars(module))
            assigned += [(module, name, value) for name, value in now.items() if attributes.get(name) is not value]
            for registry, entries in registered.items():
                changed = ((name, value) for name, value in now[registry].items() if entries.get(name) is not value)
                assigned += [(module, name, value) for name, value in changed]
                now[registry].clear()
                now[registry].update(entries)
            vars(module).clear()
            vars(module).update(attributes)
    for module, name, value in assigned:
        if isinstance(value, fx.Proxy):
            raise ModelError(
                f"{type(module).__name__}'s forward keeps a value of the batch in self.{name}, which other stages "
                "would not see: return it instead"
            )
        if name.startswith("_tensor_constant") and isinstance(value, Tensor):
            constants[name] = value
