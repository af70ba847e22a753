"""Finding bucket sizes while the training runs: measure, propose, compare, keep the quicker.

    backwards   2          2 + 5                    8 blocks of 6, and 2 after each change
    buckets     default    one for all gradients    default proposed │ proposed default │ default proposed │ ...
                at rest    [1] [2]                  [4]

[1] With one bucket nothing is communicated before the last gradient is ready, so hooks on the parameters see a
    backward as it would be alone, and what follows is an all-reduce of everything.
[2] What all-reduces of other sizes take is tried on a tensor of its own, over the very way that the gradients take.
[3] All ranks hear everybody's figures: a gradient is ready when it is on the last rank, an all-reduce begins with the
    rank that comes last. From equal figures all of them compute the same buckets, see `buckets`.
[4] A model of the machine is not the machine: backwards with the proposed buckets and with DistributedDataParallel's
    own are timed in alternation, and the proposed ones must win.

The training goes on meanwhile, with the same gradients as ever: bit for bit where they are added in shared memory, in
the order of the ranks, or by two ranks; the last bits of sums over gloo or NCCL depend on buckets in any case. What
changes buckets is a new DistributedDataParallel, which orders them in its first backward, by the order in which rank
0's gradients became ready; so each change takes two backwards until it can be timed. With find_unused_parameters it
keeps the reverse of the order in which the parameters were registered, and fills buckets from the other end.

Changes happen in forward, after a backward that averaged and with no other forward waiting for its own: all ranks come
there at the same moment. Where the trained parameters change, everything begins again.

Source for what DistributedDataParallel leaves to the user: S. Li et al., VLDB 2020, section 4, who find the best size
between 0 and 50 MB, another one for each backend and model.
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
from samestep.replicas.buckets import (
    DEFAULT_CAPS,
    MIB,
    BackwardProfile,
    BucketPlan,
    Cutting,
    best_single_size,
    coalesced,
    cut_by,
    is_quicker,
    optimal_layout,
)
from samestep.replicas.reduction import Way
from samestep.runtime.axes import Axis
from samestep.runtime.exchange import all_gather_json

__all__: list[str] = []

WARM = 2  # backwards before anything is measured
SETTLE = 2  # after new buckets: DDP orders them in the first, and they come to lie in shared memory in the second
PROFILED = 5
BLOCK = 6
TURNS = (False, True, True, False, False, True, True, False)  # whether the proposed buckets serve
PROBES = (32 << 10, 512 << 10, 8 << 20)  # bytes
SHORTEST = 1e-9  # seconds: no all-reduce takes less
WORTH = 0.99  # of the default's predicted end: what a proposal must come to before it is tried
GRAINS = 128  # into which gradients are taken together before buckets are made of them

Caps = tuple[int, ...]  # bytes that fill each bucket
Build = Callable[[nn.Module, Caps], tuple[DistributedDataParallel, Way]]

_HAS_LISTS = "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel.__init__).parameters  # torch 2.13


def argument(caps: Caps | None) -> dict[str, Any]:
    """Returns what tells DistributedDataParallel the caps; before torch 2.13 it takes one for all buckets."""
    if caps is None:
        return {}
    return {"bucket_cap_mb_list": [cap / MIB for cap in caps]} if _HAS_LISTS else {"bucket_cap_mb": caps[0] / MIB}


def why_not(module: nn.Module) -> str | None:
    """Returns why the buckets of a model cannot be chosen; None where they can. The same on all ranks."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad and parameter.numel()]
    if len({parameter.dtype for parameter in trained}) > 1:
        return "its parameters have several dtypes, and each has buckets of its own"
    if any(isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse for part in module.modules()):
        return "its sparse gradients are no part of the other buckets"
    return None if len(trained) > 1 else "it trains a single tensor, which fills one bucket"


Mark = Any  # seconds, or a CUDA event


def mark(device: torch.device) -> Mark:
    """Returns the moment at which the device comes to what it is given next."""
    if device.type != "cuda":
        return time.perf_counter()
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds(begin: Mark, end: Mark) -> float:
    """Returns the time between two moments; waits until the device has come to the second."""
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


@dataclass
class Record:
    """One backward: when it began, when each gradient was ready, in that order, and when the last was averaged.

    Of a gradient whose time nobody wants the moment is None.
    """

    start: Mark
    ready: dict[int, Mark] = field(default_factory=dict)
    end: Mark = None

    @property
    def whole_s(self) -> float:
        """Its length."""
        return seconds(self.start, self.end)

    @property
    def exposed_s(self) -> float:
        """What it waited after the last gradient was ready."""
        return seconds(list(self.ready.values())[-1], self.end)


