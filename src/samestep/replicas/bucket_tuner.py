"""Finding bucket sizes while the training runs: measure, propose, compare, keep the faster. See docs/buckets.md.

[1] With one bucket nothing is communicated before the last gradient is ready, so hooks on the parameters see a
    backward without communication, and what follows is an all-reduce of everything.
[2] All-reduces of other sizes are measured on a tensor of their own, by the very method that the gradients take.
[3] All ranks get everybody's figures: a gradient is ready when it is on the last rank, an all-reduce begins with the
    rank that comes last. From equal figures all of them compute the same buckets.
[4] Backwards with the proposed buckets and with the default are timed in alternation, and the proposed must win.

A change of buckets is a new DistributedDataParallel, which orders them in its first backward; so it takes two backwards
until it can be timed. With find_unused_parameters DDP keeps the reverse of the order in which the parameters were
registered, and fills buckets from the other end. Changes happen in forward, after a backward that averaged and with no
other forward waiting for its own: all ranks come there at the same moment.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from samestep.network.links import fit
from samestep.replicas.bucket_plan import (
    DEFAULT_CAPS,
    MIB,
    BackwardProfile,
    BucketPlan,
    Partition,
    best_single_size,
    coalesced,
    ddp_layout,
    is_faster,
    optimal_layout,
)
from samestep.replicas.reduction import Reduction
from samestep.runtime.axis import Axis
from samestep.runtime.exchange import all_gather_json

WARM = 2  # backwards before anything is measured
SETTLE = 2  # after new buckets: DDP orders them in the first, and they come to lie in shared memory in the second
PROFILED = 5
BLOCK = 6
TURNS = (False, True, True, False, False, True, True, False)  # whether the proposed buckets serve
PROBES = (32 << 10, 512 << 10, 8 << 20)  # bytes
SHORTEST = 1e-9  # seconds: no all-reduce takes less
WORTH_TRYING = 0.99  # of the default's predicted end: what a proposal must come to before it is tried
GRAINS = 128  # into which gradients are taken together before buckets are made of them

Caps = tuple[int, ...]  # bytes that fill each bucket
Build = Callable[[nn.Module, Caps], tuple[DistributedDataParallel, Reduction]]

_HAS_LISTS = "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel.__init__).parameters  # torch 2.13


def ddp_argument(caps: Caps | None) -> dict[str, Any]:
    """Returns what tells DistributedDataParallel the caps; before torch 2.13 it takes one for all buckets."""
    if caps is None:
        return {}
    return {"bucket_cap_mb_list": [cap / MIB for cap in caps]} if _HAS_LISTS else {"bucket_cap_mb": caps[0] / MIB}


def reason_not_tunable(module: nn.Module) -> str | None:
    """Returns why the buckets of a model cannot be chosen; None where they can. The same on all ranks."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad and parameter.numel()]
    if len({parameter.dtype for parameter in trained}) > 1:
        return "its parameters have several dtypes, and each has buckets of its own"
    if any(isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse for part in module.modules()):
        return "its sparse gradients are no part of the other buckets"
    return None if len(trained) > 1 else "it trains a single tensor, which fills one bucket"


Timestamp = Any  # seconds, or a CUDA event


def timestamp(device: torch.device) -> Timestamp:
    """Returns the moment at which the device comes to what it is given next."""
    if device.type != "cuda":
        return time.perf_counter()
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds(begin: Timestamp, end: Timestamp) -> float:
    """Returns the time between two moments; waits until the device has come to the second."""
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


@dataclass
class BackwardTrace:
    """One backward: when it began, when each gradient was ready, in that order, and when the last was averaged.

    Of a gradient whose time nobody wants the moment is None.
    """

    start: Timestamp
    ready: dict[int, Timestamp] = field(default_factory=dict)
    end: Timestamp = None

    @property
    def whole_s(self) -> float:
        return seconds(self.start, self.end)

    @property
    def exposed_s(self) -> float:
        """What it waited after the last gradient was ready."""
        return seconds(list(self.ready.values())[-1], self.end)


