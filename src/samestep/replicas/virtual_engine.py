"""The engine of a replica on virtual ranks: its gradients and buffers belong to the slice that is being computed.

After each slice its gradients are taken off `.grad`; the backward of the last one makes `.grad` the sum of all slices
of all ranks, added by one tree. DistributedDataParallel takes no part: its buckets are added in an order that depends
on the number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from samestep.data.batches import tensors_of
from samestep.errors import StepError
from samestep.replicas.batchnorm import running_statistics
from samestep.replicas.buffers import broadcast_tensors, sync_buffers
from samestep.replicas.gradient_tree import FlatBuffers, FlatLayout, TreeAccumulator, TreeAllReduce
from samestep.runtime.axis import Axis
from samestep.runtime.exchange import all_gather_json, all_gather_tensors
from samestep.runtime.virtual import VirtualRanks
from samestep.runtime.world import World

_CHANGED = (
    "the parameters were changed before all slices of the step were computed, so the others would be computed with "
    "other parameters: virtual ranks need every forward and backward of a step before optimizer.step(), which stands "
    "under `if batches.step_ends:`"
)
_OUTSIDE = (
    "a backward outside the loop over samestep.shards: virtual ranks must know which slice of which step it is for; "
    "use torch.no_grad() where no training is meant"
)


class VirtualRankEngine:
    """Calls a model so that the gradients of all slices are added when the step ends."""

    def __init__(self, module: nn.Module, world: World, virtual: VirtualRanks) -> None:
        for tensor in [*module.parameters(), *module.buffers()]:  # one at a time, to need little memory
            broadcast_tensors([tensor], world.data)
        self.module = module
        self.world = world
        self.virtual = virtual
        self.buffers = SliceBuffers(module, world.data, virtual)
        self._layout = FlatLayout(self._trained(), virtual.count)
        self._tree = TreeAccumulator(self._layout)
        self._all_reduce = TreeAllReduce(world.data, world.device)
        self._lent: list[FlatBuffers] = []  # where .grad lies: used again, unless the script still adds to it
        self._last_slice: list[Tensor | None] | None = None  # its own gradients, once .grad holds the step's
        self._carried: list[Tensor | None] = []  # what .grad held when the step's first backward came
        self._fresh = True  # that backward is still to come
        self._version = 0
        self._backward = -1  # the number of the backward that was seen last
        virtual.add_listener(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.virtual.current is not None and self._versions() != self._version:
            raise StepError(_CHANGED)
        outputs = self.module(*args, **kwargs)
        for tensor in tensors_of([outputs]):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._begin_backward())  # type: ignore[no-untyped-call]
        return outputs

    def begin_slice(self, place: int) -> None:
        """Prepares for a slice; the first begins a step."""
        if place == 0:
            self._begin_step()
        self._last_slice = None
        self.buffers.enter(place)

    def _begin_step(self) -> None:
        self._tree.reset()
        trained = self._trained()
        if [id(parameter) for parameter in trained] != [id(parameter) for parameter in self._layout.parameters]:
            self._layout = FlatLayout(trained, self.virtual.count)
            self._tree, self._lent = TreeAccumulator(self._layout), []
            self._all_reduce.clear()
        self._carried, self._fresh = [], True
        self._version = self._versions()

    def end_slice(self, place: int) -> None:
        """Takes off what the slice left; after the last one `.grad` holds the step's gradients, and stays."""
        self.buffers.leave(place)
        self._last_slice = None
        if place + 1 < self.virtual.local_count:
            self._tree.push(self._layout.copy())
            self._set_gradients([None] * len(self._layout.parameters))

    def release(self) -> None:
        """Tells the other ranks that this one brings no more gradients."""
        self._all_reduce.leave()

    def undo_step(self) -> None:
        """Gives every slice the buffers that it had when the step began: the step is left out."""
        self.buffers.undo(self.virtual.current or 0)

    def _begin_backward(self) -> None:
        """Runs first in every backward through the model, once for each."""
        number = torch._C._current_graph_task_id()  # noqa: SLF001  (nothing public tells one backward from the next)
        if number == self._backward:
            return
        if self.virtual.current is None:
            raise StepError(_OUTSIDE)
        self._backward = number
        if self._fresh:  # now, and not before: a script may call zero_grad() as late as this
            self._carried, self._fresh = [parameter.grad for parameter in self._layout.parameters], False
            self._set_gradients([None] * len(self._carried))
            if all(gradient is None for gradient in self._carried):
                self._layout.free(self._lent)
            self._lent = []
        if self.world.step.step_ends:
            self.world.step.averaged = True
            if self._last_slice is not None:  # a second backward of the last slice adds to that slice's alone
                self._set_gradients(self._last_slice)
            torch.autograd.Variable._execution_engine.queue_callback(self._reduce)  # noqa: SLF001

    def _reduce(self) -> None:
        """At the end of a backward of the last slice: makes `.grad` the sum over all slices of all ranks."""
        self._last_slice = [parameter.grad for parameter in self._layout.parameters]
        node = self._tree.with_last(self._layout.copy())
        self._all_reduce.sum(node, self._layout)
        self._layout.assign(node)
        self._lent.append(node)
        for parameter, before in zip(self._layout.parameters, self._carried, strict=True):
            if before is not None:
                parameter.grad = before if parameter.grad is None else before + parameter.grad

    def _set_gradients(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self._layout.parameters, gradients, strict=True):
            parameter.grad = gradient

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def _versions(self) -> int:
        return sum(parameter._version for parameter in self._layout.parameters)  # noqa: SLF001


