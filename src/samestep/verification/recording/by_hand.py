"""Steps that a script takes without an optimizer of torch.optim: in its loop, or in a class of its own.

A step begins with the first write to a parameter behind a backward pass, and has ended at the next forward, backward,
batch, evaluation or save. Writes are seen by a TorchFunctionMode; a collective that receives into a parameter is one.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from samestep.instrument.callbacks import Callbacks
from samestep.instrument.patch import call_site, is_own, is_traced
from samestep.verification.recording.containers import tensors_of
from samestep.verification.recording.graph import leaves_of
from samestep.verification.recording.modes import LooseMode, storage_of
from samestep.verification.recording.naming import parameters_of, roots

_NO_WRITES = {"requires_grad_", "detach_", "retain_grad", "share_memory_", "rename_"}
_OPERATORS = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "and", "or", "xor")}


class HandWritten:
    """Parameters that a script updates by itself, with what the recorder asks of an optimizer; owns none of them."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = [weakref.ref(one) for one in parameters]
        self.state: dict[Any, Any] = {}
        self.samestep_evaluations = 0
        self.returned: dict[int, Tensor] = {}  # gradients by torch.autograd.grad, by the id of their parameter

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """One group, of those that are alive."""
        return [{"params": [one for known in self._parameters if (one := known()) is not None]}]


_BETWEEN = "samestep.instrument."  # stands between the script and what it calls
_OBSERVERS = (_BETWEEN, "samestep.verification.recording.")