class GradientTimer:
    """Looks on as gradients become ready, through hooks on their parameters."""

    def __init__(self, parameters: Sequence[Tensor], device: torch.device) -> None:
        self.finished: list[BackwardTrace] = []
        self.is_idle = False  # a backward has ended since somebody made this False
        self.wants_times = True  # of single gradients
        self._device = device
        self._now: BackwardTrace | None = None
        self._handles = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._note, number))  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(parameters)
        ]

    def begin(self) -> None:
        """A backward that averages has begun; called in it."""
        if not self._handles:
            return
        self._now = BackwardTrace(timestamp(self._device))
        later = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001
        later(lambda: later(self._end))  # once more, to come after DDP's own, which waits for the all-reduces

    def _note(self, number: int, _: Tensor) -> None:
        if self._now is not None:
            self._now.ready[number] = timestamp(self._device) if self.wants_times else None

    def _end(self) -> None:
        if self._now is not None and self._now.ready:  # torch.autograd.grad comes to no parameter
            self._now.end = timestamp(self._device)
            self.finished.append(self._now)
        self._now, self.is_idle = None, True

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Probe(nn.Module):
    """A tensor whose gradient costs next to nothing to compute."""

    def __init__(self, like: Tensor, elements: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements, dtype=like.dtype, device=like.device))

    def forward(self, factor: Tensor) -> Tensor:
        return self.weight.sum() * factor


Schedule = Generator[None, None, None]
Backwards = Generator[None, None, list[BackwardTrace]]


