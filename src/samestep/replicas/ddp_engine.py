"""DistributedDataParallel as the engine of a replica, driven by the step.

DDP prepares its reducer in forward, for one backward, and for the parameters that it was built with [1]. A second
backward, or several forwards before their backwards, would go unreduced: it is prepared again here [2]. So would the
gradients of a layer that is unfrozen later: DDP is built anew [3]. All ranks run the same program, so they come to [2]
and [3] at the same moments, and to [4], where bucket sizes are tuned: see `bucket_tuner`.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from samestep.data.batches import tensors_of
from samestep.errors import ModelError, StepError
from samestep.launch.rank.user_code import warn
from samestep.replicas.bucket_plan import BucketPlan
from samestep.replicas.bucket_tuner import BucketTuner, Caps, ddp_argument, reason_not_tunable
from samestep.replicas.compression import GradientCompression
from samestep.replicas.culprits import LocalGradientLog
from samestep.replicas.reduction import Reduce, Reduction, install
from samestep.runtime.world import World

# torch 2.13 renamed the argument; both mean: no buffer travels in forward
_SPELLING = "forward_sync_buffers"
_KNOWN = _SPELLING in inspect.signature(DistributedDataParallel.__init__).parameters
_WITHOUT_BUFFERS: dict[str, Any] = {_SPELLING if _KNOWN else "broadcast_buffers": False}


@dataclass(eq=False)
class DDPEngine:
    """Calls a model so that its gradients are averaged whenever the world's step ends."""

    module: nn.Module
    world: World
    buckets: float | Literal["auto"] | None
    reduce: Reduce | None
    find_unused_parameters: bool
    local: LocalGradientLog | None
    compression: GradientCompression | None
    tuner: BucketTuner | None = None
    forwards: int = 0
    last_backward: int = 0  # the number of the last forward that a backward went through
    prepared: bool = False  # DDP did it in forward, for the next backward
    backward: int = -1  # the number of the backward that was seen last
    in_mid_step: tuple[int, int] | None = None  # the step, and the parameters' version in it
    at: tuple[int, int] | None = None  # likewise at the last forward
    outputs: dict[int, Any] = field(default_factory=dict)  # of the step's forwards, for DDP to find unused parameters

    def __post_init__(self) -> None:
        self.engine, self.reduction = self._wrapped(self.module)
        self.trained = self._trained()
        self._restart_tuner()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trained = self._trained()
        learns = any(wanted for _, wanted in trained)
        if learns and trained != self.trained:  # [3]
            self.trained = trained
            self._rebuild(is_equal=False)
            self._restart_tuner()
            if self.local is not None:
                self.local.watch(self.module)
        elif self.tuner is not None and self.tuner.timer.is_idle and self.last_backward == self.forwards:  # [4]
            self.tuner.advance()
        if self.tuner is not None:
            self.tuner.timer.is_idle = False
        self.forwards += 1
        self._check_unchanged()
        self.prepared = self.engine.require_backward_grad_sync = learns and self.world.step.step_ends
        try:
            outputs = self.engine(*args, **kwargs)  # [1]
        except RuntimeError as error:
            if "finished reduction in the prior iteration" not in str(error):
                raise
            raise ModelError(
                f"some parameters of {type(self.module).__name__} got no gradient in the backward before this forward, "
                "so the ranks wait for them: use every output in the loss, or samestep.replicate(model, world, "
                "find_unused_parameters=True)"
            ) from error
        if self.find_unused_parameters:
            self.outputs[self.forwards] = outputs
        met = functools.partial(self._begin_backward, self.forwards)  # with the outputs it would keep them for ever
        for tensor in tensors_of([outputs]):
            if tensor.requires_grad:
                tensor.register_hook(met)  # type: ignore[no-untyped-call]
        return outputs

    def _begin_backward(self, forward: int, gradient: torch.Tensor) -> None:
        """Runs first in every backward through the model, once for each [2], and again for each output."""
        self.last_backward = max(self.last_backward, forward)
        if self.local is not None:
            self.local.note_output_gradient(gradient)
        number = torch._C._current_graph_task_id()  # noqa: SLF001  (nothing public tells one backward from the next)
        if number == self.backward:
            return
        self.backward = number
        if self.local is not None:
            self.local.begin_backward()
        self.world.step.averaged = self.world.step.averaged or self.world.step.step_ends
        if not self.prepared:
            if not self.world.step.step_ends or not any(wanted for _, wanted in self._trained()):
                return
            reducer = self.engine.reducer
            reducer._rebuild_buckets()  # noqa: SLF001  (DDP's own forward does the same two things)
            reducer.prepare_for_backward(tensors_of([self.outputs.get(forward, [])]))
        self.prepared = False
        if self.tuner is not None:
            self.tuner.timer.begin()

    def _check_unchanged(self) -> None:
        """Refuses parameters that an optimizer has changed in mid-step, by gradients that differ from rank to rank."""
        step = self.world.step
        now = (step.steps, sum(parameter._version for parameter in self.module.parameters()))  # noqa: SLF001
        if self.in_mid_step is not None and self.in_mid_step[0] == now[0] and self.in_mid_step != now:
            raise StepError(
                "the parameters were changed in the middle of a step, by gradients that are each rank's own: put "
                "optimizer.step() and zero_grad() under `if batches.step_ends:`"
            )
        self.in_mid_step = None if step.step_ends else now
        if now != self.at:
            self.outputs.clear()
        self.at = now

    def _trained(self) -> list[tuple[int, bool]]:
        """Which parameters there are, and whether each wants a gradient."""
        return [(id(parameter), parameter.requires_grad) for parameter in self.module.parameters()]

    def _wrapped(
        self, module: nn.Module, caps: Caps | None = None, *, is_equal: bool = False
    ) -> tuple[DistributedDataParallel, Reduction]:
        """Returns an engine, and how it adds. Collective."""
        cap = None if self.buckets == "auto" else self.buckets
        engine = DistributedDataParallel(
            module,
            device_ids=[self.world.device] if self.world.device.type == "cuda" else None,
            process_group=self.world.data.group,
            gradient_as_bucket_view=True,
            find_unused_parameters=self.find_unused_parameters,
            init_sync=not is_equal,  # to send rank 0's parameters once more would hide that others differ
            **_WITHOUT_BUFFERS,
            **({"bucket_cap_mb": cap} if caps is None else ddp_argument(caps)),
        )
        return engine, install(engine, self.world.data, self.reduce, self.compression)

    def _rebuild(self, caps: Caps | None = None, *, is_equal: bool = True) -> Reduction:
        """Changes to another engine, once the old one's memory is free. Collective."""
        self.reduction.release()
        del self.engine
        self.engine, self.reduction = self._wrapped(self.module, caps, is_equal=is_equal)
        return self.reduction

    def _restart_tuner(self) -> None:
        if self.tuner is not None:
            self.tuner.close()
        self.tuner = None
        if self.buckets != "auto":
            return
        if (reason := reason_not_tunable(self.module)) is None:
            build = functools.partial(self._wrapped, is_equal=True)
            self.tuner = BucketTuner(self.module, self.world.data, self.find_unused_parameters, build, self._rebuild)
        elif self.world.data.rank == 0:
            warn(f"buckets='auto' leaves the default to {type(self.module).__name__}: {reason}")

    @property
    def plan(self) -> BucketPlan | None:
        return None if self.tuner is None else self.tuner.plan

    def release(self) -> None:
        """Tells the other ranks that this one brings no more gradients, and leaves nothing behind in the model."""
        self.outputs.clear()
        self.reduction.release()
        if self.compression is not None:
            self.compression.release()
        if self.tuner is not None:
            self.tuner.close()