class Watch:
    """Looks on as gradients become ready, through hooks on their parameters.

    Args:
        parameters: whose gradients; they are numbered.
        device: where they are.
    """

    def __init__(self, parameters: Sequence[Tensor], device: torch.device) -> None:
        self.finished: list[Record] = []
        self.is_at_rest = False  # a backward has ended since somebody made this False
        self.wants_times = True  # of single gradients
        self._device = device
        self._now: Record | None = None
        self._handles = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._note, number))  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(parameters)
        ]

    def begin(self) -> None:
        """A backward that averages has begun; called in it."""
        if not self._handles:
            return
        self._now = Record(mark(self._device))
        later = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001
        later(lambda: later(self._end))  # once more, to come after DDP's own, which waits for the all-reduces

    def _note(self, number: int, _: Tensor) -> None:
        if self._now is not None:
            self._now.ready[number] = mark(self._device) if self.wants_times else None

    def _end(self) -> None:
        if self._now is not None and self._now.ready:  # torch.autograd.grad comes to no parameter
            self._now.end = mark(self._device)
            self.finished.append(self._now)
        self._now, self.is_at_rest = None, True

    def close(self) -> None:
        """Takes the hooks away."""
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


Course = Generator[None, None, None]
Backwards = Generator[None, None, list[Record]]


