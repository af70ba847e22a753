"""Which cut, which schedule and how many micro-batches: all that come into question are played, and the best is kept.

    micro-batches of a batch of 96     2 x 48      4 x 24      8 x 12      16 x 6
    layers, measured at that size      t(48)       t(24)       t(12)       t(6)           fewer samples, worse kernels
    schedules, with their best cuts    fill-drain, 1F1B, eager 1F1B, zero bubble          more of them, less bubble
                                       interleaved, with 2, 3 or 4 stages a rank          less still, more messages

So "96 : 16 or 120 : 20", a batch and a split size, is answered by times of layers and not by a rule: both have as much
bubble, and differ in what kernels make of 16 or 20 samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from samestep.errors import ModelError, UsageError
from samestep.pipelines.agreement import check_equivalence
from samestep.pipelines.balance import PartitionProblem
from samestep.pipelines.chain import chain_of, shared
from samestep.pipelines.compared import ways
from samestep.pipelines.curves import layers_at
from samestep.pipelines.cutting import Recipe
from samestep.pipelines.given import Given, opened
from samestep.pipelines.layers import Device, Layer, Link, check_chain
from samestep.pipelines.losses import doubt
from samestep.pipelines.measure import PARTS, REPEATS, WARM_UP, profile_layers
from samestep.pipelines.picture import draw
from samestep.pipelines.telling import ProgressLine
from samestep.pipelines.ties import ties_of
from samestep.schedule.choose import SCHEDULE_NAMES, STRAIGHT, make_schedule
from samestep.schedule.plan import Schedule
from samestep.schedule.simulate import Costs, Timeline, simulate
from samestep.topology import cut_evenly

__all__ = ["PipelinePlan", "plan_pipeline"]

_FOLLOWED = 2  # samples with which a forward is followed
AT_MOST = 8  # micro-batches for each stage, where they are chosen
CHUNKS = (2, 3, 4)  # stages of each rank, where schedules are interleaved
SLACK = 2.0  # times as long as the link says: gloo's messages between ranks that compute, of 0.35 ms, took 0.7


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
        recipe: how the model was cut into layers, if it is no nn.Sequential.
        sizes: samples of a micro-batch -> the layers, as measured.
        tried: micro-batches -> seconds of the best step with so many.
        devices: by rank.
        link: between a stage and the next.
        chunks: stages of each rank, which are dealt in turn; more than one if the schedule is interleaved.
        doubt: why the losses of micro-batches do not add up to that of the batch, as far as the sample shows; or None.
    """

    layers: tuple[Layer, ...]
    ends: tuple[int, ...]
    schedule: str
    micro_batches: int
    samples: int
    loss_fn: Callable[[Any, Any], Tensor] = field(repr=False)
    weight: Callable[[Any], float] | None = field(repr=False)
    costs: Costs = field(repr=False)
    timeline: Timeline = field(repr=False)
    bound: float
    recipe: Recipe | None = field(default=None, repr=False)
    sizes: Mapping[int, Sequence[Layer]] = field(default_factory=dict, repr=False)
    tried: Mapping[int, float] = field(default_factory=dict, repr=False)
    devices: Sequence[Device] = field(default=(), repr=False)
    link: Link = field(default_factory=Link, repr=False)
    chunks: int = 1
    doubt: str | None = field(default=None, repr=False)

    @property
    def ranks(self) -> int:
        """How many hold stages."""
        return len(self.ends) // self.chunks

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
            >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
            >>> batch = torch.randn(96, 4), torch.zeros(96, dtype=torch.int64)
            >>> plan = plan_pipeline(model, batch, nn.functional.cross_entropy, repeats=1)
            >>> per_sample = {b: plan.seconds_of(b, 6) / b for b in (96, 120)}  # micro-batches of 16 and of 20
        """
        if not 1 <= micro_batches <= samples:
            raise UsageError(f"{samples} samples in {micro_batches} micro-batches: each must have one at least")
        plan = make_schedule(self.schedule, self.ranks, micro_batches, self.chunks)
        layers = halved(layers_at(self.sizes, -(-samples // micro_batches)), plan)
        return simulate(plan, PartitionProblem(layers, self.devices, plan, self.link).costs(self.ends)).seconds

    def gantt(self, file: str | Path, *, compared: bool = False) -> None:
        """Draws the step that is predicted: in a page that needs no network, or as an image.

        Args:
            file: where; its name ends in ".html" or ".png".
            compared: draw above it the step on one device, and with copies that ranks wait for, and that they do not.

        Raises:
            UsageError: it ends otherwise, or plotly, for a page, or Pillow, for an image, is not installed.
        """
        others = ways(self.timeline.plan, self.costs) if compared else {}
        draw({**others, f"predicted, {self.schedule}": self.timeline}, {}, Path(file))

    def __str__(self) -> str:
        """The cut and what it comes to, for people."""
        each = -(-self.samples // self.micro_batches)
        dealt = f", {self.chunks} on each of {self.ranks} ranks" if self.chunks > 1 else ""
        lines = [
            f"{len(self.ends)} stages{dealt}, {self.schedule}, {self.micro_batches} micro-batches of {each} samples"
        ]
        for stage, (begin, end) in enumerate(zip((0, *self.ends), self.ends, strict=False)):
            own = self.layers[begin:end]
            names = own[0].name if len(own) == 1 else f"{own[0].name} to {own[-1].name}"
            forward = 1e3 * sum(layer.forward for layer in own)
            backward = 1e3 * sum(layer.inputs + layer.weights for layer in own)
            sent = f", sends {own[-1].activations / 1e6:.2f} MB" if end < len(self.layers) else ""
            rank = f" on rank {stage % self.ranks}" if self.chunks > 1 else ""
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
            told = ", ".join(f"{count}: {1e3 * seconds:.1f}" for count, seconds in sorted(self.tried.items()))
            lines.append(f"  ms a step by micro-batches  {told}")
        return "\n".join(lines)


def plan_pipeline(
    model: Given,
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
    """Measures a model's layers, and returns the cut and the schedule of which none is predicted to be quicker.

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
            if it is quickest also with messages that take twice as long.
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
    model = opened(model)
    inputs = [each[:_FOLLOWED] for each in sample[:-1]]
    chain = chain_of(model, inputs)
    if len(chain.layers) < stages and chain.obstacles:
        raise ModelError(f"{stages} stages of {type(model).__name__}: {'; '.join(chain.obstacles[:3])}")
    if chain.recipe is not None:
        check_equivalence(model, [layer for _, layer in chain.layers], inputs)
    devices = [Device()] * stages if devices is None else devices
    if len(devices) != stages:
        raise UsageError(f"{len(devices)} devices for {stages} stages: give one for each")
    names = _names(schedule, stages, link)
    check_chain(chain.layers, stages * (CHUNKS[0] if schedule == "interleaved" else 1))
    together = shared(chain.layers, ties_of(model, chain.layers))
    counts = _counts(micro_batches, stages, len(sample[-1]))
    with ProgressLine() as telling:
        asked = _Asked(
            chain.layers, chain.recipe, together, sample, loss_fn, weight, devices, link or Link(), repeats, telling
        )
        found = [plan for count in counts for plan in asked.plans(count, names)]
    if not found:
        raise asked.refused[0]
    found.sort(key=_cautious)
    tried: dict[int, float] = {}
    for plan in found:
        tried.setdefault(plan.micro_batches, plan.seconds)
    pair = 2 * -(-len(sample[-1]) // counts[0])  # micro-batches
    why = doubt([layer for _, layer in chain.layers], sample, loss_fn, weight, pair)
    return replace(found[0], tried=dict(sorted(tried.items())), doubt=why)


def _cautious(plan: PipelinePlan) -> float:
    """Returns the seconds by which plans are compared: more messages than need be must pay also if they take longer."""
    if plan.chunks == 1:
        return plan.seconds
    ahead, back = ([SLACK * each for each in way] for way in (plan.costs.ahead, plan.costs.back))
    costs = replace(plan.costs, ahead=ahead, back=back, handling=SLACK * plan.costs.handling)
    return simulate(plan.timeline.plan, costs).seconds


def _names(asked: str, stages: int, link: Link | None) -> Sequence[str]:
    """Returns the schedules to be compared: those with more messages than others only if it is known what they take."""
    if asked == "auto":
        return [name for name in SCHEDULE_NAMES if name in STRAIGHT or link is not None]
    make_schedule(asked, stages, 1)
    return [asked]


def _counts(asked: int | Literal["auto"], stages: int, samples: int) -> list[int]:
    if asked == "auto":
        return [count for power in range(16) if (count := 2**power) <= min(samples, AT_MOST * stages)]
    if isinstance(asked, bool) or not isinstance(asked, int) or not 1 <= asked <= samples:
        raise UsageError(
            f"micro_batches={asked!r} of a batch of {samples} samples: give a whole number from 1 to {samples}, or "
            "'auto'"
        )
    return [asked]


@dataclass(frozen=True)
class _Asked:
    """What :func:`plan_pipeline` was told."""

    layers: Sequence[tuple[str, nn.Module]]
    recipe: Recipe | None
    together: Sequence[frozenset[int]]
    sample: Sequence[Any]
    loss_fn: Callable[[Any, Any], Tensor]
    weight: Callable[[Any], float] | None
    devices: Sequence[Device]
    link: Link
    repeats: int
    telling: ProgressLine
    sizes: dict[int, list[Layer]] = field(default_factory=dict)
    refused: list[UsageError] = field(default_factory=list)

    def plans(self, count: int, names: Sequence[str]) -> Iterator[PipelinePlan]:
        """Yields the best cut of so many micro-batches under each schedule that can be; notes why others cannot."""
        measured = self.measured(count)
        for name, chunks in self._schedules(count, names):
            self.telling.say(f"searching where to cut for {name}, {count} micro-batches")
            try:
                plan = make_schedule(name, len(self.devices), count, chunks)
                problem = PartitionProblem(
                    halved(measured, plan), self.devices, plan, self.link, together=self.together
                )
                split = problem.best()
            except UsageError as error:
                self.refused.append(error)
                continue
            costs = problem.costs(split.ends)
            yield PipelinePlan(
                layers=tuple(problem.layers),
                ends=split.ends,
                schedule=name,
                micro_batches=count,
                samples=len(self.sample[-1]),
                loss_fn=self.loss_fn,
                weight=self.weight,
                costs=costs,
                timeline=simulate(plan, costs),
                bound=split.bound,
                recipe=self.recipe,
                sizes=self.sizes,
                devices=self.devices,
                link=self.link,
                chunks=chunks,
            )

    def _schedules(self, count: int, names: Sequence[str]) -> Iterator[tuple[str, int]]:
        """Yields names, and how many stages each rank has."""
        ranks, layers = len(self.devices), len(self.layers)
        for name in names:
            if name != "interleaved":
                yield name, 1
            elif len(names) == 1 or count >= ranks > 1:
                yield from ((name, chunks) for chunks in CHUNKS if chunks * ranks <= layers)

    def measured(self, count: int) -> list[Layer]:
        """Returns what layers cost for the largest of so many micro-batches."""
        begin, end = cut_evenly(len(self.sample[-1]), count)[0]
        *inputs, targets = (each[begin:end] for each in self.sample)

        def lose(outputs: Any) -> Tensor:
            losses = self.loss_fn(outputs, targets)
            return losses if losses.dim() == 0 else losses.mean()

        passes = itertools.count(1)

        def tell() -> None:
            what = f"measuring {count} micro-batches of {end - begin} samples"
            self.telling.say(f"{what}: pass {next(passes)} of {PARTS * (WARM_UP + self.repeats)}")

        found = profile_layers(self.layers, inputs, lose, self.repeats, tell)
        self.sizes[end - begin] = found
        return found


def halved(layers: Sequence[Layer], plan: Schedule) -> list[Layer]:
    """Returns what layers cost under a schedule: backwards in halves may take more."""
    if not any(action.kind == "W" for order in plan.orders for action in order):
        return list(layers)
    return [replace(each, weights=each.weights + each.split) for each in layers]
