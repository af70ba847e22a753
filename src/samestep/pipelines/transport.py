"""How activations and gradients get from stage to stage: to another rank, or to another device of this process.

    rank 0   stage 0 ══ F ══▶ stage 1   rank 1        one channel to each neighbour: shared memory between CPUs of one
                     ◀══ B ══                         host, else send and receive of torch.distributed

The sender never waits. Over torch.distributed the receiver posts buffers for the next few messages of each neighbour in
the order of the schedule, so that messages travel while both ranks compute.

The shapes are learned once for each shape of micro-batch: the first message of a kind begins with a header, and both
ranks remember it. torch.distributed.pipelining finds them by running every stage once more on garbage, which changes
running statistics and random streams (torch 2.13).
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep import progress
from samestep.data.batches import tensors_of
from samestep.errors import DataError, ModelError, StepError
from samestep.instrument.patch import call_site
from samestep.pipelines.batch_check import ShapeKeys
from samestep.pipelines.devices import DeviceCopier
from samestep.pipelines.shm_channel import SharedMemoryChannel, open_shm_channels
from samestep.pipelines.tensor_meta import HEADER_BYTES, Metas, TensorMeta, describe, read_header, write_header
from samestep.runtime.axis import Axis
from samestep.runtime.device import message_device
from samestep.schedule.schedule import Action, Schedule


class P2PChannel:
    """Messages to and from one other rank over torch.distributed, which keeps their order in each direction."""

    prefetch = 2  # of how many of the next messages `receive` is told what they are, where that is known

    def __init__(self, axis: Axis, peer: int, device: torch.device) -> None:
        self._group, self._peer, self._device = axis.group, axis.ranks[peer], device
        self._message_device = message_device(device, axis.group)
        self._posted: deque[tuple[list[Tensor], list[Any]]] = deque()
        self._sending: list[tuple[Any, Tensor]] = []

    def begin_step(self, sends: int, receives: int) -> None:  # noqa: ARG002
        self._posted.clear()  # what a failed step has sent stays referenced until this one ends

    def cancel_step(self) -> None:
        pass

    def send(self, tensors: Sequence[Tensor]) -> None:
        for each in tensors:
            tensor = each.to(self._message_device).contiguous()  # a header, too, goes by the backend of the device
            self._sending.append((dist.isend(tensor, self._peer, group=self._group), tensor))

    def receive(self, metas: Metas | None, following: Sequence[Metas] = ()) -> tuple[Metas, list[Tensor]]:
        """Returns the next message; its header says what it is where `metas` is None. `following`: of the next ones."""
        if metas is None:
            header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=self._message_device)
            self._receive(header).wait()
            metas = read_header(header)
        for each in [metas, *following][len(self._posted) :]:
            tensors = [meta.empty(self._message_device) for meta in each]
            self._posted.append((tensors, [self._receive(tensor) for tensor in tensors]))
        tensors, works = self._posted.popleft()
        for work in works:
            work.wait()
        return metas, [tensor.to(self._device) for tensor in tensors]

    def _receive(self, tensor: Tensor) -> Any:
        return dist.irecv(tensor, self._peer, group=self._group)

    def end_step(self) -> None:
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()

    @property
    def is_drained(self) -> bool:
        """Whether `end_step` returns at once."""
        return not self._sending

    def close(self) -> None:
        pass


Channel = P2PChannel | SharedMemoryChannel


def open_channels(axis: Axis, device: torch.device) -> dict[int, Channel]:
    """Returns channels to the ranks before and after this one, by their positions. Collective over the axis.

    The first follows the last, as interleaved schedules need it.
    """
    others = {(axis.rank + step) % axis.size for step in (-1, 1)} - {axis.rank}
    return {other: P2PChannel(axis, other, device) for other in others} | dict(open_shm_channels(axis, device))


class _waiting:  # noqa: N801  (as contextlib's, and faster: one is entered for every message)
    """Records that this rank waits for another, so that a hang can be explained."""

    def __init__(self, what: str) -> None:
        progress.enter_collective(what, call_site(sys._getframe()))  # noqa: SLF001

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        progress.exit_collective()


class RankTransport:
    """One rank's messages in the steps of a schedule."""

    def __init__(self, schedule: Schedule, axis: Axis, channels: Mapping[int, Channel]) -> None:
        self._schedule, self._axis, self._channels = schedule, axis, channels
        self._receives = {
            source: [one for one in schedule.rank_actions[source] if schedule.receiver_rank(one) == axis.rank]
            for source in channels
        }
        self._num_sends: defaultdict[int | None, int] = defaultdict(int)
        for one in schedule.rank_actions[axis.rank]:
            self._num_sends[schedule.receiver_rank(one)] += 1
        self._metas: dict[Hashable, Metas] = {}
        self._shape_keys: ShapeKeys = ()
        self._expected: dict[int, deque[Action]] = {}
        self._received: dict[Action, tuple[Metas, list[Tensor]]] = {}

    def begin_step(self, shape_keys: ShapeKeys) -> None:
        self._shape_keys = shape_keys
        self._expected = {source: deque(actions) for source, actions in self._receives.items()}
        self._received.clear()
        for other, channel in self._channels.items():
            channel.begin_step(self._num_sends[other], len(self._receives[other]))

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Sends an action's result to the rank that needs it.

        Raises:
            ModelError: it is not what micro-batches of this shape gave before, or has too many tensors.
        """
        target, key = self._schedule.receiver_rank(action), self._key(action)
        assert target is not None
        metas = tuple(map(TensorMeta.of, tensors))
        known = self._metas.get(key)
        headers: list[Tensor] = []
        if known is None:
            headers = [write_header(action.stage, metas)]
            self._metas[key] = known = metas
        elif len(known) != len(metas) or not all(map(TensorMeta.matches, known, metas)):
            raise ModelError(
                f"stage {action.stage} gives {describe(metas)} for a micro-batch of a shape for which it gave "
                f"{describe(known)} before: what it gives may depend on shapes alone"
            )
        packed = [meta.memory_view(tensor) for meta, tensor in zip(known, tensors, strict=True)]
        self._channels[target].send([*headers, *packed])

    def receive(self, action: Action) -> tuple[list[Tensor], list[bool]]:
        """Returns the result of another rank's action, and which tensors of it require a gradient."""
        source = self._schedule.placement[action.stage]
        with _waiting(f"recv from stage {action.stage}"):
            while action not in self._received:  # messages are needed in another order than they are sent in
                self._receive_next(source)
        metas, packed = self._received.pop(action)
        tensors = [meta.unpack(tensor) for meta, tensor in zip(metas, packed, strict=True)]
        return tensors, [meta.requires_grad for meta in metas]

    def _receive_next(self, source: int) -> None:
        channel = self._channels[source]
        action, *later = islice(self._expected[source], 1 + channel.prefetch)
        key, following = self._key(action), []
        for one in later:
            metas = self._metas.get(self._key(one))
            if metas is None:
                break
            following.append(metas)
        self._received[action] = channel.receive(self._metas.get(key), following)
        self._metas[key] = self._received[action][0]
        self._expected[source].popleft()

    def end_step(self) -> None:
        """Waits until all that was sent can be received."""
        for other, channel in self._channels.items():
            if channel.is_drained:
                channel.end_step()
            else:
                with _waiting(f"send to rank {self._axis.ranks[other]}"):
                    channel.end_step()

    def _key(self, action: Action) -> Hashable:
        try:
            shape_key = self._shape_keys[action.micro_batch]
        except (DataError, ModelError, StepError):  # on all ranks; they may have begun steps of other lengths
            for channel in self._channels.values():
                channel.cancel_step()
            raise
        return action.kind == "F", action.stage, shape_key


