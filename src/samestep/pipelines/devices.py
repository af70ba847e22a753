"""The devices of one process that holds all stages, and copies from one to another while both compute.

    4 processes x 2 devices, devices=2         process 0   1   2   3
                                    stage 0       cuda:0   2   4   6     sum their gradients
                                    stage 1       cuda:1   3   5   7     sum theirs

Where every process sees only its own GPUs, as under Slurm's --gpus-per-task, they are cuda:0 and cuda:1 in each.

Copies have streams of their own:

    cuda:0   computes   F0.0 │ F0.1   F0.2   F0.3        1  a copy begins when what it copies is computed
             copies          1─▶ a0 ── a1 ── a2          2  the stage that needs it waits for it, and for nothing else
    cuda:1   copies              a0 ── a1 ── a2          3  memory is free again when both streams are done with it
             computes                2─▶ F1.0   F1.1

`tensor.to("cuda:1")` queues the copy behind the kernels of both devices, and their next kernels behind the copy. With
copy streams, torchgpipe had 34 % more throughput of a U-Net on four GPUs (C. Kim et al., "torchgpipe", 2020). The CPU
has no streams: the host waits for a copy from a GPU before it reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from samestep.data.batches import tensors_of, to_device
from samestep.errors import DeviceError, UsageError
from samestep.machine import machine
from samestep.runtime.device import check_no_shared_gpu, choose_device, gpu_uuid
from samestep.runtime.exchange import all_gather_json, run_on_all_ranks
from samestep.runtime.world import World

DevicesArg = Sequence[torch.device | str] | int | None


def resolve_devices(requested: DevicesArg, world: World) -> tuple[torch.device, ...]:
    """Returns the devices of this process; all stages are on the world's device if none are requested.

    Collective: every rank of the world must call it.

    Raises:
        DeviceError: a device is none, is not there, or another process has it too.
        UsageError: a rank with one stage requests several; replicas have theirs on other kinds of devices.
    """
    devices = run_on_all_ranks(world.everyone, lambda: _find(requested, world))
    kinds = [[each.type, devices.index(each)] for each in devices]
    everyone = all_gather_json(world.everyone, [machine(), kinds, [gpu_uuid(each) for each in devices]])
    if world.pipeline.size == 1:
        for rank, (_, theirs, _) in enumerate(everyone):
            if theirs != everyone[0][1]:
                first, other = (" and ".join(str(kind) for kind, _ in each) for each in (everyone[0][1], theirs))
                raise UsageError(
                    f"the stages of rank 0 are on {first}, those of rank {rank} on {other}: replicas sum their "
                    "gradients stage by stage, and need as many devices, of one kind"
                )
    if requested is not None:
        check_no_shared_gpu([(rank, host, gpu) for rank, (host, _, gpus) in enumerate(everyone) for gpu in gpus])
    return devices


def _find(requested: DevicesArg, world: World) -> tuple[torch.device, ...]:
    if requested is None:
        return (world.device,)
    if isinstance(requested, str | torch.device | bool):
        raise UsageError(f"devices={requested!r}: give one for each stage, ['cuda:0', 'cuda:1'] say, or how many")
    if isinstance(requested, int):
        devices = share(requested, world.local_rank, world.local_size, torch.cuda.device_count())
    else:
        devices = tuple(_parse(each, world) for each in requested)
    if world.pipeline.size > 1 and len(devices) != 1:
        raise UsageError(
            f"{len(devices)} devices for a rank of a pipeline of {world.pipeline.size} ranks, which has one: give one, "
            "or let each process hold all stages, by samestep.world(pipeline=1)"
        )
    return devices


def share(count: int, local_rank: int, local_size: int, visible: int) -> tuple[torch.device, ...]:
    """Returns the devices of the process that is number `local_rank` of `local_size` on its host.

    Example:
        >>> share(2, 3, 4, 8)
        (device(type='cuda', index=6), device(type='cuda', index=7))
        >>> share(2, 0, 1, 0)
        (device(type='cpu'), device(type='cpu'))
    """
    if count < 1:
        raise UsageError(f"devices={count}: give 1 or more, or name them")
    if visible == 0:
        return (torch.device("cpu"),) * count
    if visible >= count * local_size:
        return tuple(torch.device("cuda", count * local_rank + number) for number in range(count))
    if visible == count:  # its own; if others see the same, that is refused when all have exchanged theirs
        return tuple(torch.device("cuda", number) for number in range(count))
    raise DeviceError(
        f"devices={count} for each of {local_size} processes on this host, and this one sees {visible} GPUs: start "
        f"{max(1, visible // count)} here, or name the devices"
    )


def _parse(name: torch.device | str, world: World) -> torch.device:
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(f"devices has {name!r}, which is none: give 'cpu', 'cuda:0', 'cuda:1', …") from error
    if device.type not in {"cpu", "cuda"}:
        raise DeviceError(f"devices has {str(name)!r}: stages compute on 'cpu', 'cuda:0', 'cuda:1', …")
    return torch.device("cpu") if device.type == "cpu" else choose_device(device, world.local_rank, world.local_size)


class DeviceCopier:
    """Copies batches from one device to another; to the same device they stay what they are.

    Example:
        >>> copier = DeviceCopier(torch.device("cpu"), torch.device("cpu"))
        >>> copier.receive(copier.send([torch.ones(2)]))
        [tensor([1., 1.])]
    """

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self._source, self._target = source, target
        self._source_stream, self._target_stream = (
            torch.cuda.Stream(each) if each.type == "cuda" and source != target else None  # type: ignore[no-untyped-call]
            for each in (source, target)
        )

    def send(self, batch: Any) -> tuple[Any, Any]:
        """Begins to copy a batch once it is computed, without waiting; returns the copies, and an event when done."""
        if self._source == self._target:
            return batch, None
        if self._source_stream is not None:  # 1
            self._source_stream.wait_stream(torch.cuda.current_stream(self._source))
            for each in tensors_of(batch):
                if each.device == self._source:
                    each.record_stream(self._source_stream)  # 3
        with _on_stream(self._source_stream), _on_stream(self._target_stream):
            copies = to_device(batch, self._target)
            stream = self._target_stream or self._source_stream
            return copies, None if stream is None else stream.record_event()

    def receive(self, sent: tuple[Any, Any]) -> Any:
        """Returns the copies, for what is computed on the target from now on."""
        copies, event = sent
        if event is not None and self._target_stream is None:
            event.synchronize()
        elif event is not None:  # 2
            computing = torch.cuda.current_stream(self._target)
            computing.wait_event(event)
            for each in tensors_of(copies):
                each.record_stream(computing)  # 3
        return copies


def _on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the current one, so that what a layer creates on "cuda" is created there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def sync_streams(devices: Sequence[torch.device]) -> None:
    """Lets GPUs continue together when all have done their work so far; the host does not wait."""
    streams = [torch.cuda.current_stream(device) for device in devices]
    done = [stream.record_event() for stream in streams]
    for stream in streams:
        for each in done:
            stream.wait_event(each)
