"""`samestep.plan_pipeline`: which partition, which schedule and how many micro-batches make the shortest step.

    micro-batches of a batch of 96     2 x 48      4 x 24      8 x 12      16 x 6
    layers, measured at that size      t(48)       t(24)       t(12)       t(6)           fewer samples, worse kernels
    schedules, each partitioned        fill-drain, 1f1b, eager-1f1b, zero-bubble          more of them, less bubble
                                       interleaved, with 2, 3 or 4 stages a rank          less still, more messages

All that are possible are simulated, and the best is kept. So "96 : 16 or 120 : 20", a batch and a split size, is
answered by times of layers and not by a rule: both have as much bubble, and differ in what kernels make of 16 or 20
samples.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from torch import Tensor

from samestep.errors import ModelError, UsageError
from samestep.pipelines.chain_layer import LayerChain
from samestep.pipelines.gantt import draw
from samestep.pipelines.layers import Device, Layer, Link, check_num_stages, interpolate, with_split_backwards
from samestep.pipelines.losses import LossFn, WeightFn, additivity_problem
from samestep.pipelines.model_chain import AnyModel, build_chain, normalize_model, shared_layers
from samestep.pipelines.partition import PartitionProblem
from samestep.pipelines.profiler import NUM_PARTS, REPEATS, WARM_UP, profile_layers
from samestep.pipelines.splitting import check_equivalence
from samestep.pipelines.tied_weights import find_tied
from samestep.rankenv import read_rank_variables
from samestep.schedule.algorithms import ONE_STAGE_PER_RANK, SCHEDULE_NAMES, fill_drain, make_schedule
from samestep.schedule.schedule import Schedule
from samestep.schedule.simulate import Costs, Timeline, simulate
from samestep.topology import cut_evenly

__all__ = ["PipelinePlan", "plan_pipeline"]

EXAMPLES = 2  # samples with which a forward is traced
MAX_MICRO_BATCHES = 8  # for each stage, where they are chosen
STAGES_PER_RANK = (2, 3, 4)  # that are tried with "interleaved"
SLOW_MESSAGES = 2.0  # times as long as the link says: gloo's between ranks that compute took 0.7 ms, not 0.35


@dataclass(frozen=True)
class PipelinePlan:
    """How a model is cut, and in which order its stages work; made by :func:`samestep.plan_pipeline`.

    Attributes:
        layers: what each layer costs for a micro-batch under the schedule, in their order.
        ends: by stage, the layer behind its last.
        schedule: by name: "fill-drain", "1f1b", "eager-1f1b", "zero-bubble" or "interleaved".
        micro_batches: that a batch is cut into.
        samples: of the batch that was measured.
        loss_fn: of outputs and targets.
        weight: of targets, or None: the samples.
        costs: of the stages, for a micro-batch.
        timeline: the step that is predicted.
        bound: seconds that no cut undercuts with this schedule, and as many stages.
        example_inputs: with which the forward is traced, if the model is no nn.Sequential and no list of modules.
        digest: of the traced forward.
        splits: where it was split into layers.
        sizes: samples of a micro-batch -> the layers, as measured.
        tried: micro-batches -> seconds of the best step with so many.
        devices: by rank.
        link: between a stage and the next.
        stages_per_rank: assigned in turn; more than one if the schedule is interleaved.
        loss_warning: why the losses of micro-batches do not add up to that of the batch, as far as the sample shows; or
            None.
    """

    layers: tuple[Layer, ...]
    ends: tuple[int, ...]
    schedule: str
    micro_batches: int
    samples: int
    loss_fn: LossFn = field(repr=False)
    weight: WeightFn | None = field(repr=False)
    costs: Costs = field(repr=False)
    timeline: Timeline = field(repr=False)
    bound: float
    example_inputs: tuple[Tensor, ...] = field(default=(), repr=False)
    digest: str = field(default="", repr=False)
    splits: Sequence[int] = field(default=(), repr=False)
    sizes: Mapping[int, Sequence[Layer]] = field(default_factory=dict, repr=False)
    tried: Mapping[int, float] = field(default_factory=dict, repr=False)
    devices: Sequence[Device] = field(default=(), repr=False)
    link: Link = field(default_factory=Link, repr=False)
    stages_per_rank: int = 1
    loss_warning: str | None = field(default=None, repr=False)

    @property
    def ranks(self) -> int:
        """How many hold stages."""
        return len(self.ends) // self.stages_per_rank

    @property
    def seconds(self) -> float:
        """What a step is predicted to take, without the optimizer."""
        return self.timeline.seconds

    @property
    def alone(self) -> float:
        """What one device would take for the same micro-batches."""
        return self.micro_batches * sum(layer.forward + layer.inputs + layer.weights for layer in self.layers)

    def seconds_of(self, samples: int, micro_batches: int) -> float:
        """Returns what a step with another batch is predicted to take, cut and ordered as here.

        Sizes of micro-batches that were not measured are taken from t(b) = alpha + beta b of those that were.

        Args:
            samples: of one replica's batch.
            micro_batches: that it is cut into.

        Raises:
            UsageError: a single size was measured, and it is another; or there are fewer samples than micro-batches.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
            >>> batch = torch.randn(96, 4), torch.zeros(96, dtype=torch.int64)
            >>> plan = plan_pipeline(model, batch, nn.functional.cross_entropy, repeats=1)
            >>> per_sample = {b: plan.seconds_of(b, 6) / b for b in (96, 120)}  # micro-batches of 16 and of 20
        """
        if not 1 <= micro_batches <= samples:
            raise UsageError(f"{samples} samples in {micro_batches} micro-batches: each must have one at least")
        schedule = make_schedule(self.schedule, self.ranks, micro_batches, self.stages_per_rank)
        layers = with_split_backwards(interpolate(self.sizes, -(-samples // micro_batches)), schedule)
        problem = PartitionProblem(layers, self.devices, schedule, self.link)
        return simulate(schedule, problem.costs(self.ends)).seconds

    def gantt(self, file: str | Path, *, compared: bool = False) -> None:
        """Draws the step that is predicted: in a page that needs no network, or as an image.

        Args:
            file: where; its name ends in ".html" or ".png".
            compared: draw above it the step on one device, and with copies that ranks wait for, and that they do not.

        Raises:
            UsageError: it ends otherwise, or plotly, for a page, or Pillow, for an image, is not installed.
        """
        others = reference_timelines(self.timeline.schedule, self.costs) if compared else {}
        draw({**others, f"predicted, {self.schedule}": self.timeline}, {}, Path(file))

    def __str__(self) -> str:
        """The cut and what it comes to, for people."""
        each = -(-self.samples // self.micro_batches)
        several = self.stages_per_rank > 1
        shared = f", {self.stages_per_rank} on each of {self.ranks} ranks" if several else ""
        lines = [
            f"{len(self.ends)} stages{shared}, {self.schedule}, {self.micro_batches} micro-batches of {each} samples"
        ]
        for stage, (begin, end) in enumerate(zip((0, *self.ends), self.ends, strict=False)):
            own = self.layers[begin:end]
            names = own[0].name if len(own) == 1 else f"{own[0].name} to {own[-1].name}"
            forward = 1e3 * sum(layer.forward for layer in own)
            backward = 1e3 * sum(layer.inputs + layer.weights for layer in own)
            sent = f", sends {own[-1].activations / 1e6:.2f} MB" if end < len(self.layers) else ""
            rank = f" on rank {stage % self.ranks}" if several else ""
            lines.append(f"  stage {stage}{rank}   {names}: forward {forward:.2f} ms, backward {backward:.2f} ms{sent}")
        gap = 1 - self.bound / self.seconds
        proved = "no other cut is better" if gap <= 0 else f"another cut is better by {100 * gap:.1f} % at most"
        lines.append(
            f"  predicted {1e3 * self.seconds:.1f} ms a step, {self.alone / self.seconds:.2f} times as quick as one "
            f"device; {100 * self.timeline.idle:.0f} % idle; {proved}"
        )
        if spread := sum(layer.spread for layer in self.layers):
            part = spread * self.micro_batches / self.alone
            lines.append(f"  half of the passes that were measured lay within {100 * part:.0f} % of these times")
        if len(self.tried) > 1:
            tried = ", ".join(f"{count}: {1e3 * seconds:.1f}" for count, seconds in sorted(self.tried.items()))
            lines.append(f"  ms a step by micro-batches  {tried}")
        return "\n".join(lines)


def plan_pipeline(
    model: AnyModel,
    sample: Sequence[Any],
    loss_fn: Callable[[Any, Any], Tensor],
    *,
    stages: int = 2,
    micro_batches: int | Literal["auto"] = "auto",
    schedule: str = "auto",
    devices: Sequence[Device] | None = None,
    link: Link | None = None,
    weight: Callable[[Any], float] | None = None,
    repeats: int = REPEATS,
) -> PipelinePlan:
    """Measures a model's layers, and returns the cut and the schedule of which none is predicted to be faster.

    Args:
        model: on the device that it is measured on: an nn.Sequential, or any whose forward torch.fx can follow; or
            what torch.export has made of it, with batches of any size; or a list of modules, which are not cut, and of
            which each is called with what the one before it gives. It stays as it is.
        sample: inputs and targets of one replica's batch, there too; dim 0 of all runs over the samples.
        loss_fn: of outputs and targets: the mean loss of a micro-batch, or all of its losses.
        stages: as many as the pipeline has ranks; under "interleaved" each rank has several.
        micro_batches: that a batch is cut into; "auto" tries 1, 2, 4, … up to 8 for each stage.
        schedule: a name, or "auto": all of "fill-drain", "1f1b", "eager-1f1b" and "zero-bubble", and where a link is
            given "interleaved", which has 2, 3 or 4 stages on each rank, and as many times the messages; it is chosen
            if it is fastest also with messages that take twice as long.
        devices: by rank; all as quick as this one, with memory enough, if None.
        link: between a stage and the next; messages that take no time if None.
        weight: of targets: how many items their mean loss is of; their samples if None.
        repeats: passes of which the median is taken.

    Raises:
        ModelError: the model's forward cannot be followed, or cut into so many stages, with the line.
        UsageError: the sample is no batch, there are more stages than layers, a name is unknown, or no cut fits into
            memory.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> batch = torch.randn(8, 4), torch.zeros(8, dtype=torch.int64)
        >>> plan = plan_pipeline(model, batch, nn.functional.cross_entropy, micro_batches=4, repeats=1)
        >>> len(plan.ends), plan.micro_batches
        (2, 4)
    """
    if not isinstance(sample, list | tuple) or len(sample) < 2:
        raise UsageError(
            f"the sample is a {type(sample).__name__}, not inputs and targets of a batch: give them in a tuple or "
            "list, the targets last"
        )
    model = normalize_model(model)
    examples = tuple(each[:EXAMPLES] for each in sample[:-1])
    chain = build_chain(model, examples)
    if len(chain.layers) < stages and chain.obstacles:
        raise ModelError(f"{stages} stages of {type(model).__name__}: {'; '.join(chain.obstacles[:3])}")
    if chain.digest:
        check_equivalence(model, chain.layers, examples)
    devices = [Device()] * stages if devices is None else devices
    if len(devices) != stages:
        raise UsageError(f"{len(devices)} devices for {stages} stages: give one for each")
    if schedule == "auto":  # one with more messages only if it is known what they take
        names = [each for each in SCHEDULE_NAMES if each in ONE_STAGE_PER_RANK or link is not None]
    else:
        names = [make_schedule(schedule, stages, 1).name]
    check_num_stages(chain.layers, stages * (STAGES_PER_RANK[0] if schedule == "interleaved" else 1))
    colocated = shared_layers(chain.layers, find_tied(model, chain.layers))
    samples = len(sample[-1])
    counts = _micro_batch_counts(micro_batches, stages, samples)
    sizes: dict[int, list[Layer]] = {}
    plans: list[PipelinePlan] = []
    refused: list[UsageError] = []
    with ProgressLine() as line:
        for count in counts:
            measured = _profile(chain, sample, loss_fn, count, repeats, sizes, line)
            for name, per_rank in _candidates(names, count, stages, len(chain.layers)):
                line.say(f"searching where to cut for {name}, {count} micro-batches")
                try:
                    order = make_schedule(name, stages, count, per_rank)
                    layers = with_split_backwards(measured, order)
                    problem = PartitionProblem(layers, devices, order, link or Link(), colocated=colocated)
                    partition = problem.best()
                except UsageError as error:
                    refused.append(error)
                    continue
                costs = problem.costs(partition.ends)
                plans.append(
                    PipelinePlan(
                        layers=tuple(layers),
                        ends=partition.ends,
                        schedule=name,
                        micro_batches=count,
                        samples=samples,
                        loss_fn=loss_fn,
                        weight=weight,
                        costs=costs,
                        timeline=simulate(order, costs),
                        bound=partition.bound,
                        example_inputs=tuple(each.clone() for each in examples) if chain.digest else (),
                        digest=chain.digest,
                        splits=chain.splits,
                        sizes=sizes,
                        devices=devices,
                        link=problem.link,
                        stages_per_rank=per_rank,
                    )
                )
    if not plans:
        raise refused[0]
    plans.sort(key=_cautious_seconds)
    tried: dict[int, float] = {}
    for plan in plans:
        tried.setdefault(plan.micro_batches, plan.seconds)
    two_micro_batches = 2 * -(-samples // counts[0])
    warning = additivity_problem(chain.layers, sample, loss_fn, weight, two_micro_batches)
    return replace(plans[0], tried=dict(sorted(tried.items())), loss_warning=warning)


def _cautious_seconds(plan: PipelinePlan) -> float:
    """Returns the seconds by which plans are compared: additional messages must pay off also if they take longer."""
    if plan.stages_per_rank == 1:
        return plan.seconds
    costs = plan.costs
    forward, backward = ([SLOW_MESSAGES * each for each in way] for way in (costs.send_forward, costs.send_backward))
    slow = replace(costs, send_forward=forward, send_backward=backward, overhead=SLOW_MESSAGES * costs.overhead)
    return simulate(plan.timeline.schedule, slow).seconds


def _candidates(names: Sequence[str], count: int, ranks: int, layers: int) -> Iterator[tuple[str, int]]:
    """Yields names, and how many stages each rank has."""
    for name in names:
        if name != "interleaved":
            yield name, 1
        elif len(names) == 1 or count >= ranks > 1:
            yield from ((name, per_rank) for per_rank in STAGES_PER_RANK if per_rank * ranks <= layers)


def _micro_batch_counts(count: int | Literal["auto"], stages: int, samples: int) -> list[int]:
    if count == "auto":
        return [each for power in range(16) if (each := 2**power) <= min(samples, MAX_MICRO_BATCHES * stages)]
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= samples:
        raise UsageError(
            f"micro_batches={count!r} of a batch of {samples} samples: give a whole number from 1 to {samples}, or "
            "'auto'"
        )
    return [count]


def _profile(
    chain: LayerChain,
    sample: Sequence[Any],
    loss_fn: LossFn,
    count: int,
    repeats: int,
    sizes: dict[int, list[Layer]],
    line: ProgressLine,
) -> list[Layer]:
    """Returns what layers cost for the largest of so many micro-batches, and adds it to `sizes`."""
    begin, end = cut_evenly(len(sample[-1]), count)[0]
    *inputs, targets = (each[begin:end] for each in sample)
    passes = itertools.count(1)

    def loss_of(outputs: Any) -> Tensor:
        losses = loss_fn(outputs, targets)
        return losses if losses.dim() == 0 else losses.mean()

    def on_pass() -> None:
        what = f"measuring {count} micro-batches of {end - begin} samples"
        line.say(f"{what}: pass {next(passes)} of {NUM_PARTS * (WARM_UP + repeats)}")

    sizes[end - begin] = profile_layers(chain.layers, inputs, loss_of, repeats, on_pass)
    return sizes[end - begin]


def reference_timelines(schedule: Schedule, costs: Costs) -> dict[str, Timeline]:
    """Returns title -> the step on one device, and with fill and drain where ranks wait for copies, and do not.

    Where ranks have several stages, the last two have the schedule itself.

    Example:
        >>> costs = Costs([1, 1], [1, 1], [1, 1], [0.5], [0.5])
        >>> {name: each.seconds for name, each in reference_timelines(fill_drain(2, 4), costs).items()}
        {'one device': 24.0, '2 devices, one stream': 19.0, '2 devices, two streams': 16.0}
    """
    alone = Costs([sum(costs.forward)], [sum(costs.inputs)], [sum(costs.weights)])
    ordered = schedule
    if schedule.stages == schedule.ranks:
        ordered = fill_drain(schedule.ranks, schedule.micro_batches)
    found = {"one device": simulate(fill_drain(1, schedule.micro_batches), alone)}
    for streams, overlap in (("one stream", False), ("two streams", True)):
        found[f"{schedule.ranks} devices, {streams}"] = simulate(ordered, replace(costs, overlap=overlap))
    return found


class ProgressLine:
    """One line on standard error that is overwritten and goes away at the end; on a terminal, and on rank 0 alone.

    Example:
        >>> with ProgressLine() as line:
        ...     for number in range(3):
        ...         line.say(f"pass {number + 1} of 3")
    """

    EVERY_S = 0.1  # so that writing costs nothing beside what is measured

    def __init__(self) -> None:
        ranks = read_rank_variables()
        self._is_shown = sys.stderr.isatty() and (ranks is None or ranks.rank == 0)
        self._began, self._written = time.monotonic(), 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._write("")

    def say(self, what: str) -> None:
        """Writes it, if nothing was written just now."""
        now = time.monotonic()
        if now - self._written >= self.EVERY_S:
            self._written = now
            self._write(f"samestep: {now - self._began:4.0f} s  {what}")

    def _write(self, line: str) -> None:
        if self._is_shown:
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()
