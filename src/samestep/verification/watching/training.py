"""Tells of models, optimizers, schedules, clipping, scalers and backward passes."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from samestep.launch.imports import replace_function, when_imported
from samestep.launch.noting import call_site
from samestep.verification.watching.hooks import Hook
from samestep.verification.watching.listener import Callbacks

__all__: list[str] = []


def watch(listener: Callbacks, *, sparing: bool = False) -> None:
    """Changes torch's classes as soon as they are imported.

    Args:
        listener: is told.
        sparing: leave out what takes time (backward passes, clipping, whose norm would be waited for) and what asks a
            model for its state, which is a collective where it is cut.
    """
    when_imported("torch.optim.optimizer", functools.partial(_watch_optimizers, listener))
    when_imported("torch.optim.lr_scheduler", functools.partial(_watch_schedules, listener))
    when_imported(
        "torch.nn.parallel.distributed", functools.partial(_watch_wrapper, listener, "DistributedDataParallel")
    )
    when_imported("torch.nn.parallel.data_parallel", functools.partial(_watch_wrapper, listener, "DataParallel"))
    when_imported(
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        functools.partial(_watch_wrapper, listener, "FullyShardedDataParallel"),
    )
    when_imported("torch.distributed.fsdp._fully_shard._fully_shard", functools.partial(_watch_sharding, listener))
    when_imported("torch.distributed.algorithms.join", functools.partial(_watch_joins, listener))
    when_imported("torch.amp.grad_scaler", functools.partial(_watch_scaler, listener))
    when_imported("torch.nn.modules.module", functools.partial(_watch_modes, listener))
    if not sparing:
        when_imported("torch.nn.utils.clip_grad", functools.partial(_watch_clipping, listener))
        when_imported(
            "torch.distributed.fsdp.fully_sharded_data_parallel", functools.partial(_watch_own_clipping, listener)
        )
        when_imported("torch.autograd", functools.partial(_watch_backward, listener))
        when_imported("torch.nn.modules.module", functools.partial(_watch_loading, listener))


def _watch_optimizers(listener: Callbacks, module: ModuleType) -> None:
    steps = _OutermostSteps(listener)
    module.register_optimizer_step_pre_hook(steps.before)
    module.register_optimizer_step_post_hook(steps.after)
    original = module.Optimizer.__init__

    @functools.wraps(original)
    def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(optimizer, *args, **kwargs)
        listener.optimizer_made(optimizer, call_site(sys._getframe(1)))  # noqa: SLF001

    module.Optimizer.__init__ = __init__


class _OutermostSteps:
    """Tells of steps; an optimizer that steps others, as ZeroRedundancyOptimizer does, takes one step with them."""

    def __init__(self, listener: Callbacks) -> None:
        self._listener = listener
        self._stepping: list[Any] = []

    def before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A closure makes the gradients of its step: they are there when it has run for the first time."""
        if any(optimizer is one for one in self._stepping):
            self._stepping.clear()  # a step that has raised an error
        self._stepping.append(optimizer)
        if len(self._stepping) > 1:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        optimizer.samestep_evaluations = 0
        if closure is None:
            self._listener.before_step(optimizer)
            return None

        @functools.wraps(closure)
        def telling() -> Any:
            loss = closure()
            optimizer.samestep_evaluations += 1
            if optimizer.samestep_evaluations == 1:
                self._listener.before_step(optimizer)
            return loss

        return ((args[0], telling, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": telling})

    def after(self, optimizer: Any, *_: Any) -> None:
        """The outermost step has ended with its optimizer's."""
        while self._stepping and self._stepping.pop() is not optimizer:
            pass
        if not self._stepping:
            self._listener.after_step(optimizer)


def _watch_wrapper(listener: Callbacks, kind: str, module: ModuleType) -> None:
    wrapper = getattr(module, kind)
    original = wrapper.__init__

    @functools.wraps(original)
    def __init__(model: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(model, *args, **kwargs)
        listener.wrapped(kind, model, call_site(sys._getframe(1)), _ranks(model))  # noqa: SLF001

    wrapper.__init__ = __init__
    if kind != "DataParallel":
        _watch_no_sync(listener, wrapper)
    if kind == "DistributedDataParallel":
        _watch_forward(listener, wrapper)


def _watch_no_sync(listener: Callbacks, wrapper: Any) -> None:
    original = wrapper.no_sync

    @functools.wraps(original)
    def no_sync(model: Any) -> Any:
        listener.told("no_sync", where=call_site(sys._getframe(1)))  # noqa: SLF001
        return original(model)

    wrapper.no_sync = no_sync


def _ranks(model: Any) -> list[int] | None:
    """The ranks that bring samples to a model; None where these are all, or are not known."""
    mesh, group = getattr(model, "_device_mesh", None), getattr(model, "process_group", None)
    if mesh is not None:
        return sorted(mesh.mesh.flatten().tolist())
    if group is None or getattr(model, "_inter_node_pg", None) is not None:  # copies of the model are in other groups
        return None
    ranks: list[int] = sys.modules["torch.distributed"].get_process_group_ranks(group)
    return ranks


def _watch_sharding(listener: Callbacks, module: Any) -> None:
    """Changes `fully_shard`, also where the packages around it have it already."""
    original = module.fully_shard

    @functools.wraps(original)
    def fully_shard(model: Any, *args: Any, **kwargs: Any) -> Any:
        sharded = original(model, *args, **kwargs)
        if not isinstance(model, list):
            mesh = kwargs.get("mesh") or next(iter(args), None)
            ranks = None if mesh is None else sorted(mesh.mesh.flatten().tolist())
            listener.wrapped("fully_shard", model, call_site(sys._getframe(1)), ranks)  # noqa: SLF001
        return sharded

    replace_function("torch.distributed.fsdp", {original: fully_shard})


def _watch_joins(listener: Callbacks, module: Any) -> None:
    """Tells when a rank has used all its inputs, and goes on only to answer the collectives of those that have more."""
    original = module.Join.__exit__

    @functools.wraps(original)
    def __exit__(self: Any, kind: Any, value: Any, trace: Any) -> Any:  # noqa: N807
        if self._enable and kind is None:
            listener.told("joined", where=call_site(sys._getframe(1)))  # noqa: SLF001
        return original(self, kind, value, trace)

    module.Join.__exit__ = __exit__


def _watch_forward(listener: Callbacks, wrapper: Any) -> None:
    """A forward through the wrapper arms its reducer; one of the model inside, at the top, does not."""
    original = wrapper.forward

    @functools.wraps(original)
    def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        if torch.compiler.is_compiling():
            return original(model, *args, **kwargs)
        if torch.is_grad_enabled():
            where = call_site(sys._getframe(1))  # noqa: SLF001
            listener.told("forward", where=where, synchronises=model.require_backward_grad_sync, bare=False)
        model.samestep_inside = True
        try:
            return original(model, *args, **kwargs)
        finally:
            model.samestep_inside = False

    wrapper.forward = forward
    registering = wrapper.register_comm_hook

    @functools.wraps(registering)
    def register_comm_hook(model: Any, state: Any, hook: Any) -> None:
        name = getattr(hook, "__name__", type(hook).__name__)
        # it adds, and nothing else; where it compresses, that is told by itself
        plain = getattr(hook, "__module__", "") == "samestep.replicas.reduction"
        if plain or not listener.hooked(name, call_site(sys._getframe(1))):  # noqa: SLF001
            registering(model, state, hook)

    wrapper.register_comm_hook = register_comm_hook


def watch_bare_forward(listener: Callbacks, wrapped: Any) -> None:
    """Tells when the model inside a wrapper is called by itself."""

    def before(_: Any, __: Any) -> None:
        import torch

        if torch.compiler.is_compiling() or getattr(wrapped, "samestep_inside", False):
            return
        if torch.is_grad_enabled():
            listener.told("forward", where=call_site(sys._getframe(1)), synchronises=False, bare=True)  # noqa: SLF001

    wrapped.module.register_forward_pre_hook(Hook(before))


def _watch_modes(listener: Callbacks, module: Any) -> None:
    """Evaluation begins where a model is told to evaluate, and ends where it is told to train."""
    original = module.Module.train
    nested: list[bool] = []

    @functools.wraps(original)
    def train(self: Any, mode: bool = True) -> Any:
        if not nested:
            listener.told("mode", training=bool(mode))
        nested.append(True)
        try:
            return original(self, mode)
        finally:
            nested.pop()

    module.Module.train = train


def _watch_loading(listener: Callbacks, module: Any) -> None:
    loading = module.Module.load_state_dict

    @functools.wraps(loading)
    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        where = call_site(sys._getframe(1))  # noqa: SLF001
        result = loading(self, *args, **kwargs)
        missing, unexpected = len(result.missing_keys), len(result.unexpected_keys)
        listener.told("weights", where=where, missing=missing, unexpected=unexpected, held=len(self.state_dict()))
        return result

    module.Module.load_state_dict = load_state_dict


def _watch_schedules(listener: Callbacks, module: ModuleType) -> None:
    """Changes the classes: a schedule's attributes are its state dict. Of nested ones the outermost counts."""
    nested: list[bool] = []
    for schedule in [one for one in vars(module).values() if isinstance(one, type) and "step" in vars(one)]:
        schedule.step = _telling_steps(listener, schedule.step, nested)  # type: ignore[attr-defined]


def _telling_steps(listener: Callbacks, original: Any, nested: list[bool]) -> Any:
    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)  # noqa: SLF001
        if not nested and frame.f_code.co_name not in {"__init__", "_initial_step"}:
            listener.told("scheduler", where=call_site(frame))
        nested.append(True)
        try:
            return original(*args, **kwargs)
        finally:
            nested.pop()

    return step


def _watch_scaler(listener: Callbacks, module: ModuleType) -> None:
    scaler = module.GradScaler
    original = scaler.step

    @functools.wraps(original)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        steps = optimizer.__dict__.get("samestep_steps", 0)
        result = original(self, optimizer, *args, **kwargs)
        skipped = self.is_enabled() and optimizer.__dict__.get("samestep_steps", 0) == steps
        scale = self.get_scale() if self.is_enabled() else 1.0
        listener.told("scaler", scale=scale, skipped=skipped, where=call_site(sys._getframe(1)))  # noqa: SLF001
        return result

    scaler.step = step
    scaled = scaler.scale

    @functools.wraps(scaled)
    def scale(self: Any, outputs: Any) -> Any:
        listener.told("scaled", scaler=self)
        return scaled(self, outputs)

    scaler.scale = scale


def _watch_clipping(listener: Callbacks, module: Any) -> None:
    original = module.clip_grad_norm_

    @functools.wraps(original)
    def clip_grad_norm_(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(parameters, "grad"):
            parameters = list(parameters)
        listener.told("clipping", parameters=parameters, where=call_site(sys._getframe(1)))  # noqa: SLF001
        norm = original(parameters, max_norm, *args, **kwargs)
        if not hasattr(norm, "_local_tensor"):  # of cut gradients: its value would take a collective of ours
            listener.told("clip", norm=float(norm), most=float(max_norm), where=call_site(sys._getframe(1)))  # noqa: SLF001
        return norm

    module.clip_grad_norm_ = clip_grad_norm_
    package: Any = sys.modules["torch.nn.utils"]  # is there, if only in part, for it holds the module
    package.clip_grad_norm_ = clip_grad_norm_


def _watch_own_clipping(listener: Callbacks, module: Any) -> None:
    """FullyShardedDataParallel's, which knows the norm of all parts; where nothing is cut it calls torch's."""
    original = module.FullyShardedDataParallel.clip_grad_norm_

    @functools.wraps(original)
    def clip_grad_norm_(model: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        from samestep.verification.recording.flat import is_sharded

        if not is_sharded(model):
            return original(model, max_norm, *args, **kwargs)
        where = call_site(sys._getframe(1))  # noqa: SLF001
        listener.told("clipping", parameters=list(model.parameters()), where=where)
        norm = original(model, max_norm, *args, **kwargs)
        listener.told("clip", norm=float(norm), most=float(max_norm), where=where)
        return norm

    module.FullyShardedDataParallel.clip_grad_norm_ = clip_grad_norm_


def _watch_backward(listener: Callbacks, module: Any) -> None:
    original = module.backward

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        listener.backward(tensors, call_site(sys._getframe(1)))  # noqa: SLF001
        result = original(tensors, *args, **kwargs)
        listener.after_backward()
        return result

    module.backward = backward  # Tensor.backward calls it by this name
    differentiating = module.grad

    @functools.wraps(differentiating)
    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = differentiating(outputs, inputs, *args, **kwargs)
        leaves = [inputs] if hasattr(inputs, "is_leaf") else list(inputs)
        if all(getattr(one, "is_leaf", False) and one.requires_grad for one in leaves):
            listener.differentiated(leaves, list(gradients), call_site(sys._getframe(1)))  # noqa: SLF001
        return gradients

    module.grad = grad
