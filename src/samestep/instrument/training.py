"""Reports models, optimizers, schedules, clipping, scalers and backward passes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from samestep.instrument.callbacks import Callbacks, call, listeners, notify
from samestep.instrument.patch import Group, call_site, caller, is_own, on_undo, patch, user_line

optimizers = Group()  # reports optimizers and their steps
schedules = Group()  # steps of learning-rate schedules and gradient scalers
wrappers = Group()  # models that are wrapped for data-parallel training
synchronisation = Group()  # what of a wrapped model's use decides whether its gradients are averaged
local_tensors = Group()  # local tensors of replicated DTensors, whose gradients are taken for replicated ones
modes = Group()  # that a model is set to train or to evaluate
loaded_weights = Group()  # `load_state_dict` of a model; asks for its state, which is a collective where that is cut
backward_passes = Group()  # backward passes, and gradients that torch.autograd.grad returns
clipping = Group()  # clipping by norm, for which the norm is waited for

_DDP = "torch.nn.parallel.distributed"
_FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel"
_LENGTHS = ("T_max", "total_steps")  # of schedules that are made for so many steps


class Hook:
    """A hook on a script's module that stays with that module: no copy of it, and no file, has it.

    A script may copy a model (an average of its weights) or save it whole. A hook would go along, with all that it
    refers to: pickle refuses that, and a copy would report itself as the script's own model.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies, and pickles, as one that does nothing."""
        return Hook, (_nothing,)


def _nothing(*_: Any, **__: Any) -> None:
    pass


@contextmanager
def _outermost(nested: list[bool]) -> Iterator[bool]:
    """Yields whether no call of the same kind is under way."""
    nested.append(True)
    try:
        yield len(nested) == 1
    finally:
        nested.pop()


# --- optimizers ------------------------------------------------------------------------------


@optimizers.on_import("torch.optim.optimizer")
def _hook_steps(module: Any) -> None:
    steps = _Steps()
    on_undo(module.register_optimizer_step_pre_hook(steps.enter).remove)
    on_undo(module.register_optimizer_step_post_hook(steps.exit).remove)


