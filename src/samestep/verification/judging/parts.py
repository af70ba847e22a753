"""Whether the first gradients of ranks are those of one process at its own pace, from the same parameters and inputs.

    one process   up.weight [64, 32]   norm.weight [32]
    rank 0        up.weight [32, 32]   norm.weight [32]       half of the first gradient, and all of the second

All ranks keep what they hold, so a model that the script cuts over the ranks by itself is compared, too: tensor,
sequence, expert or pipeline parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from samestep.text import listed, plural
from samestep.verification import numerics
from samestep.verification.findings import Finding
from samestep.verification.journal import Event
from samestep.verification.judging import own_data, rates
from samestep.verification.judging.placement import Place, make_the_whole, places
from samestep.verification.judging.record import Rank, Record, of_optimizer
from samestep.verification.judging.states import built_at, made
from samestep.verification.recording.parts import Due, Part

SAME_INPUTS = "from the same parameters and inputs"
FIRST = 3  # steps
_FEWEST = 3  # gradients that are one process's: then so are its samples
_NEAR = 1e-4  # of a gradient's norm; some scripts compute a part of it in float32
_LARGE = 1e-2  # of a gradient's norm
_FACTOR = 1e-3  # of a factor
_MANY = 8  # numbers that are no multiple of others by chance


@dataclass
class Parts:
    """What the ranks hold, and what one process holds; all of them have kept the values of their first steps."""

    record: Record
    alone: Record
    places: list[dict[str, Place]] = field(init=False)

    def __post_init__(self) -> None:
        self.places = [places(held, self._whole) for held in self._held]
        if self._steps:
            self.places = [*map(self._told_by_gradients, self.record.ranks, self.places)]

    def _told_by_gradients(self, rank: Rank, found: dict[str, Place]) -> dict[str, Place]:
        """The places of a rank; parameters that begin alike lie where one process has the rank's first gradient."""
        own, whole = _gradients(self.record, rank, 0), _gradients(self.alone, self.alone.ranks[0], 0)
        told = {}
        for name, place in found.items():
            near = [one for one in place.candidates if name in own and _is_one(own[name], whole.get(one))]
            told[name] = Place(near[0]) if len(near) == 1 else place
        return told

    @cached_property
    def _held(self) -> list[dict[str, Tensor]]:
        return [_parameters(self.record, rank) for rank in self.record.ranks]

    @cached_property
    def _whole(self) -> dict[str, Tensor]:
        return _parameters(self.alone, self.alone.ranks[0])

    @property
    def are_whole(self) -> bool:
        """Whether the ranks begin with all parameters of one process, and with nothing else."""
        return (
            bool(self._whole)
            and all(held.keys() == found.keys() for held, found in zip(self._held, self.places, strict=True))
            and make_the_whole(self.places, self._whole)
        )

    def equal_parts(self) -> Iterator[Finding]:
        """Yields the first parameter of which two ranks begin with the same part, where one process's parts differ."""
        first = self._held[0]
        for name, value in first.items():
            whole = self._whole.get(name)
            parts = [held[name] for held in self._held if name in held]
            if whole is None or len(parts) < self.record.size or value.dim() != whole.dim() or not _vary(value):
                continue
            dims = [dim for dim in range(value.dim()) if value.shape[dim] * self.record.size == whole.shape[dim]]
            is_cut = len(dims) == 1 and value.numel() * self.record.size == whole.numel()
            if not is_cut or not all(torch.equal(value, other) for other in parts):
                continue
            chunks = whole.chunk(self.record.size, dims[0])
            if not any(torch.equal(chunks[0], other) for other in chunks[1:]):
                yield _same_part(self.record, name, value, whole)
                return

    def scaled_parts(self) -> Iterator[Finding]:
        """Yields the first parameter that begins as a multiple of one process's, or of the rank's part of it.

        Not where the gradients of the others are one process's: the script then compensates for the factor.
        """
        same, apart = self._compared(0) if self._steps else ([], [])
        if same and not apart:
            return
        for rank, held in zip(self.record.ranks, self._held, strict=True):
            for name, value in held.items():
                whole = self._whole.get(name)
                if whole is None or value.dim() != whole.dim() or value.numel() < _MANY or not _vary(value):
                    continue
                cut = [dim for dim in range(value.dim()) if value.shape[dim] * self.record.size == whole.shape[dim]]
                parts = [part for dim in cut[:1] for part in whole.chunk(self.record.size, dim)] if cut else [whole]
                factors = [_multiple_of(value, part) for part in parts if part.shape == value.shape]
                factor = next((one for one in factors if one is not None), None)
                if factor is not None and abs(factor - 1) > _FACTOR:
                    yield _scaled_part(self.record, rank, name, factor)
                    return

    def findings(self, *, inputs_are_known: bool, only_by_inputs: bool = False) -> Iterator[Finding]:
        """Yields a finding for the first step at which gradients are not one process's.

        Either some of them are, so that the samples are one process's, too; or `inputs_are_known` to be the same.
        """
        for number in range(self._steps):
            if (found := self._rate_apart(number)) is not None:
                yield found
                return
            same, apart = self._compared(number)
            apart = [pair for pair in apart if not pair.place.candidates]
            if not apart:
                continue
            steps = [rank.steps[number] for rank in self.record.ranks]
            is_known = self._begins_alike(number) if number else inputs_are_known
            is_known = is_known and self.are_whole and not self._normalise_apart
            is_known = is_known or (len(same) >= _FEWEST and not only_by_inputs)
            if is_known and rates.are_alike_by_place(self.record, self.alone, self.places, number):
                yield from self._explained(number, steps, same, apart)
            return

    @property
    def _normalise_apart(self) -> bool:
        """Whether a model normalises over micro-batches that are others than in one process."""
        every = [*self.record.ranks, self.alone.ranks[0]]
        return self.record.has_local_norms and len({rank.steps[0]["micro"] for rank in every}) > 1

    @property
    def have_the_same_inputs(self) -> bool:
        """Whether the models of the ranks get one process's numbers before the first step, and all draw alike.

        Each rank may have a part of the samples, or of each sample, or all of them; of a pipeline the first rank has
        them.
        """
        return self._have_the_same_inputs(0)

    def _begins_alike(self, number: int) -> bool:
        """Whether a step behind the first begins with one process's parameters, draws and inputs, if these are seen."""
        window = self.record.ranks[0].steps[number]["window"]
        whole = _parameters(self.alone, self.alone.ranks[0], window)
        held = [_parameters(self.record, rank, window) for rank in self.record.ranks]
        if not whole or not all(held):
            return False
        pairs = [
            (place.held(own[name]), place.of(whole[place.name]))
            for own, found in zip(held, self.places, strict=True)
            for name, place in found.items()
            if name in own and place.name in whole
        ]
        if any(float((one - other).norm()) > _NEAR**2 * float(other.norm()) for one, other in pairs):
            return False
        if self._sees_inputs(window):
            return self._have_the_same_inputs(window)
        return not own_data.draw_otherwise(self.record, self.alone, window, within=True)

    def _sees_inputs(self, window: int) -> bool:
        """Whether any process has recorded what its models get at a step."""
        every = [(self.alone, self.alone.ranks[0]), *((self.record, rank) for rank in self.record.ranks)]
        return any(_inputs(*each, window).numel() for each in every)

    def _have_the_same_inputs(self, window: int) -> bool:
        draw = self.record, self.alone, window
        if own_data.draw_otherwise(*draw, within=True) and not own_data.draw_together(*draw):
            return False
        theirs = _inputs(self.alone, self.alone.ranks[0], window)
        every = [_inputs(self.record, rank, window) for rank in self.record.ranks]
        held = [{place.name for place in found.values()} for found in self.places]
        alone = [place for place, own in enumerate(held) if not any(own & other for other in held if other is not own)]
        chosen = [torch.cat(every), *(every[place] for place in alone)]
        return bool(theirs.numel()) and any(one.numel() and _is_multiple(one, theirs) for one in chosen)

    def agree(self) -> bool:
        """Returns whether the ranks begin as one process does, and its gradients are theirs in the first steps."""
        compared = [self._compared(number) for number in range(self._steps)]
        return self.are_whole and bool(compared) and all(same and not apart for same, apart in compared)

    @property
    def summed(self) -> set[str]:
        """The parameters of one process of whose gradient the ranks hold parts of a sum, which is compared."""
        return {*self._sums(0)} if self._steps else set()

    def _sums(self, number: int) -> dict[str, Tensor]:
        """Sums over the ranks that are still to be taken when a step begins, by the names in one process."""
        due = [
            {found[name].name: one for name, one in _due(self.record, rank, number).items() if name in found}
            for rank, found in zip(self.record.ranks, self.places, strict=True)
        ]
        everywhere = [name for name in due[0] if all(name in other for other in due)]
        sums = {name: torch.stack([one[name] for one in due]).sum(0) for name in everywhere}
        return {name: total for name, total in sums.items() if total.shape == self._whole[name].shape}

    @cached_property
    def _steps(self) -> int:
        every = [*self.record.ranks, self.alone.ranks[0]]
        for number in range(min([FIRST, *(len(rank.steps) for rank in every)])):
            steps = [rank.steps[number] for rank in every]
            kept = all(step["kept"] is not None and not step.get("by_hand") for step in steps)
            if not kept or len({step["optimizer"] for step in steps}) > 1:
                return number
        return min([FIRST, *(len(rank.steps) for rank in every)])

    def _compared(self, number: int) -> tuple[list[_Pair], list[_Pair]]:
        """The gradients of a step that are one process's, and those that are far from being so."""
        whole = _gradients(self.alone, self.alone.ranks[0], number) | _due(self.alone, self.alone.ranks[0], number)
        mine, theirs, about = {}, {}, {}
        for name, total in self._sums(number).items():
            mine[name], theirs[name] = total, whole[name]
            about[name] = (self.record.ranks[0], name, Place(name))
        for rank, found in zip(self.record.ranks, self.places, strict=True):
            for name, one in _gradients(self.record, rank, number).items():
                place = found.get(name)
                if place is None or not place.is_known or whole.get(place.name) is None:
                    continue
                key = f"{rank.number} {name}"
                mine[key], theirs[key] = place.held(one), place.of(whole[place.name])
                about[key] = (rank, name, place)
        for keys in self._averaged_within(number, about):
            average = torch.stack([mine[key] for key in keys]).mean(0)
            mine |= dict.fromkeys(keys, average)
        errors = numerics.distance(mine, theirs).errors
        size = math.hypot(*(float(one.norm()) for one in theirs.values()))
        pairs = {key: _Pair(*about[key], mine[key], theirs[key]) for key in mine}
        same = [
            pair for key, pair in pairs.items() if errors[key] <= _NEAR and float(theirs[key].norm()) > _NEAR * size
        ]
        return same, [pair for key, pair in pairs.items() if errors[key] > _LARGE]

    def _averaged_within(self, number: int, about: Mapping[str, tuple[Rank, str, Place]]) -> Iterator[list[str]]:
        """What ranks hold alike whose gradients a step averages: it makes equal values of unequal gradients."""
        alike: dict[str, list[str]] = {}
        for key, (_, _, place) in about.items():
            alike.setdefault(place.name, []).append(key)
        for keys in alike.values():
            steps = [
                (rank.steps[number], name) for rank, name, place in map(about.__getitem__, keys) if place.dim is None
            ]
            after = {(step["after"] or {}).get(name) for step, name in steps}
            gradients = {step["gradients"].get(name) for step, name in steps}
            if len(steps) == self.record.size and len(after) == 1 < len(gradients) and None not in after:
                yield keys

    def _rate_apart(self, number: int) -> Finding | None:
        """The finding for the first parameter whose rate is not one process's, where those of some others are."""
        every = [*rates.by_place(self.record, self.alone, self.places, number)]
        apart = [one for one in every if not math.isclose(*one[2:])]
        same = len(every) - len(apart)
        if not apart or same < _FEWEST:
            return None
        rank, name, mine, other = apart[0]
        return Finding(
            code="learning-rate-differs",
            rank=rank.number,
            step=number,
            tensor=name,
            factor=round(mine / other, 6) if other else None,
            where=next((one["where"] for one in rank.of("optimizer")), None) or rank.steps[number]["where"],
            cause=f"rank {rank.number} steps {name} with the rate {mine:.4g}, one process with {other:.4g}, and "
            f"{plural(same, 'other parameter')} with one process's: it depends on the part of the model that the rank "
            "has, such as the number of a layer in it",
            fix="compute rates from the place of a parameter in the whole model",
        )

    def _explained(
        self, number: int, steps: Sequence[Event], same: Sequence[_Pair], apart: Sequence[_Pair]
    ) -> Iterator[Finding]:
        size = self.record.size
        names = list(dict.fromkeys(pair.name for pair in apart))
        about: dict[str, Any] = {
            "rank": apart[0].rank.number,
            "step": number,
            "tensor": apart[0].name,
            "where": apart[0].rank.backward_of(steps[0]),
            "fix": "bring the gradient of what every rank has whole together as often as its parts are computed: once",
        }
        rest = f", and {plural(len(same), 'other')} are one process's" if same else ""
        if apart[0].place.dim is None and self._are_partial(apart):
            cause = (
                f"at step {number} each rank steps with its own part of the gradient of {listed(names)}: one process's "
                "is the sum of the ranks'"
            )
            yield Finding(code="gradients-not-synchronised", cause=cause, **about)
            return
        factors = [_factor(pair) for pair in apart]
        factor, is_one = factors[0], all(abs(one / factors[0] - 1) < _FACTOR for one in factors)
        if is_one and not same:
            if self._are_scaled(number + 1, factor):
                return  # meant, maybe, and the optimizer does not see it
            cause = (
                f"at step {number} all gradients are {factor:.4g} times those of one process, and the next ones differ "
                "otherwise"
            )
            fix = "compute the factor of all gradients, such as that of clipping, as one process does"
            yield Finding(code="gradient-scale", factor=round(factor, 6), cause=cause, **about | {"fix": fix})
            return
        if is_one and any(abs(factor / other - 1) < _FACTOR for other in (size, 1 / size)):
            cause = f"at step {number} the gradient of {listed(names)} is {factor:.4g} times that of one process{rest}"
            yield Finding(code="gradient-scale", factor=round(factor, 6), cause=cause, **about)
            return
        error = numerics.distance({"": apart[0].mine}, {"": apart[0].one}).whole
        begin = SAME_INPUTS if not same and self._sees_inputs(steps[0]["window"]) else "from the same parameters"
        cause = (
            f"{begin} the gradient of {listed(names)} at step {number} differs from one process's, by {error:.1e} of "
            f"its norm{rest}"
        )
        fix = (
            "compute on the ranks together what one process computes: no value may depend on the part of the samples, "
            "the sequence or the model that a rank has"
        )
        yield Finding(code="gradient-differs", cause=cause, **about | {"fix": fix})

    def _are_scaled(self, number: int, factor: float) -> bool:
        """Whether all gradients of a step that differ are this multiple of one process's; also where none differs."""
        apart = self._compared(number)[1] if number < self._steps else []
        return all(abs(_factor(pair) / factor - 1) < _FACTOR for pair in apart)

    def _are_partial(self, apart: Sequence[_Pair]) -> bool:
        """Whether each rank steps with its own gradient of a parameter, and one process's is the sum of the ranks'."""
        name = apart[0].place.name
        mine = [pair.mine for pair in apart if pair.place.name == name and pair.place.dim is None]
        return len(mine) == self.record.size and _is_near(torch.stack(mine).sum(0), apart[0].one)