class Tuning:
    """Finds the buckets of one model while it is trained. Collective throughout: all ranks come to it alike.

    Args:
        module: the bare model.
        axis: the ranks that average.
        find_unused_parameters: as the engine has it.
        build: returns an engine for any module, with these buckets, and the way in which it adds.
        use: has the model averaged in these buckets from now on, None being the default; returns the way.
    """

    def __init__(
        self,
        module: nn.Module,
        axis: Axis,
        *,
        find_unused_parameters: bool,
        build: Build,
        use: Callable[[Caps | None], Way],
    ) -> None:
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad and parameter.numel()]
        self.plan: BucketPlan | None = None
        self.watch = Watch(trained, trained[0].device)
        self._like = trained[0]
        self._sizes = [parameter.numel() * parameter.element_size() for parameter in trained]
        self._axis = axis
        self._in_given_order = find_unused_parameters
        self._build = build
        self._use = use
        self._course = self._whole_course()

    def advance(self) -> None:
        """Goes on, if there is enough to go on with; called where nothing is under way."""
        next(self._course, None)

    def close(self) -> None:
        """Leaves nothing behind in the model."""
        self.watch.close()
        self._course.close()

    def _whole_course(self) -> Course:
        yield from self._backwards(WARM)
        way = self._use((sum(self._sizes),))
        profiled = yield from self._backwards(PROFILED, settle=SETTLE)
        self.watch.wants_times = False
        backward = self._agreed(profiled, way)
        default = Cutting.predicted(backward, self._cut_by(backward.sizes, DEFAULT_CAPS))
        proposed, caps = self._proposal(backward)
        if proposed.buckets == default.buckets or proposed.finish_s > WORTH * default.finish_s:
            self._use(None)
            times = self._times((yield from self._block(settle=True)))
            default = default.achieved(backward, times[0])
            self._decide(backward, default, proposed, [])
        else:
            yield from self._compare(backward, default, proposed, caps)
        self.watch.close()

    def _backwards(self, number: int, *, settle: int = 0) -> Backwards:
        """Waits for backwards, and returns them; the first `settle` are left out."""
        begin = len(self.watch.finished) + settle
        while len(self.watch.finished) < begin + number:
            yield
        return self.watch.finished[begin : begin + number]

    # --- what there is to know ---

    def _agreed(self, profiled: list[Record], way: Way) -> BackwardProfile:
        """[3] Returns the backward as all ranks see it. Collective."""
        probed = {nbytes: self._probed(nbytes) for nbytes in self._probe_sizes()}
        probed[sum(self._sizes)] = [one.exposed_s for one in profiled]
        mine = {"ready": self._ready(profiled), "order": list(profiled[-1].ready), "adding": list(probed.values())}
        told = all_gather_json(self._axis, mine)
        adding = [median(_last_to_come(ranks)) for ranks in zip(*(one["adding"] for one in told), strict=True)]
        order = self._order(told[0]["order"])
        return BackwardProfile(
            sizes=tuple(self._sizes[number] for number in order),
            ready_s=tuple(max(one["ready"][number] for one in told) for number in order),
            link=fit([(nbytes, max(time_s, SHORTEST)) for nbytes, time_s in zip(probed, adding, strict=True)]),
            beside=way.beside,
        )

    def _ready(self, profiled: list[Record]) -> list[float]:
        """Returns when each gradient was ready; 0 where it never came, which DDP finds out before the backward."""
        times: list[list[float]] = [[] for _ in self._sizes]
        for record in profiled:
            for number, moment in record.ready.items():
                times[number].append(seconds(record.start, moment))
        return [median(found) if found else 0.0 for found in times]

    def _order(self, of_rank_0: list[int]) -> list[int]:
        """The order in which gradients are put into buckets."""
        if self._in_given_order:
            return list(range(len(self._sizes)))[::-1]
        return [*of_rank_0, *sorted(set(range(len(self._sizes))) - set(of_rank_0))]

    def _probe_sizes(self) -> list[int]:
        total, element = sum(self._sizes), self._like.element_size()
        return [size for size in PROBES if size < total] or [max(1, total // 8 // element) * element]

    def _probed(self, nbytes: int) -> list[float]:
        """[2] Returns what all-reduces of so many bytes take here. Collective."""
        probe = _Probe(self._like, nbytes // self._like.element_size())
        engine, way = self._build(probe, (nbytes,))
        watch = Watch([probe.weight], self._like.device)
        factor = torch.ones(1, device=self._like.device)
        for _ in range(SETTLE + PROFILED):  # without zero_grad: the gradient stays in the bucket, and is not copied
            loss = engine(factor)
            loss.register_hook(lambda _: watch.begin())
            loss.backward()
        way.let_go()
        watch.close()
        return [record.exposed_s for record in watch.finished[SETTLE:]]

    # --- what there is to choose ---

    def _cut_by(self, sizes: Sequence[int], caps: Caps) -> tuple[int, ...]:
        return cut_by(sizes, caps, from_the_end=self._in_given_order)

    def _proposal(self, backward: BackwardProfile) -> tuple[Cutting, Caps]:
        """Returns the buckets that should end earliest, and the caps that make them."""
        if not _HAS_LISTS:
            cap = best_single_size(backward, from_the_end=self._in_given_order)
            return Cutting.predicted(backward, self._cut_by(backward.sizes, (cap,))), (cap,)
        small = coalesced(backward, GRAINS)
        proposed = Cutting.predicted(small, optimal_layout(small))
        return proposed, proposed.buckets[::-1] if self._in_given_order else proposed.buckets

    def _block(self, *, settle: bool) -> Generator[None, None, list[float]]:
        records = yield from self._backwards(BLOCK, settle=SETTLE if settle else 0)
        return [record.whole_s for record in records]

    def _times(self, *blocks: list[float]) -> list[float]:
        """Returns what a backward took in each block, from the rank that comes to it last. Collective."""
        told = all_gather_json(self._axis, blocks)
        return [median(_last_to_come(column)) for column in zip(*told, strict=True)]

    def _compare(self, backward: BackwardProfile, default: Cutting, proposed: Cutting, caps: Caps) -> Course:
        """[4] Tries the proposed buckets and the default in turn, and decides."""
        blocks: list[list[float]] = []
        for number, turn in enumerate(TURNS):
            is_new = number == 0 or turn != TURNS[number - 1]
            if is_new:
                self._use(caps if turn else None)
            blocks.append((yield from self._block(settle=is_new)))
        times = self._times(*blocks)
        of_default, of_proposed = (
            [time for time, which in zip(times, TURNS, strict=True) if which is turn] for turn in (False, True)
        )
        ratios = [theirs / ours for ours, theirs in zip(of_default, of_proposed, strict=True)]
        self._decide(
            backward,
            default.achieved(backward, median(of_default)),
            proposed.achieved(backward, median(of_proposed)),
            ratios,
        )
        assert self.plan is not None
        if self.plan.takes_proposed is not TURNS[-1]:
            self._use(caps if self.plan.takes_proposed else None)

    def _decide(self, backward: BackwardProfile, default: Cutting, proposed: Cutting, ratios: list[float]) -> None:
        takes, reason = is_quicker(ratios) if ratios else (False, _not_worth(default, proposed))
        self.plan = BucketPlan(default, proposed, takes, reason, backward.alone_s, backward.link, backward.beside)


def _last_to_come(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Returns, of what every rank took for the same things, what each took without waiting for another rank."""
    return [min(times) for times in zip(*ranks, strict=True)]


def _not_worth(default: Cutting, proposed: Cutting) -> str:
    if default.buckets == proposed.buckets:
        return "the default is what would be proposed"
    return "the default is kept: no buckets are predicted to end more than 1 % earlier"