@optimizers.patch("torch.optim.optimizer", "Optimizer.__init__")
def _make_optimizer(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    original(optimizer, *args, **kwargs)
    call("on_optimizer", optimizer, user_line())


class _Steps:
    """An optimizer that steps others, as ZeroRedundancyOptimizer does, takes one step with them."""

    def __init__(self) -> None:
        self._stepping: list[Any] = []

    def enter(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A closure computes the gradients of its step: they are there when it has run for the first time."""
        import torch

        if torch.compiler.is_compiling():
            return None
        call("on_enter_step", optimizer)
        if not listeners("before_step"):
            return None
        if any(optimizer is one for one in self._stepping):
            self._stepping.clear()  # a step that has raised an error
        self._stepping.append(optimizer)
        if len(self._stepping) > 1:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        optimizer.samestep_evaluations = 0
        if not callable(closure):  # an optimizer of the script's own may take something else
            call("before_step", optimizer)
            return None

        @functools.wraps(closure)
        def reporting(*args: Any, **kwargs: Any) -> Any:
            loss = closure(*args, **kwargs)
            optimizer.samestep_evaluations += 1
            if optimizer.samestep_evaluations == 1:
                call("before_step", optimizer)
            return loss

        return ((args[0], reporting, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": reporting})

    def exit(self, optimizer: Any, *_: Any) -> None:
        import torch

        if torch.compiler.is_compiling():
            return
        call("on_exit_step", optimizer)
        if not listeners("after_step"):
            return
        while self._stepping and self._stepping.pop() is not optimizer:
            pass
        if not self._stepping:
            optimizer.samestep_taken = _taken(optimizer) + 1
            call("after_step", optimizer)


def _taken(optimizer: Any) -> int:
    return int(optimizer.__dict__.get("samestep_taken", 0))


@schedules.on_import("torch.optim.lr_scheduler")
def _patch_schedules(module: Any) -> None:
    """Patches the classes, since a schedule's attributes are its state dict. Of nested ones the outermost counts."""
    nested: list[bool] = []

    def step(original: Any, *args: Any, **kwargs: Any) -> Any:
        frame = caller()
        with _outermost(nested) as is_outermost:
            if frame.f_code.co_name in {"__init__", "_initial_step"}:
                notify("schedule_made", where=call_site(frame))
            elif is_outermost:
                schedule = args[0] if args else None
                length = next((one for name in _LENGTHS if (one := getattr(schedule, name, None)) is not None), None)
                notify("scheduler", where=call_site(frame), moved=getattr(schedule, "last_epoch", 0) + 1, length=length)
            return original(*args, **kwargs)

    for schedule in [one for one in vars(module).values() if isinstance(one, type) and "step" in vars(one)]:
        patch(schedule, "step")(step)


@schedules.patch("torch.amp.grad_scaler", "GradScaler.step")
def _scaled_step(original: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    taken = _taken(optimizer)
    result = original(scaler, optimizer, *args, **kwargs)
    skipped = scaler.is_enabled() and _taken(optimizer) == taken
    scale = scaler.get_scale() if scaler.is_enabled() else 1.0
    notify("scaler", scale=scale, skipped=skipped, where=user_line())
    return result


@schedules.patch("torch.amp.grad_scaler", "GradScaler.scale")
def _scale(original: Any, scaler: Any, outputs: Any) -> Any:
    notify("scaled", scaler=scaler)
    return original(scaler, outputs)


# --- models ----------------------------------------------------------------------------------


def _reports_wrapper(module: str, kind: str) -> None:
    @wrappers.patch(module, f"{kind}.__init__")
    def wrap(original: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        original(model, *args, **kwargs)
        call("on_wrap", kind, model, user_line(), _ranks(model))


_reports_wrapper(_DDP, "DistributedDataParallel")
_reports_wrapper("torch.nn.parallel.data_parallel", "DataParallel")
_reports_wrapper(_FSDP, "FullyShardedDataParallel")


def _ranks(model: Any) -> list[int] | None:
    """The ranks that bring samples to a model; None where these are all, or are not known."""
    mesh, group = getattr(model, "_device_mesh", None), getattr(model, "process_group", None)
    if mesh is not None:
        return _ranks_of(mesh)
    if group is None or getattr(model, "_inter_node_pg", None) is not None:  # copies of the model are in other groups
        return None
    ranks: list[int] = sys.modules["torch.distributed"].get_process_group_ranks(group)
    return ranks


def _ranks_of(mesh: Any) -> list[int]:
    return sorted(mesh.mesh.flatten().tolist())


@wrappers.patch("torch.distributed.fsdp._fully_shard._fully_shard", "fully_shard", package="torch.distributed.fsdp")
def _fully_shard(original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    sharded = original(module, *args, **kwargs)
    if not isinstance(module, list):
        mesh = kwargs.get("mesh") or next(iter(args), None)
        call("on_wrap", "fully_shard", module, user_line(), None if mesh is None else _ranks_of(mesh))
    return sharded


@synchronisation.patch(_DDP, "DistributedDataParallel.no_sync")
@synchronisation.patch(_FSDP, "FullyShardedDataParallel.no_sync")
def _no_sync(original: Any, model: Any) -> Any:
    notify("no_sync", where=user_line())
    return original(model)


@synchronisation.patch("torch.distributed.algorithms.join", "Join.__exit__")
def _exit_join(original: Any, self: Any, kind: Any, value: Any, trace: Any) -> Any:
    if self._enable and kind is None:
        # the rank has used all its inputs, and goes on only to answer the collectives of those that have more
        notify("joined", where=user_line())
    return original(self, kind, value, trace)


@synchronisation.patch(_DDP, "DistributedDataParallel.forward")
def _forward(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """A forward through the wrapper arms its reducer; one of the model inside, at the top, does not."""
    import torch

    if torch.is_grad_enabled():
        about = {
            "synchronises": model.require_backward_grad_sync,
            "bare": False,
            "rows": _rows([*args, *kwargs.values()]),
        }
        notify("forward", where=user_line(), **about)
    model.samestep_inside = True
    try:
        return original(model, *args, **kwargs)
    finally:
        model.samestep_inside = False


def _rows(values: list[Any]) -> int:
    """The length of the first tensor's first dim, samples as a rule; 0 where there is none."""
    return next((int(one.shape[0]) for one in values if getattr(one, "shape", ())), 0)


@synchronisation.patch(_DDP, "DistributedDataParallel.register_comm_hook")
def _register_comm_hook(original: Any, model: Any, state: Any, hook: Any) -> None:
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

    from torch.nn import Module

    Module.register_forward_pre_hook(wrapped.module, Hook(before))  # a ScriptModule refuses by its own method


@local_tensors.patch("torch.distributed.tensor", "DTensor.to_local")
def _to_local(original: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    local = original(tensor, *args, **kwargs)
    is_declared = bool(args) or kwargs.get("grad_placements") is not None
    is_replicated = any(one.is_replicate() for one in tensor.placements)
    if local.requires_grad and is_replicated and not is_declared and is_own(caller().f_code.co_filename):
        notify("to_local", where=user_line(), local=local)
    return local


_setting_modes: list[bool] = []


@modes.patch("torch.nn.modules.module", "Module.train")
def _train(original: Any, model: Any, mode: bool = True) -> Any:
    with _outermost(_setting_modes) as is_outermost:
        if is_outermost:
            notify("mode", training=bool(mode))
        return original(model, mode)


@modes.patch("torch.nn.functional", "batch_norm")
def _normalise(original: Any, values: Any, mean: Any, *args: Any, **kwargs: Any) -> Any:
    training = kwargs.get("training", args[3] if len(args) > 3 else False)
    if mean is not None and not training:
        notify("normalised", mean=mean)
    return original(values, mean, *args, **kwargs)


@loaded_weights.patch("torch.nn.modules.module", "Module.load_state_dict")
def _load_state_dict(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    where = user_line()
    result = original(model, *args, **kwargs)
    missing, unexpected = len(result.missing_keys), len(result.unexpected_keys)
    held = len(model.state_dict())
    notify("weights", where=where, model=model, missing=missing, unexpected=unexpected, held=held)
    return result


# --- gradients -------------------------------------------------------------------------------


@backward_passes.patch("torch.autograd", "backward")  # Tensor.backward calls it by this name
def _backward(original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
    if listeners("before_backward"):
        call("before_backward", tensors, user_line())
    entered = [(one, one.on_enter_backward()) for one in listeners("on_enter_backward")]
    try:
        result = original(tensors, *args, **kwargs)
    finally:
        for one, what in entered:
            one.on_exit_backward(what)
    call("after_backward")
    return result


@backward_passes.patch("torch.autograd", "grad")
def _grad(original: Any, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    gradients = original(outputs, inputs, *args, **kwargs)
    leaves = [inputs] if hasattr(inputs, "is_leaf") else list(inputs)
    if listeners("on_grad") and all(getattr(one, "is_leaf", False) and one.requires_grad for one in leaves):
        call("on_grad", leaves, list(gradients), user_line())
    return gradients


@clipping.patch("torch.nn.utils.clip_grad", "clip_grad_norm_", package="torch.nn.utils")
def _clip(original: Any, parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
    if not hasattr(parameters, "grad"):
        parameters = list(parameters)
    return _report_clip(parameters, max_norm, lambda: original(parameters, max_norm, *args, **kwargs))


@clipping.patch("torch.nn.utils", "clip_grads_with_norm_")
def _clip_with_norm(
    original: Any, parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any
) -> None:
    if not hasattr(parameters, "grad"):
        parameters = list(parameters)

    def clip() -> Any:
        original(parameters, max_norm, total_norm, *args, **kwargs)
        return total_norm

    _report_clip(parameters, max_norm, clip)


@clipping.patch(_FSDP, "FullyShardedDataParallel.clip_grad_norm_")
def _clip_sharded(original: Any, model: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
    """FullyShardedDataParallel's, which knows the norm of all parts; where nothing is cut it calls torch's."""
    handles = [getattr(part, "_handle", None) for part in model.modules()]
    if not any(handle.uses_sharded_strategy for handle in handles if handle is not None):
        return original(model, max_norm, *args, **kwargs)
    return _report_clip(list(model.parameters()), max_norm, lambda: original(model, max_norm, *args, **kwargs))


def _report_clip(parameters: Any, max_norm: float, clip: Callable[[], Any]) -> Any:
    where, most = user_line(), float(max_norm)
    notify("clipping", parameters=parameters, most=most, where=where)
    norm = clip()
    if not hasattr(norm, "_local_tensor"):  # of cut gradients: its value would take a collective of its own
        notify("clip", norm=float(norm), most=most, where=where)
    return norm
