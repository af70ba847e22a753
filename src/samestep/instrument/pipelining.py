"""Computes a step of torch.distributed.pipelining once more, without micro-batches, and reports both gradients.

The stages are the script's own modules, with the parameters that they have; buffers are restored. Messages are
collectives of the process group itself, so that none is taken for the script's.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from samestep.instrument.callbacks import notify
from samestep.instrument.patch import Group, user_line
from samestep.instrument.script_io import load_unreported, save_unreported

pipeline_steps = Group()  # reports steps of torch.distributed.pipelining's schedules

_SCHEDULES = "torch.distributed.pipelining.schedules"
_LOOKED_AT = (0, 1, 2, 8)  # steps
_TAG = 1 << 21


@pipeline_steps.patch(_SCHEDULES, "PipelineScheduleSingle.step", "PipelineScheduleMulti.step")
def _step(original: Any, schedule: Any, *args: Any, **kwargs: Any) -> Any:
    number = schedule.samestep_steps = getattr(schedule, "samestep_steps", -1) + 1
    stages = list(getattr(schedule, "_stages", None) or [schedule._stage])  # noqa: SLF001
    why = _why_not(stages)
    count = schedule._n_microbatches  # noqa: SLF001
    about = {"step": number, "where": user_line(), "stages": stages[0].num_stages, "micro_batches": count}
    if why is not None and number == 0:
        notify("scheduled", why=why, worst=None, tensor=None, unit=None, **about)
    if why is not None or number not in _LOOKED_AT or not schedule._has_backward:  # noqa: SLF001
        return original(schedule, *args, **kwargs)
    right = _whole(schedule, stages, args, dict(kwargs))
    before = {name: None if each.grad is None else each.grad.clone() for name, each in _parameters(stages).items()}
    outputs = original(schedule, *args, **kwargs)
    after = _parameters(stages)
    added = {name: _added(each, before[name]).cpu() for name, each in after.items()}
    whole = {name: _or_zeros(each, right.get(name)).cpu() for name, each in after.items()}
    notify("scheduled", why=None, right=whole, added=added, **about)
    return outputs


def _added(parameter: Any, before: Any) -> Any:
    now = parameter.grad
    return _or_zeros(parameter, now if before is None or now is None else now - before)


def _or_zeros(like: Any, value: Any) -> Any:
    import torch

    return torch.zeros_like(like) if value is None else value


def _why_not(stages: Sequence[Any]) -> str | None:
    """Returns why a step cannot be computed again; None where it can."""
    from torch import nn

    wrapped = next((type(one.submod).__name__ for one in stages if _is_wrapped(one.submod)), None)
    if wrapped is not None:
        return f"a stage is a {wrapped}, whose replicas have other batches"
    kind = nn.modules.batchnorm._BatchNorm  # noqa: SLF001
    norms = any(isinstance(module, kind) for one in stages for module in one.submod.modules())
    return "a stage has BatchNorm, whose statistics are those of micro-batches" if norms else None


def _is_wrapped(module: Any) -> bool:
    return type(module).__name__ in {"DistributedDataParallel", "FullyShardedDataParallel"} or any(
        hasattr(parameter, "_local_tensor") for parameter in module.parameters()
    )


def _parameters(stages: Sequence[Any]) -> dict[str, Any]:
    return {
        f"stage {one.stage_index}: {name}": each
        for one in stages
        for name, each in one.submod.named_parameters()
        if each.requires_grad
    }


def _whole(schedule: Any, stages: Sequence[Any], args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the gradients of this rank's stages for the whole batch at once. Collective over the pipeline."""
    import torch

    target, losses = kwargs.pop("target", None), kwargs.pop("loss_kwargs", None) or {}
    kwargs.pop("losses", None)
    kwargs.pop("return_outputs", None)
    mine = {one.stage_index: one for one in stages}
    last, wire = stages[0].num_stages - 1, _Wire(stages[0])
    kept: dict[int, tuple[list[Any], list[Any]]] = {}
    buffers = [(buffer, buffer.clone()) for one in stages for buffer in one.submod.buffers()]
    here: Any = None
    with torch.random.fork_rng(), torch.enable_grad():
        for index in range(last + 1):
            if index not in mine:
                continue
            given = args if index == 0 else wire.take(index - 1, index, mine, here)
            leaves = [_leaf(each, wants=index > 0) for each in given]
            found = mine[index].submod(*leaves, **kwargs)
            here = list(found) if isinstance(found, tuple | list) else [found]
            if index == last:
                here = [schedule._loss_fn(found, target, **losses)]  # noqa: SLF001
            kept[index] = (leaves, here)
            wire.give(index, index + 1, mine, here, last)
        gradients: dict[str, Any] = {}
        back: Any = None
        for index in reversed(range(last + 1)):
            if index not in mine:
                continue
            leaves, outputs = kept[index]
            received = None if index == last else wire.take(index + 1, index, mine, back)
            own = {name: each for name, each in mine[index].submod.named_parameters() if each.requires_grad}
            wanting = [each for each in leaves if isinstance(each, torch.Tensor) and each.requires_grad]
            pairs = [
                (one, None if received is None else received[i]) for i, one in enumerate(outputs) if one.requires_grad
            ]
            found = torch.autograd.grad(
                [one for one, _ in pairs], [*own.values(), *wanting], [one for _, one in pairs], allow_unused=True
            )
            gradients |= {f"stage {index}: {name}": each for name, each in zip(own, found, strict=False)}
            slots = iter(found[len(own) :])
            back = [next(slots) if any(each is one for one in wanting) else None for each in leaves]
            wire.give(index, index - 1, mine, back, last)
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    return gradients


def _leaf(value: Any, *, wants: bool) -> Any:
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(wants and value.is_floating_point())


class _Wire:
    """Sends lists of tensors from stage to stage."""

    def __init__(self, stage: Any) -> None:
        import torch.distributed as dist

        self._group = stage.group or dist.distributed_c10d._get_default_group()  # noqa: SLF001
        self._ranks = stage.stage_index_to_group_rank
        self._device = stage.device

    def give(self, source: int, target: int, mine: Any, values: Any, last: int) -> None:
        """Sends what a stage has found, unless the next is here, or none."""
        import torch

        if not 0 <= target <= last or target in mine:
            return
        file = io.BytesIO()
        save_unreported([None if each is None else each.detach().cpu() for each in values], file)
        data = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8).to(self._device)
        size = torch.tensor([len(data)], device=self._device)
        for part, tensor in enumerate((size, data)):
            self._group.send([tensor], self._ranks[target], self._tag(source, target) + part).wait()

    def take(self, source: int, target: int, mine: Any, here: Any) -> Any:
        import torch

        if source in mine:
            return here
        size = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._group.recv([size], self._ranks[source], self._tag(source, target)).wait()
        data = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        self._group.recv([data], self._ranks[source], self._tag(source, target) + 1).wait()
        found = load_unreported(io.BytesIO(data.cpu().numpy().tobytes()))
        return [None if each is None else each.to(self._device) for each in found]

    def _tag(self, source: int, target: int) -> int:
        return _TAG + 4 * source + 2 * (target > source)