class LocalTransport:
    """The messages between stages of one process, from device to device."""

    def __init__(self, devices: Mapping[int, torch.device]) -> None:
        self._devices = devices
        # streams of their own for each pair of stages, and for inputs, so that no copy waits for another's
        self._copiers = cache(lambda source, target: DeviceCopier(devices[source], devices[target]))
        self._input_copiers = cache(DeviceCopier)
        self._sent: dict[Action, tuple[DeviceCopier, tuple[Any, Any], list[bool]]] = {}

    def begin_step(self, shape_keys: ShapeKeys) -> None:  # noqa: ARG002
        """Begins a step; what a failed one has left is forgotten."""
        self._sent.clear()

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Begins to copy an action's result to the device where it is needed."""
        source, target = action.stage, action.stage + (1 if action.kind == "F" else -1)
        copier = self._copiers(source, target)
        requires_grad = [each.requires_grad for each in tensors]
        self._sent[action] = copier, copier.send([each.detach() for each in tensors]), requires_grad

    def receive(self, action: Action) -> tuple[list[Tensor], list[bool]]:
        """Returns an action's result where it is needed, and which tensors of it require a gradient."""
        copier, sent, requires_grad = self._sent.pop(action)
        return copier.receive(sent), requires_grad

    def end_step(self) -> None:
        pass

    def to_stage(self, batch: Any, stage: int) -> Any:
        """Returns a batch of the user's on the device of a stage."""
        device = self._devices[stage]
        others = [each.device for each in tensors_of(batch) if each.device != device]
        if not others:
            return batch
        copier = self._input_copiers(others[0], device)
        return copier.receive(copier.send(batch))


Transport = RankTransport | LocalTransport