@dataclass(eq=False)
class BucketTuner:
    """Finds the buckets of one model while it is trained. Collective throughout: all ranks come to it alike."""

    module: nn.Module
    axis: Axis
    find_unused_parameters: bool
    build: Build
    use: Callable[[Caps | None], Reduction]
    plan: BucketPlan | None = None

    def __post_init__(self) -> None:
        trained = [each for each in self.module.parameters() if each.requires_grad and each.numel()]
        self.timer = GradientTimer(trained, trained[0].device)
        self._like = trained[0]
        self._sizes = [parameter.numel() * parameter.element_size() for parameter in trained]
        self._schedule = self._all_phases()

    def advance(self) -> None:
        """Goes on, if there is enough to go on with; called where nothing is under reduction."""
        next(self._schedule, None)

    def close(self) -> None:
        self.timer.close()
        self._schedule.close()

    def _all_phases(self) -> Schedule:
        yield from self._backwards(WARM)
        reduction = self.use((sum(self._sizes),))
        profiled = yield from self._backwards(PROFILED, settle=SETTLE)
        self.timer.wants_times = False
        backward = self._agreed(profiled, reduction)
        default = Partition.predicted(backward, self._ddp_layout(backward.sizes, DEFAULT_CAPS))
        proposed, caps = self._proposal(backward)
        is_same = proposed.buckets == default.buckets
        if is_same or proposed.finish_s > WORTH_TRYING * default.finish_s:
            self.use(None)
            times = self._times((yield from self._block(settle=True)))
            kept = "the default is kept: no buckets are predicted to end more than 1 % earlier"
            reason = "the default is what would be proposed" if is_same else kept
            self._decide(backward, default.achieved(backward, times[0]), proposed, (False, reason))
        else:
            yield from self._compare(backward, default, proposed, caps)
        self.timer.close()

    def _backwards(self, number: int, *, settle: int = 0) -> Backwards:
        """Waits for backwards, and returns them; the first `settle` are left out."""
        begin = len(self.timer.finished) + settle
        while len(self.timer.finished) < begin + number:
            yield
        return self.timer.finished[begin : begin + number]

    # --- what there is to know ---

    def _agreed(self, profiled: list[BackwardTrace], reduction: Reduction) -> BackwardProfile:
        """[3] Returns the backward as all ranks see it. Collective."""
        total, element = sum(self._sizes), self._like.element_size()
        probes = [size for size in PROBES if size < total] or [max(1, total // 8 // element) * element]
        probed = {nbytes: self._probed(nbytes) for nbytes in probes}
        probed[total] = [one.exposed_s for one in profiled]
        mine = {"ready": self._ready(profiled), "order": list(profiled[-1].ready), "reducing": list(probed.values())}
        everyone = all_gather_json(self.axis, mine)
        reducing = [median(_last_to_come(ranks)) for ranks in zip(*(one["reducing"] for one in everyone), strict=True)]
        order = self._order(everyone[0]["order"])
        return BackwardProfile(
            sizes=tuple(self._sizes[number] for number in order),
            ready_s=tuple(max(one["ready"][number] for one in everyone) for number in order),
            link=fit([(nbytes, max(time_s, SHORTEST)) for nbytes, time_s in zip(probed, reducing, strict=True)]),
            beside=reduction.overlaps_backward,
        )

    def _ready(self, profiled: list[BackwardTrace]) -> list[float]:
        """Returns when each gradient was ready; 0 where it never came, which DDP finds out before the backward."""
        times: list[list[float]] = [[] for _ in self._sizes]
        for record in profiled:
            for number, moment in record.ready.items():
                times[number].append(seconds(record.start, moment))
        return [median(found) if found else 0.0 for found in times]

    def _order(self, of_rank_0: list[int]) -> list[int]:
        if self.find_unused_parameters:
            return list(range(len(self._sizes)))[::-1]
        return [*of_rank_0, *sorted(set(range(len(self._sizes))) - set(of_rank_0))]

    def _probed(self, nbytes: int) -> list[float]:
        """[2] Returns what all-reduces of so many bytes take here. Collective."""
        probe = _Probe(self._like, nbytes // self._like.element_size())
        engine, reduction = self.build(probe, (nbytes,))
        timer = GradientTimer([probe.weight], self._like.device)
        factor = torch.ones(1, device=self._like.device)
        for _ in range(SETTLE + PROFILED):  # without zero_grad: the gradient stays in the bucket, and is not copied
            loss = engine(factor)
            loss.register_hook(lambda _: timer.begin())
            loss.backward()
        reduction.release()
        timer.close()
        return [record.exposed_s for record in timer.finished[SETTLE:]]

    # --- what there is to choose ---

    def _ddp_layout(self, sizes: Sequence[int], caps: Caps) -> tuple[int, ...]:
        return ddp_layout(sizes, caps, from_the_end=self.find_unused_parameters)

    def _proposal(self, backward: BackwardProfile) -> tuple[Partition, Caps]:
        if not _HAS_LISTS:
            cap = best_single_size(backward, from_the_end=self.find_unused_parameters)
            return Partition.predicted(backward, self._ddp_layout(backward.sizes, (cap,))), (cap,)
        small = coalesced(backward, GRAINS)
        proposed = Partition.predicted(small, optimal_layout(small))
        return proposed, proposed.buckets[::-1] if self.find_unused_parameters else proposed.buckets

    def _block(self, *, settle: bool) -> Generator[None, None, list[float]]:
        records = yield from self._backwards(BLOCK, settle=SETTLE if settle else 0)
        return [record.whole_s for record in records]

    def _times(self, *blocks: list[float]) -> list[float]:
        """Returns what a backward took in each block, from the rank that comes to it last. Collective."""
        everyone = all_gather_json(self.axis, blocks)
        return [median(_last_to_come(column)) for column in zip(*everyone, strict=True)]

    def _compare(self, backward: BackwardProfile, default: Partition, proposed: Partition, caps: Caps) -> Schedule:
        """[4] Tries the proposed buckets and the default in turn, and decides."""
        blocks: list[list[float]] = []
        for number, turn in enumerate(TURNS):
            is_new = number == 0 or turn != TURNS[number - 1]
            if is_new:
                self.use(caps if turn else None)
            blocks.append((yield from self._block(settle=is_new)))
        times = self._times(*blocks)
        of_default, of_proposed = (
            [time for time, which in zip(times, TURNS, strict=True) if which is turn] for turn in (False, True)
        )
        ratios = [theirs / ours for ours, theirs in zip(of_default, of_proposed, strict=True)]
        default = default.achieved(backward, median(of_default))
        proposed = proposed.achieved(backward, median(of_proposed))
        takes, _ = verdict = is_faster(ratios)
        self._decide(backward, default, proposed, verdict)
        if takes is not TURNS[-1]:
            self.use(caps if takes else None)

    def _decide(
        self, backward: BackwardProfile, default: Partition, proposed: Partition, verdict: tuple[bool, str]
    ) -> None:
        self.plan = BucketPlan(default, proposed, *verdict, backward.alone_s, backward.link, backward.beside)


def _last_to_come(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Returns, of what every rank took for the same things, what each took without waiting for another rank."""
    return [min(times) for times in zip(*ranks, strict=True)]
