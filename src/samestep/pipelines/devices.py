"""The devices of one process that holds all stages, and whether they can be had.

    4 processes x 2 devices, devices=2         process 0   1   2   3
                                    stage 0       cuda:0   2   4   6     sum their gradients
                                    stage 1       cuda:1   3   5   7     sum theirs

Where every process sees its own cards alone, as under Slurm's --gpus-per-task, they are cuda:0 and cuda:1 in each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from samestep.errors import DeviceError, UsageError
from samestep.machine import machine
from samestep.runtime.device import check_no_shared_gpu, choose_device, gpu_uuid
from samestep.runtime.exchange import all_gather_json, raise_on_all_ranks
from samestep.runtime.world import World

__all__: list[str] = []

Asked = Sequence[torch.device | str] | int | None


def devices_of(asked: Asked, world: World) -> tuple[torch.device, ...]:
    """Returns the devices of this process; all stages are on the world's device if none are asked for.

    Collective: every rank of the world must call it.

    Args:
        asked: by stage, or how many of its own a process has.
        world: whose ranks hold all stages each; where they hold one, a device for it can be named.

    Raises:
        DeviceError: a device is none, is not there, or another process has it too.
        UsageError: a rank with one stage asks for several; replicas have theirs on other kinds of devices.
    """
    problem: UsageError | None = None
    found: tuple[torch.device, ...] = (world.device,)
    try:
        found = _found(asked, world)
    except UsageError as error:
        problem = error
    raise_on_all_ranks(world.everyone, problem)
    form = [[each.type, found.index(each)] for each in found]
    told = all_gather_json(world.everyone, [machine(), form, [gpu_uuid(each) for each in found]])
    if world.pipeline.size == 1:
        _check_alike([form for _, form, _ in told])
    if asked is not None:
        check_no_shared_gpu([(rank, where, card) for rank, (where, _, cards) in enumerate(told) for card in cards])
    return found


def _found(asked: Asked, world: World) -> tuple[torch.device, ...]:
    if asked is None:
        return (world.device,)
    if isinstance(asked, str | torch.device | bool):
        raise UsageError(f"devices={asked!r}: give one for each stage, ['cuda:0', 'cuda:1'] say, or how many")
    if isinstance(asked, int):
        found = share(asked, world.local_rank, world.local_size, torch.cuda.device_count())
    else:
        found = tuple(_existing(each, world) for each in asked)
    if world.pipeline.size > 1 and len(found) != 1:
        raise UsageError(
            f"{len(found)} devices for a rank of a pipeline of {world.pipeline.size} ranks, which has one: give one, "
            "or let each process hold all stages, by samestep.world(pipeline=1)"
        )
    return found


def share(count: int, local_rank: int, local_size: int, visible: int) -> tuple[torch.device, ...]:
    """Returns the devices of the process that is number `local_rank` of `local_size` on its host.

    Args:
        count: of each process.
        local_rank: this one's number on its host.
        local_size: processes on the host.
        visible: GPUs that this process sees; without any its stages are all on the CPU.

    Raises:
        UsageError: less than one device is asked for.
        DeviceError: there are too few.

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
    if visible == count:  # its own, or others have them too, which is refused when all have told
        return tuple(torch.device("cuda", number) for number in range(count))
    raise DeviceError(
        f"devices={count} for each of {local_size} processes on this host, and this one sees {visible} GPUs: start "
        f"{max(1, visible // count)} here, or name the devices"
    )


def _existing(asked: torch.device | str, world: World) -> torch.device:
    try:
        device = torch.device(asked)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(f"devices has {asked!r}, which is none: give 'cpu', 'cuda:0', 'cuda:1', …") from error
    if device.type not in {"cpu", "cuda"}:
        raise DeviceError(f"devices has {str(asked)!r}: stages compute on 'cpu', 'cuda:0', 'cuda:1', …")
    return torch.device("cpu") if device.type == "cpu" else choose_device(device, world.local_rank, world.local_size)


def _check_alike(forms: Sequence[list[list[str | int]]]) -> None:
    for rank, form in enumerate(forms):
        if form != forms[0]:
            kinds = [" and ".join(str(kind) for kind, _ in each) for each in (forms[0], form)]
            raise UsageError(
                f"the stages of rank 0 are on {kinds[0]}, those of rank {rank} on {kinds[1]}: replicas sum their "
                "gradients stage by stage, and need as many devices, of one kind"
            )


def check_number(devices: int, stages: int, schedule: str) -> None:
    """Refuses devices that stages cannot be dealt to.

    Raises:
        UsageError: there are more of them, or fewer, than stages; "interleaved" deals several to each.
    """
    if devices != stages and not (devices and schedule == "interleaved" and stages % devices == 0):
        raise UsageError(f"{devices} device{'' if devices == 1 else 's'} for {stages} stages: give one for each")