class ByHand:
    """Finds such steps in one process, and tells of them."""

    def __init__(self, listener: Callbacks) -> None:
        self._listener = listener
        self._models: Any = WeakIdKeyDictionary()  # parameter -> the trained parameters of its model, weakly
        self._made: Any = WeakIdKeyDictionary()  # a first parameter -> all that begin with it
        self._has_models = False
        self._due: list[tuple[weakref.ref[Tensor], ...]] = []  # models with new gradients
        self._returned: dict[int, Tensor] = {}
        self._stepping: HandWritten | None = None
        self.writes_at: tuple[Any, int] | None = None  # code and line that have begun the step at hand
        self._owner: Callable[[], Any] = lambda: None
        self._held: list[Tensor] = []  # its parameters: a script may let a model go before the step is known to be over
        self._storages: set[int] = set()
        self._writes = _Writes(self)
        self._hook: Any = None

    def backward(self, outputs: Any, inputs: Iterable[Tensor] | None = None) -> None:
        """A backward pass begins, or has brought gradients of `inputs`; what it reaches may be updated behind it."""
        leaves = list(inputs) if inputs is not None else list(leaves_of(outputs))
        for leaf in leaves:
            if leaf not in self._models:
                self._find(leaves)
            model = self._models.get(leaf, ())
            if model and not any(one is model for one in self._due):
                self._due.append(model)

    def returned(self, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Gradients have come by torch.autograd.grad, which leaves them nowhere."""
        pairs = zip(inputs, gradients, strict=True)
        self._returned |= {id(one): gradient for one, gradient in pairs if gradient is not None}

    def _find(self, leaves: list[Tensor]) -> None:
        """Looks for the models of leaves; one of which nothing is known belongs to none."""
        trained = [[one for one in parameters_of(root) if one.requires_grad] for root in roots()]
        for parameters in trained:
            self._know(parameters)
        self._has_models |= any(trained)
        if not self._has_models:
            self._know(leaves)
        for leaf in leaves:
            self._models.setdefault(leaf, ())

    def _know(self, parameters: Sequence[Tensor]) -> None:
        model = tuple(weakref.ref(one) for one in parameters)
        for one in parameters:
            self._models[one] = model

    def arm(self) -> None:
        self._storages = {storage_of(one) for model in self._due for known in model if (one := known()) is not None}
        if self._storages:
            self._writes.begin()

    def wrote(self, tensors: Iterable[Tensor]) -> None:
        """Something is about to write to tensors: a function of torch, or a collective."""
        if self._stepping is not None or not any(storage_of(one) in self._storages for one in tensors):
            return
        frame: Any = sys._getframe(1)  # noqa: SLF001
        while str(frame.f_globals.get("__name__", "")).startswith(_OBSERVERS):
            frame = frame.f_back
        if _is_of_samestep(frame):
            return
        self._stepping = optimizer = self._optimizer()
        optimizer.returned = self._returned
        self.writes_at = frame.f_code, frame.f_lineno
        self._held = optimizer.param_groups[0]["params"]
        self._own(frame)
        self._hook = register_module_forward_pre_hook(self._called)
        self._listener.on_optimizer(optimizer, call_site(frame))
        self._listener.before_step(optimizer)

    def ends_with(self, result: Any) -> bool:
        """Whether a call that has brought `result` ends a step: where there is no model, a forward begins with it."""
        if self._stepping is None or self._has_models or not isinstance(result, Tensor):
            return False
        is_used = result.requires_grad and not result.is_leaf
        if is_used:
            self.settle()
        return is_used

    def _own(self, frame: Any) -> None:
        """Finds the object whose method steps: what it holds beside parameters is the state of an optimizer."""
        while frame is not None:
            owner = frame.f_locals.get("self")
            if owner is not None and is_own(frame.f_code.co_filename) and not isinstance(owner, nn.Module):
                with contextlib.suppress(TypeError):  # of a class that takes no weak references
                    self._owner = weakref.ref(owner)
                return
            frame = frame.f_back

    def state(self) -> list[Tensor]:
        """Returns the tensors that the object whose method steps holds; parameters are none of its state."""
        owner = self._owner()
        held = (
            []
            if owner is None
            else [one for value in getattr(owner, "__dict__", {}).values() for one in tensors_of(value)]
        )
        return [one for one in held if one not in self._models]

    def _optimizer(self) -> HandWritten:
        parameters = [one for model in self._due for known in model if (one := known()) is not None]
        made: list[HandWritten] = self._made.setdefault(parameters[0], [])
        for known in made:
            held = known.param_groups[0]["params"]
            if len(held) == len(parameters) and all(map(operator.is_, held, parameters)):
                return known
        made.append(HandWritten(parameters))
        return made[-1]

    def _called(self, _: nn.Module, __: Any) -> None:
        self.settle()

    def stop(self) -> None:
        """From now on an optimizer of torch.optim steps."""
        self.settle()
        self._writes.end()
        self._due, self._storages = [], set()

    def settle(self) -> None:
        """A step that has begun has ended by now."""
        optimizer, self._stepping, self.writes_at = self._stepping, None, None
        if optimizer is None:
            return
        self._hook.remove()
        self._writes.end()
        self._due, self._returned, self._storages = [], {}, set()
        self._listener.after_step(optimizer)
        optimizer.returned, self._held = {}, []


class _Writes(LooseMode):
    """Tells of writes to tensors, and of uses of others, while it is active."""

    def __init__(self, by_hand: ByHand) -> None:
        super().__init__()
        self._by_hand = by_hand
        self._is_active = False

    def begin(self) -> None:
        self.enter()
        self._is_active = True

    def end(self) -> None:
        self._is_active = False
        self.leave()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_active and not is_traced():
            name = getattr(func, "__name__", "")
            if "out" in kwargs:
                self._by_hand.wrote(tensors_of(kwargs["out"]))
            elif is_write(func, name):
                self._by_hand.wrote(tensors_of(args[0] if args else list(kwargs.values())))
            else:
                result = func(*args, **kwargs)
                # what a step has brought may have been replaced by the ranks' values when it ended
                return func(*args, **kwargs) if self._by_hand.ends_with(result) else result
        return func(*args, **kwargs)


def _is_of_samestep(frame: Any) -> bool:
    """Whether samestep writes, not the script: a pipeline that is built after its model was measured, say."""
    while frame is not None and not is_own(frame.f_code.co_filename):
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith("samestep.") and not name.startswith(_BETWEEN):
            return True
        frame = frame.f_back
    return False


def is_write(func: Any, name: str) -> bool:
    """Returns whether a function of torch, called by this name, writes to its first argument."""
    if name == "__set__":
        return getattr(getattr(func, "__self__", None), "__name__", "") == "data"
    in_place = name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES
    return in_place or name == "__setitem__" or name in _OPERATORS
