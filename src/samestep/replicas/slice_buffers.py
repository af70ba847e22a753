"""The buffers of virtual ranks: each slice has its own, where it has changed them; elsewhere they are the model's.

They are copied in before a slice's forward, and out after it. Between steps the model has those of virtual rank 0, as
evaluation and checkpoints see them. A buffer that is changed between steps, by load_state_dict say, is changed for all
slices.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from samestep.replicas.buffers import sync_buffers
from samestep.runtime.axis import Axis
from samestep.runtime.exchange import all_gather_json, all_gather_tensors
from samestep.runtime.virtual import VirtualRanks


class SliceBuffers:
    """The buffers of the slices that this rank holds."""

    def __init__(self, module: nn.Module, axis: Axis, virtual: VirtualRanks) -> None:
        self._module = module
        self._axis = axis
        self._first = virtual.first
        self._untracked = _statistics(module)
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
        """Keeps what the slice has changed."""
        now = self._versions()
        for name, buffer in self._module.named_buffers():
            if now[name] != self._seen.get(name):
                self._kept[place][name] = buffer.detach().clone()
        self._load_slice(0)

    def undo(self, place: int) -> None:
        """Makes all slices' buffers what they were when the step began; the model has those of the one at `place`."""
        changed = self._changed()
        self._kept = [dict(kept) for kept in self._before]
        with torch.no_grad():
            for name, buffer in self._module.named_buffers():
                if name in changed or name in self._untracked:
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
            if now[name] != self._seen.get(name):
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

    def _versions(self) -> dict[str, _Version]:
        """Tells whether a buffer was written to, or another put in its place."""
        return {
            name: _Version(id(buffer), buffer._version, buffer.detach().clone() if name in self._untracked else None)  # noqa: SLF001
            for name, buffer in self._module.named_buffers()
        }


class _Version:
    """What a buffer was; the content only of those whose kernels write without a word."""

    def __init__(self, identity: int, number: int, content: Tensor | None) -> None:
        self.identity = identity
        self.number = number
        self.content = content

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Version)
            and (self.identity, self.number) == (other.identity, other.number)
            and (self.content is None or other.content is None or torch.equal(self.content, other.content))
        )

    __hash__ = None  # type: ignore[assignment]


def _statistics(module: nn.Module) -> set[str]:
    """The names of the buffers that batch_norm's kernels write to; torch does not count those writes."""
    return {
        name
        for prefix, layer in module.named_modules()
        if isinstance(layer, _NormBase)
        for name, _ in layer.named_buffers(prefix, recurse=False)
    }