@dataclass(frozen=True)
class _Pair:
    """A rank's gradient of what it holds, and one process's, in float64 and with its shape."""

    rank: Rank
    name: str
    place: Place
    mine: Tensor
    one: Tensor


def _is_one(mine: Tensor, one: Tensor | None) -> bool:
    return one is not None and mine.shape == one.shape and float((mine - one).norm()) <= _NEAR * float(one.norm()) > 0


def _multiple_of(value: Tensor, part: Tensor) -> float | None:
    """What a part is multiplied by to give a value, number by number; None where it is not."""
    value, part = value.detach().double(), part.detach().double()
    factor = float((value * part).sum() / part.square().sum().clamp_min(1e-300))
    return factor if float((value - factor * part).norm()) <= _NEAR * float(value.norm()) else None


def _is_multiple(these: Tensor, one: Tensor) -> bool:
    """Whether these are the numbers of `one`, each as many times as any other, in any order.

    One number may be there more or less often: with it, texts of several lengths are filled up to that of the longest.
    """
    times = these.numel() // one.numel()
    if times * one.numel() == these.numel():
        return torch.equal(these.sort().values, one.repeat(times).sort().values)
    return numerics.are_padded(these, one)


def _inputs(record: Record, rank: Rank, window: int) -> Tensor:
    found = [record.value(rank.number, one["kept"]) for one in rank.in_window(window, "given")]
    return torch.cat(found) if found else torch.zeros(0)


