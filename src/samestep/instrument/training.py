"""Reports models, optimizers, schedules, clipping, scalers and backward passes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from samestep.instrument.callbacks import Callbacks, listeners, notify
from samestep.instrument.patch import call_site, caller, on_import, on_undo, patch, user_line

__all__: list[str] = []

_FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel"
_LENGTHS = ("T_max", "total_steps")  # of schedules that are made for so many steps


class Hook:
    """A hook on a script's module that stays with that module: no copy of it, and no file, has it.

    A script may copy a model (an average of its weights) or save it whole. A hook would go along, with all that it
    refers to: pickle refuses that, and a copy would report itself as the script's own model.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies, and pickles, as one that does nothing."""
        return Hook, (_nothing,)


def _nothing(*_: Any, **__: Any) -> None:
    pass


# --- optimizers ------------------------------------------------------------------------------


def optimizers() -> None:
    """Reports optimizers and their steps."""
    on_import("torch.optim.optimizer", _patch_optimizers)


def _patch_optimizers(module: Any) -> None:
    steps = _Steps()
    on_undo(module.register_optimizer_step_pre_hook(steps.enter).remove)
    on_undo(module.register_optimizer_step_post_hook(steps.exit).remove)

    @patch(module.Optimizer, "__init__")
    def __init__(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(optimizer, *args, **kwargs)
        where = user_line()
        for one in listeners("on_optimizer"):
            one.on_optimizer(optimizer, where)


class _Steps:
    """An optimizer that steps others, as ZeroRedundancyOptimizer does, takes one step with them."""

    def __init__(self) -> None:
        self._stepping: list[Any] = []

    def enter(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A closure computes the gradients of its step: they are there when it has run for the first time."""
        import torch

        if torch.compiler.is_compiling():
            return None
        for one in listeners("on_enter_step"):
            one.on_enter_step(optimizer)
        if not listeners("before_step"):
            return None
        if any(optimizer is one for one in self._stepping):
            self._stepping.clear()  # a step that has raised an error
        self._stepping.append(optimizer)
        if len(self._stepping) > 1:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        optimizer.samestep_evaluations = 0
        if closure is None:
            _before_step(optimizer)
            return None

        @functools.wraps(closure)
        def reporting() -> Any:
            loss = closure()
            optimizer.samestep_evaluations += 1
            if optimizer.samestep_evaluations == 1:
                _before_step(optimizer)
            return loss

        return ((args[0], reporting, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": reporting})

    def exit(self, optimizer: Any, *_: Any) -> None:
        import torch

        if torch.compiler.is_compiling():
            return
        for one in listeners("on_exit_step"):
            one.on_exit_step(optimizer)
        if not listeners("after_step"):
            return
        while self._stepping and self._stepping.pop() is not optimizer:
            pass
        if not self._stepping:
            optimizer.samestep_taken = optimizer.__dict__.get("samestep_taken", 0) + 1
            for one in listeners("after_step"):
                one.after_step(optimizer)


def _before_step(optimizer: Any) -> None:
    for one in listeners("before_step"):
        one.before_step(optimizer)


def schedules() -> None:
    """Reports steps of learning-rate schedules and gradient scalers."""
    on_import("torch.optim.lr_scheduler", _patch_schedules)
    on_import("torch.amp.grad_scaler", _patch_scaler)


def _patch_schedules(module: Any) -> None:
    """Patches the classes, since a schedule's attributes are its state dict. Of nested ones the outermost counts."""
    nested: list[bool] = []

    def step(original: Any, *args: Any, **kwargs: Any) -> Any:
        frame = caller()
        if not nested and frame.f_code.co_name not in {"__init__", "_initial_step"}:
            schedule = args[0] if args else None
            length = next((one for name in _LENGTHS if (one := getattr(schedule, name, None)) is not None), None)
            notify("scheduler", where=call_site(frame), moved=getattr(schedule, "last_epoch", 0) + 1, length=length)
        nested.append(True)
        try:
            return original(*args, **kwargs)
        finally:
            nested.pop()

    for schedule in [one for one in vars(module).values() if isinstance(one, type) and "step" in vars(one)]:
        patch(schedule, "step")(step)


def _patch_scaler(module: Any) -> None:
    @patch(module.GradScaler, "step")
    def step(original: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        taken = optimizer.__dict__.get("samestep_taken", 0)
        result = original(scaler, optimizer, *args, **kwargs)
        skipped = scaler.is_enabled() and optimizer.__dict__.get("samestep_taken", 0) == taken
        scale = scaler.get_scale() if scaler.is_enabled() else 1.0
        notify("scaler", scale=scale, skipped=skipped, where=user_line())
        return result

    @patch(module.GradScaler, "scale")
    def scale(original: Any, scaler: Any, outputs: Any) -> Any:
        notify("scaled", scaler=scaler)
        return original(scaler, outputs)


# --- models ----------------------------------------------------------------------------------


def wrappers() -> None:
    """Reports models that are wrapped for data-parallel training."""
    on_import("torch.nn.parallel.distributed", functools.partial(_patch_wrapper, "DistributedDataParallel"))
    on_import("torch.nn.parallel.data_parallel", functools.partial(_patch_wrapper, "DataParallel"))
    on_import(_FSDP, functools.partial(_patch_wrapper, "FullyShardedDataParallel"))
    on_import("torch.distributed.fsdp._fully_shard._fully_shard", _patch_sharding)


def _patch_wrapper(kind: str, module: Any) -> None:
    @patch(getattr(module, kind), "__init__")
    def __init__(original: Any, model: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(model, *args, **kwargs)
        _report_wrapped(kind, model, _ranks(model))


def _report_wrapped(kind: str, model: Any, ranks: list[int] | None) -> None:
    where = user_line()
    for one in listeners("on_wrap"):
        one.on_wrap(kind, model, where, ranks)


def _ranks(model: Any) -> list[int] | None:
    """The ranks that bring samples to a model; None where these are all, or are not known."""
    mesh, group = getattr(model, "_device_mesh", None), getattr(model, "process_group", None)
    if mesh is not None:
        return sorted(mesh.mesh.flatten().tolist())
    if group is None or getattr(model, "_inter_node_pg", None) is not None:  # copies of the model are in other groups
        return None
    ranks: list[int] = sys.modules["torch.distributed"].get_process_group_ranks(group)
    return ranks


def _patch_sharding(home: Any) -> None:
    @patch(home, "fully_shard", package="torch.distributed.fsdp")
    def fully_shard(original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        sharded = original(module, *args, **kwargs)
        if not isinstance(module, list):
            mesh = kwargs.get("mesh") or next(iter(args), None)
            _report_wrapped("fully_shard", module, None if mesh is None else sorted(mesh.mesh.flatten().tolist()))
        return sharded


def synchronisation() -> None:
    """Reports what of a wrapped model's use decides whether its gradients are averaged."""
    on_import("torch.nn.parallel.distributed", _patch_forward)
    on_import("torch.nn.parallel.distributed", lambda module: _patch_no_sync(module.DistributedDataParallel))
    on_import(_FSDP, lambda module: _patch_no_sync(module.FullyShardedDataParallel))
    on_import("torch.distributed.algorithms.join", _patch_join)


def _patch_no_sync(wrapper: Any) -> None:
    @patch(wrapper, "no_sync")
    def no_sync(original: Any, model: Any) -> Any:
        notify("no_sync", where=user_line())
        return original(model)


def _patch_join(module: Any) -> None:
    @patch(module.Join, "__exit__")
    def __exit__(original: Any, self: Any, kind: Any, value: Any, trace: Any) -> Any:  # noqa: N807
        if self._enable and kind is None:
            # the rank has used all its inputs, and goes on only to answer the collectives of those that have more
            notify("joined", where=user_line())
        return original(self, kind, value, trace)


def _patch_forward(module: Any) -> None:
    """A forward through the wrapper arms its reducer; one of the model inside, at the top, does not."""
    wrapper = module.DistributedDataParallel

    @patch(wrapper, "forward")
    def forward(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        if torch.is_grad_enabled():
            notify("forward", where=user_line(), synchronises=model.require_backward_grad_sync, bare=False)
        model.samestep_inside = True
        try:
            return original(model, *args, **kwargs)
        finally:
            model.samestep_inside = False

    @patch(wrapper, "register_comm_hook")
    def register_comm_hook(original: Any, model: Any, state: Any, hook: Any) -> None:
        name, where = getattr(hook, "__name__", type(hook).__name__), user_line()
        # samestep's adds, and nothing else; where it compresses, that is reported by itself
        plain = getattr(hook, "__module__", "") == "samestep.replicas.reduction"
        if plain or not any(one.on_comm_hook(name, where) for one in listeners("on_comm_hook")):
            original(model, state, hook)


def watch_bare_forward(callbacks: Callbacks, wrapped: Any) -> None:
    """Reports when the model inside a wrapper is called by itself."""

    def before(_: Any, __: Any) -> None:
        import torch

        if torch.compiler.is_compiling() or getattr(wrapped, "samestep_inside", False):
            return
        if torch.is_grad_enabled():
            callbacks.on_event("forward", where=user_line(), synchronises=False, bare=True)

    wrapped.module.register_forward_pre_hook(Hook(before))


def modes() -> None:
    """Reports that a model is set to train or to evaluate."""
    on_import("torch.nn.modules.module", _patch_modes)


def _patch_modes(module: Any) -> None:
    nested: list[bool] = []

    @patch(module.Module, "train")
    def train(original: Any, model: Any, mode: bool = True) -> Any:
        if not nested:
            notify("mode", training=bool(mode))
        nested.append(True)
        try:
            return original(model, mode)
        finally:
            nested.pop()


def loaded_weights() -> None:
    """Reports `load_state_dict` of a model. It asks for the model's state, which is a collective where that is cut."""
    on_import("torch.nn.modules.module", _patch_loading)


def _patch_loading(module: Any) -> None:
    @patch(module.Module, "load_state_dict")
    def load_state_dict(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        where = user_line()
        result = original(model, *args, **kwargs)
        missing, unexpected = len(result.missing_keys), len(result.unexpected_keys)
        notify("weights", where=where, missing=missing, unexpected=unexpected, held=len(model.state_dict()))
        return result


# --- gradients -------------------------------------------------------------------------------


def backward_passes() -> None:
    """Reports backward passes, and gradients that torch.autograd.grad returns."""
    on_import("torch.autograd", _patch_backward)


def _patch_backward(module: Any) -> None:
    @patch(module, "backward")  # Tensor.backward calls it by this name
    def backward(original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if heard := listeners("before_backward"):
            where = user_line()
            for one in heard:
                one.before_backward(tensors, where)
        entered = [(one, one.on_enter_backward()) for one in listeners("on_enter_backward")]
        try:
            result = original(tensors, *args, **kwargs)
        finally:
            for one, what in entered:
                one.on_exit_backward(what)
        for one in listeners("after_backward"):
            one.after_backward()
        return result

    @patch(module, "grad")
    def grad(original: Any, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = original(outputs, inputs, *args, **kwargs)
        leaves = [inputs] if hasattr(inputs, "is_leaf") else list(inputs)
        heard = listeners("on_grad")
        if heard and all(getattr(one, "is_leaf", False) and one.requires_grad for one in leaves):
            where = user_line()
            for one in heard:
                one.on_grad(leaves, list(gradients), where)
        return gradients


def clipping() -> None:
    """Reports clipping by norm, for which the norm is waited for."""
    on_import("torch.nn.utils.clip_grad", _patch_clipping)
    on_import(_FSDP, _patch_sharded_clipping)


def _patch_clipping(module: Any) -> None:
    @patch(module, "clip_grad_norm_", package="torch.nn.utils")
    def clip_grad_norm_(original: Any, parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(parameters, "grad"):
            parameters = list(parameters)
        where = user_line()
        notify("clipping", parameters=parameters, most=float(max_norm), where=where)
        norm = original(parameters, max_norm, *args, **kwargs)
        if not hasattr(norm, "_local_tensor"):  # of cut gradients: its value would take a collective of its own
            notify("clip", norm=float(norm), most=float(max_norm), where=where)
        return norm


def _patch_sharded_clipping(module: Any) -> None:
    """FullyShardedDataParallel's, which knows the norm of all parts; where nothing is cut it calls torch's."""

    @patch(module.FullyShardedDataParallel, "clip_grad_norm_")
    def clip_grad_norm_(original: Any, model: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        handles = [getattr(part, "_handle", None) for part in model.modules()]
        if not any(handle.uses_sharded_strategy for handle in handles if handle is not None):
            return original(model, max_norm, *args, **kwargs)
        where = user_line()
        notify("clipping", parameters=list(model.parameters()), most=float(max_norm), where=where)
        norm = original(model, max_norm, *args, **kwargs)
        notify("clip", norm=float(norm), most=float(max_norm), where=where)
        return norm
