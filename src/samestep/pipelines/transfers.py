"""The transport between stages of one process: activations ahead and gradients back, from device to device.

    stage 0 on cuda:0  ══ F ══▶  stage 1 on cuda:1  ══ F ══▶  stage 2 on cuda:0
                       ◀══ B ══                     ◀══ B ══                        each arrow a crossing of its own

torch.distributed.pipelining has one process for each device, and torch's engine for several devices of one process,
torch.distributed.pipeline.sync, is gone (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from samestep.data.batches import tensors_of
from samestep.pipelines.batch import Kinds
from samestep.pipelines.streams import Crossing, Parcel
from samestep.schedule.plan import Action

__all__: list[str] = []


class Transfers:
    """What goes from stage to stage of a process, in steps of any plan.

    Args:
        devices: by stage.
    """

    def __init__(self, devices: Mapping[int, torch.device]) -> None:
        self._devices = devices
        self._crossings = cache(lambda source, target: Crossing(devices[source], devices[target]))
        self._entries = cache(lambda device, stage: Crossing(device, devices[stage]))
        self._coming: dict[Action, tuple[Crossing, Parcel, list[bool]]] = {}

    def begin(self, kinds: Kinds) -> None:  # noqa: ARG002
        """A step begins; what another has left, because it failed, is forgotten."""
        self._coming.clear()

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Begins to copy what an action gives to where it is needed; does not wait."""
        crossing = self._crossings(action.stage, action.stage + (1 if action.kind == "F" else -1))
        wants = [each.requires_grad for each in tensors]
        self._coming[action] = crossing, crossing.send([each.detach() for each in tensors]), wants

    def receive(self, action: Action) -> tuple[list[Tensor], list[bool]]:
        """Returns what an action gives, where it is needed, and for which of it gradients are wanted."""
        crossing, parcel, wants = self._coming.pop(action)
        return crossing.receive(parcel), wants

    def end(self) -> None:
        """A step is over."""

    def brought(self, batch: Any, stage: int) -> Any:
        """Returns a batch of the user's, nested as it is, on the device of a stage."""
        device = self._devices[stage]
        others = [each.device for each in tensors_of(batch) if each.device != device]
        if not others:
            return batch
        crossing = self._entries(others[0], stage)
        return crossing.receive(crossing.send(batch))