def _parameters(record: Record, rank: Rank, window: int = 0) -> dict[str, Tensor]:
    """Those of all optimizers, with which a step begins: the first, or another."""
    begun = [event for event in rank.of("window") if event["number"] == window]
    if not begun or begun[-1]["kept"] is None:
        return {}
    held = record.value(rank.number, begun[-1]["kept"])["parameters"]
    return {
        of_optimizer(optimizer, name): values
        for optimizer, parameters in held.items()
        for name, one in parameters.items()
        if (values := _values(one)) is not None
    }


def _gradients(record: Record, rank: Rank, number: int) -> dict[str, Tensor]:
    step = rank.steps[number]
    return {
        of_optimizer(step["optimizer"], name): values.to_dense().double()
        for name, one in record.value(rank.number, step["kept"]).items()
        if (values := _values(one)) is not None
    }


def _due(record: Record, rank: Rank, number: int) -> dict[str, Tensor]:
    """A rank's part of the gradients that are still to be added up over the ranks."""
    step = rank.steps[number]
    kept = record.value(rank.number, step["kept"])
    return {
        of_optimizer(step["optimizer"], name): one.values.double() for name, one in kept.items() if isinstance(one, Due)
    }


def _values(one: Any) -> Tensor | None:
    """What a rank holds, also of a DTensor; None of a sum that is due."""
    values = one.values if isinstance(one, Part) else one
    return values if isinstance(values, Tensor) and values.numel() else None