class SliceBuffers:
    """The buffers of the slices that this rank holds: each has its own where it has changed them, else the model's.

    They are copied in before a slice's forward, and out after it. Between steps the model has those of virtual rank 0,
    as evaluation and checkpoints see them. A buffer that is changed between steps, by load_state_dict say, is changed
    for all slices.
    """

    def __init__(self, module: nn.Module, axis: Axis, virtual: VirtualRanks) -> None:
        self._module = module
        self._axis = axis
        self._first = virtual.first
        self._uncounted = running_statistics(module)  # batch_norm's kernels write to them, and torch does not count it
        self._original = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        self._kept: list[dict[str, Tensor]] = [{} for _ in range(virtual.local_count)]
        self._before = [dict(kept) for kept in self._kept]  # when the step began
        self._seen = self._versions()

    def enter(self, place: int) -> None:
        """Gives the model the buffers of a slice; the first one begins a step."""
        if place == 0:
            self._absorb_external()
            self._before = [dict(kept) for kept in self._kept]
        self._load_slice(place)

    def leave(self, place: int) -> None:
        now = self._versions()
        for name, buffer in self._module.named_buffers():
            if not self._is_unchanged(name, now[name]):
                self._kept[place][name] = buffer.detach().clone()
        self._load_slice(0)

    def undo(self, place: int) -> None:
        """Makes all slices' buffers what they were when the step began; the model has those of the one at `place`."""
        changed = self._changed()
        self._kept = [dict(kept) for kept in self._before]
        with torch.no_grad():
            for name, buffer in self._module.named_buffers():
                if name in changed or name in self._uncounted:
                    buffer.copy_(self._kept[place].get(name, self._original[name]))
        self._seen = self._versions()

    def sync(self) -> None:
        """Gives every rank's model the buffers of virtual rank 0. Collective: every rank must call it."""
        self._absorb_external()
        self._load_slice(0)
        sync_buffers(self._module, self._axis)
        self._seen = self._versions()

    def state(self) -> dict[str, Tensor]:
        """Returns the buffers that differ between slices, [virtual ranks, …] each, on the host. Collective."""
        self._absorb_external()
        everywhere = all_gather_json(self._axis, sorted(self._changed()))
        names = sorted({name for names in everywhere for name in names})
        return {name: torch.cat(all_gather_tensors(self._axis, self._rows(name))) for name in names}

    def load_state(self, saved: dict[str, Tensor]) -> None:
        """Takes up what :meth:`state` has returned, on any number of ranks, after the model's own state."""
        self._absorb_external()
        present = dict(self._module.named_buffers())
        for name, rows in saved.items():
            for place, kept in enumerate(self._kept):
                kept[name] = rows[self._first + place].to(present[name].device)
        self._load_slice(0)

    def _rows(self, name: str) -> Tensor:
        return torch.stack([kept.get(name, self._original[name]) for kept in self._kept])

    def _changed(self) -> set[str]:
        return {name for kept in self._kept for name in kept}

    def _absorb_external(self) -> None:
        """A buffer that somebody else has changed since the last slice is that of all slices now."""
        now = self._versions()
        for name, buffer in self._module.named_buffers():
            if not self._is_unchanged(name, now[name]):
                self._original[name] = buffer.detach().clone()
                for kept in self._kept:
                    kept.pop(name, None)
        self._seen = now

    def _load_slice(self, place: int) -> None:
        changed = self._changed()
        with torch.no_grad():
            for name, buffer in self._module.named_buffers():
                if name in changed:
                    buffer.copy_(self._kept[place].get(name, self._original[name]))
        self._seen = self._versions()

    def _versions(self) -> dict[str, tuple[int, int, Tensor | None]]:
        """Tells what was written to, or put in another's place; the content where nobody counts writes."""
        return {
            name: (id(buffer), buffer._version, buffer.detach().clone() if name in self._uncounted else None)  # noqa: SLF001
            for name, buffer in self._module.named_buffers()
        }

    def _is_unchanged(self, name: str, now: tuple[int, int, Tensor | None]) -> bool:
        seen = self._seen.get(name)
        if seen is None or seen[:2] != now[:2]:
            return False
        return seen[2] is None or now[2] is None or torch.equal(seen[2], now[2])
