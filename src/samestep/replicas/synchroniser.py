"""The engine of a replica: DistributedDataParallel, told what to do at every forward and every backward.

DDP prepares its reducer in forward, for one backward, and for the parameters that it was built with:

    forward, backward                       prepared [1], reduced
    forward, backward, backward             the second goes unreduced, and nobody says so: prepared again here [2]
    forward, forward, backward, backward    likewise
    unfreeze a layer, forward, backward     its gradients go unreduced: built anew here [3]

All ranks run the same program, so they come to [2] and [3] at the same moments, as they come to forward and backward;
and to [4], where bucket sizes are found while the training runs: see `tuning`.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from samestep.data.batches import tensors_of
from samestep.errors import ModelError, StepError
from samestep.launch.warning import warn
from samestep.replicas.buckets import BucketPlan
from samestep.replicas.compression import GradientCompression
from samestep.replicas.local_gradients import LocalGradients
from samestep.replicas.reduction import Reduce, Way, bring_in
from samestep.replicas.tuning import Caps, Tuning, argument, why_not
from samestep.runtime.world import World

__all__: list[str] = []

# torch 2.13 renamed the argument; both mean: no buffer travels in forward
_SPELLING = "forward_sync_buffers"
_KNOWN = _SPELLING in inspect.signature(DistributedDataParallel.__init__).parameters
_WITHOUT_BUFFERS: dict[str, Any] = {_SPELLING if _KNOWN else "broadcast_buffers": False}


class Synchroniser:
    """Calls a model so that its gradients are averaged whenever the world's step ends.

    Args:
        module: the bare model, already alike on all ranks.
        world: whose data axis averages.
        buckets: size of a gradient bucket in MiB, None for DDP's own, "auto" for what serves best.
        reduce: how the ranks' gradients are added; see `reduction`.
        find_unused_parameters: as in DDP.
        local: is told of what this rank brings before it is averaged, or None.
        compression: averages in compressed messages, or None.
    """

    def __init__(
        self,
        module: nn.Module,
        world: World,
        *,
        buckets: float | Literal["auto"] | None,
        reduce: Reduce | None,
        find_unused_parameters: bool,
        local: LocalGradients | None = None,
        compression: GradientCompression | None = None,
    ) -> None:
        self.module = module
        self.world = world
        self.tunes = buckets == "auto"
        self.buckets = None if buckets == "auto" else buckets
        self.reduce = reduce
        self.find_unused_parameters = find_unused_parameters
        self.local = local
        self.compression = compression
        self.engine, self.way = self._wrapped(module)
        self.trained = self._trained()
        self.tuning: Tuning | None = None
        self._tune_anew()
        self.forwards = 0
        self.met = 0  # the number of the last forward that a backward went through
        self.prepared = False  # DDP did it in forward, for the next backward
        self.backward = -1  # the number of the backward that was seen last
        self.in_mid_step: tuple[int, int] | None = None  # the step, and the parameters' version in it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the model returns."""
        trained = self._trained()
        learns = any(wanted for _, wanted in trained)
        if learns and trained != self.trained:  # [3]
            self.trained = trained
            self._use(is_alike=False)
            self._tune_anew()
            if self.local is not None:
                self.local.watch(self.module)
        elif self.tuning is not None and self.tuning.watch.is_at_rest and self.met == self.forwards:  # [4]
            self.tuning.advance()
        if self.tuning is not None:
            self.tuning.watch.is_at_rest = False
        self.forwards += 1
        self._check_unchanged()
        self.prepared = self.engine.require_backward_grad_sync = learns and self.world.step.step_ends
        try:
            outputs = self.engine(*args, **kwargs)  # [1]
        except RuntimeError as error:
            if "finished reduction in the prior iteration" in str(error):
                raise ModelError(_unused(self.module)) from error
            raise
        for tensor in tensors_of([outputs]):
            if tensor.requires_grad:
                met = functools.partial(self._meet_backward, outputs, self.forwards)
                tensor.register_hook(met)  # type: ignore[no-untyped-call]
        return outputs

    def _meet_backward(self, outputs: Any, forward: int, gradient: torch.Tensor) -> None:
        """Runs first in every backward through the model, once for each [2], and again for each output."""
        self.met = max(self.met, forward)
        if self.local is not None:
            self.local.note_arrival(gradient)
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
            reducer.prepare_for_backward(tensors_of([outputs]) if self.find_unused_parameters else [])
        self.prepared = False
        if self.tuning is not None:
            self.tuning.watch.begin()

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

    def _trained(self) -> list[tuple[int, bool]]:
        """Which parameters there are, and whether each wants a gradient."""
        return [(id(parameter), parameter.requires_grad) for parameter in self.module.parameters()]

    def _wrapped(
        self, module: nn.Module, caps: Caps | None = None, *, is_alike: bool = False
    ) -> tuple[DistributedDataParallel, Way]:
        """Returns an engine, and how it adds. Collective."""
        engine = DistributedDataParallel(
            module,
            device_ids=[self.world.device] if self.world.device.type == "cuda" else None,
            process_group=self.world.data.group,
            gradient_as_bucket_view=True,
            find_unused_parameters=self.find_unused_parameters,
            init_sync=not is_alike,  # to send rank 0's parameters once more would hide that others differ
            **_WITHOUT_BUFFERS,
            **({"bucket_cap_mb": self.buckets} if caps is None else argument(caps)),
        )
        return engine, bring_in(engine, self.world.data, self.reduce, self.compression)

    def _use(self, caps: Caps | None = None, *, is_alike: bool = True) -> Way:
        """Changes to another engine, once the old one's memory is free. Collective."""
        self.way.let_go()
        del self.engine
        self.engine, self.way = self._wrapped(self.module, caps, is_alike=is_alike)
        return self.way

    def _tune_anew(self) -> None:
        if self.tuning is not None:
            self.tuning.close()
        reason = why_not(self.module) if self.tunes else None
        self.tuning = None
        if self.tunes and reason is None:
            build = functools.partial(self._wrapped, is_alike=True)
            self.tuning = Tuning(
                self.module,
                self.world.data,
                find_unused_parameters=self.find_unused_parameters,
                build=build,
                use=self._use,
            )
        elif reason is not None and self.world.data.rank == 0:
            warn(f"buckets='auto' leaves the default to {type(self.module).__name__}: {reason}")

    @property
    def plan(self) -> BucketPlan | None:
        """What was found out about bucket sizes."""
        return None if self.tuning is None else self.tuning.plan

    def release(self) -> None:
        """Tells the other ranks that this one brings no more gradients, and leaves nothing behind in the model."""
        self.way.let_go()
        if self.compression is not None:
            self.compression.release()
        if self.tuning is not None:
            self.tuning.close()


def _unused(module: nn.Module) -> str:
    return (
        f"some parameters of {type(module).__name__} got no gradient in the backward before this forward, so the ranks "
        "wait for them: use every output in the loss, or samestep.replicate(model, world, find_unused_parameters=True)"
    )