def _vary(value: Tensor) -> bool:
    return value.numel() > 1 and bool((value != value.flatten()[0]).any())


def _factor(pair: _Pair) -> float:
    """What a gradient is a multiple of one process's by; NaN where it is none."""
    fitted = numerics.fit(pair.mine.flatten(), [pair.one.flatten()])
    return fitted.factors[0] if fitted.left <= _LARGE else math.nan


def _is_near(one: Tensor, other: Tensor) -> bool:
    return float((one - other).norm()) <= _LARGE * float(other.norm())


def _scaled_part(record: Record, rank: Rank, name: str, factor: float) -> Finding:
    return Finding(
        code="initial-state-differs",
        rank=rank.number,
        step=0,
        tensor=name,
        where=built_at(rank.of("names"), name) or made(rank.events),
        cause=f"rank {rank.number} begins with {factor:.4g} times the values of one process in its part of {name}"
        f"{_root(factor, record.size)}",
        fix="scale what is drawn by the size of the whole parameter, not by that of a rank's part",
    )


def _root(factor: float, size: int) -> str:
    """What a factor is, if it comes of the number of ranks."""
    known = {size: "the number of ranks", 1 / size: "1 / the number of ranks"}
    root = "the square root of the number of ranks"
    known |= {math.sqrt(size): root, 1 / math.sqrt(size): f"1 / {root}"}
    return next((f": {name}" for one, name in known.items() if abs(factor / one - 1) < _FACTOR), "")


def _same_part(record: Record, name: str, value: Tensor, whole: Tensor) -> Finding:
    return Finding(
        code="initial-state-differs",
        rank=record.ranks[1].number,
        step=0,
        tensor=name,
        where=built_at(record.ranks[1].of("names"), name) or made(record.ranks[1].events),
        cause=f"all ranks begin with the same numbers in {name}, {list(value.shape)} each, and one process with "
        f"{list(whole.shape)} that do not repeat: the ranks' parts are copies of one part",
        fix="draw the whole parameter on every rank and take the rank's part of it, or seed each part by its number in "
        "the whole",
    )
