"""What one process loads by itself, and what it trains on at its own pace, held against the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from journals import Event, ended, passed, step
from journals import record as recorded
from torch import Tensor

from samestep.verification.findings import AGREES, Finding
from samestep.verification.journal import value_path
from samestep.verification.judging import own_data
from samestep.verification.judging.own_data import are_seeded_apart, draw_together
from samestep.verification.judging.own_pace import (
    arrives,
    begins_apart,
    ends_with_as_many,
    follows,
    go_together,
    judge_tail,
    sudden,
)
from samestep.verification.judging.record import Rank, Record, Run
from samestep.verification.report import Report
from samestep.verification.runner import Runner
from samestep.verification.runs import Ended
from samestep.verification.verify import _judge_own_pace

ROWS = torch.arange(32, dtype=torch.float64).reshape(16, 2) ** 2
PARTS = ([0, 2, 4, 6, 8, 10, 12, 14], [1, 3, 5, 7, 9, 11, 13, 15])


def kept(folder: Path, rank: int, number: int, value: Any) -> int:
    path = value_path(folder, rank, number)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)
    return number


def loads(folder: Path, rows: Sequence[Tensor], *more: Event, workers: int = 0) -> Record:
    """Processes of which each loads these rows, in one batch."""
    ranks = []
    for rank, own in enumerate(rows):
        events = passed(list(range(len(own))), samples=len(own), workers=workers)
        events[1] |= {"rows": [str(row.tolist()) for row in own], "kept": kept(folder, rank, 0, [own])}
        ranks.append(Rank(rank, [*more, *events]))
    return Record(folder, ranks)


def found(record: Record, alone: Record) -> list[str]:
    report = Report(ranks=record.size)
    own_data.judge(record, alone, report)
    return [one.code for one in report.errors]


@pytest.mark.parametrize(
    ("change", "is_found"),
    [
        (lambda rows, rank: rows, False),
        (lambda rows, rank: rows * (1 + 1e-9), False),  # a sum over the ranks has another rounding
        (lambda rows, rank: rows + torch.tensor([10.0 * rank, 0.0]), True),
        (lambda rows, rank: rows - rows.mean(0), True),
        (lambda rows, rank: torch.cat([rows[:6], rows[6:] + 0.5 * rank]), False),  # no more than there are ranks
    ],
    ids=["the same", "rounded", "one column", "centred", "few"],
)
def test_rows_that_ranks_load_are_those_that_one_process_loads(tmp_path: Path, change: Any, *, is_found: bool) -> None:
    """A feature is computed from the rows of a rank's own part."""
    ranks = loads(tmp_path / "ranks", [change(ROWS[part], rank) for rank, part in enumerate(PARTS)])
    assert found(ranks, loads(tmp_path / "alone", [ROWS])) == ["datasets-differ"] * is_found


@pytest.mark.parametrize(("third", "is_found"), [(1 / 3, False), (0.4, True)])
def test_a_column_of_one_number_is_rounded_too(tmp_path: Path, third: float, *, is_found: bool) -> None:
    """It has no deviation to hold a difference against."""

    def rows(part: Sequence[int], last: float) -> Tensor:
        return torch.cat([ROWS[list(part)], torch.full((len(part), 1), last, dtype=torch.float64)], 1)

    ranks = loads(tmp_path / "ranks", [rows(part, third * (1 + 1e-7)) for part in PARTS])
    assert found(ranks, loads(tmp_path / "alone", [rows(range(16), 1 / 3)])) == ["datasets-differ"] * is_found


@pytest.mark.parametrize(
    "more",
    [
        {"kind": "draws_samples", "key": "train.py:10#1", "number": 0},
        {"kind": "noise", "key": "train.py:10#1", "number": 0},
        {"kind": "seeded", "seed": "of a rank"},
        {"kind": "draw", "place": "0|train.py:5|1", "digest": "of a rank", "within": False},
        {"kind": "order", "where": "train.py:10", "name": "torch.multinomial", "digest": "of a rank"},
        {"kind": "fingerprint", "key": "train.py:10#1", "samples": {}, "mixed": True},
    ],
    ids=["while loading", "of the dataset", "by a seed", "before loading", "with replacement", "by collating"],
)
def test_rows_that_random_numbers_or_other_samples_may_make_tell_nothing(tmp_path: Path, more: Event) -> None:
    ranks = loads(tmp_path / "ranks", [ROWS[part] + 1 for part in PARTS], more)
    assert found(ranks, loads(tmp_path / "alone", [ROWS])) == []


@pytest.mark.parametrize(
    ("used", "codes"),
    [(None, []), (["numpy"], []), ([], ["datasets-differ"])],
    ids=["not seen", "draw", "draw nothing"],
)
def test_rows_of_workers_tell_something_if_these_draw_nothing(
    tmp_path: Path, used: list[str] | None, codes: list[str]
) -> None:
    workers: list[Event] = (
        [] if used is None else [{"kind": "worker", "key": "train.py:10#1", "used": used, "states": {}}]
    )
    workers = [{**one, "worker": 0, "states": dict.fromkeys(one["used"], "s")} for one in workers]
    ranks = loads(tmp_path / "ranks", [ROWS[part] + 1 for part in PARTS], *workers, workers=2)
    assert found(ranks, loads(tmp_path / "alone", [ROWS], workers=2)) == codes


def test_rows_that_a_sampler_draws_with_replacement_tell_nothing(tmp_path: Path) -> None:
    ranks = loads(tmp_path / "ranks", [ROWS[part] + 1 for part in PARTS])
    for rank in ranks.ranks:
        for event in rank.of("pass"):
            event["replacement"] = True
    assert found(ranks, loads(tmp_path / "alone", [ROWS])) == []


def test_rows_of_other_lengths_tell_nothing(tmp_path: Path) -> None:
    """Texts are padded to the longest of a batch."""
    ranks = loads(tmp_path / "ranks", [torch.nn.functional.pad(ROWS[part], (0, 1)) for part in PARTS])
    assert found(ranks, loads(tmp_path / "alone", [ROWS])) == []


def test_a_dataset_of_each_rank_s_own_size_tells_nothing(tmp_path: Path) -> None:
    """Each rank makes as many samples as one process does."""
    ranks = loads(tmp_path / "ranks", [ROWS + 1, ROWS + 2])
    assert found(ranks, loads(tmp_path / "alone", [ROWS])) == []


def begins(folder: Path, rows: Sequence[Tensor], buffer: float, parameter: float = 1.0, *more: Event) -> Record:
    """Processes that begin with this buffer, and this parameter."""
    record = loads(folder, rows, *more)
    for rank in record.ranks:
        held = {"w": torch.tensor([parameter])}
        value = {"parameters": {0: held}, "buffers": {"centre": torch.tensor([buffer])}, "untrained": {}}
        about = {"kind": "window", "number": 0, "others": {}, "kept": kept(folder, rank.number, 1, value)}
        rank.events.insert(0, about)
    return record


@pytest.mark.parametrize(
    ("buffer", "parameter", "parts", "is_found"),
    [
        (2.0, 1.0, PARTS, True),
        (1.0, 1.0, PARTS, False),
        (2.0, 3.0, PARTS, False),  # another seed
        (2.0, 1.0, (range(16), range(16)), False),  # more samples in the first batch
    ],
    ids=["apart", "the same", "other parameters", "other batches"],
)
def test_a_buffer_begins_with_the_value_of_one_process(
    tmp_path: Path, buffer: float, parameter: float, parts: Sequence[Sequence[int]], *, is_found: bool
) -> None:
    """It is the mean of all samples, say."""
    ranks = begins(tmp_path / "ranks", [ROWS[list(part)] for part in parts], buffer, parameter)
    assert found(ranks, begins(tmp_path / "alone", [ROWS], 1.0)) == ["initial-state-differs"] * is_found


@pytest.mark.parametrize(("others", "is_found"), [(1, True), (3, False)], ids=["a prior of one layer", "another seed"])
def test_a_parameter_that_is_computed_from_data_begins_with_the_value_of_one_process(
    tmp_path: Path, others: int, *, is_found: bool
) -> None:
    ranks = begins(tmp_path / "ranks", [ROWS[part] for part in PARTS], 1.0)
    alone = begins(tmp_path / "alone", [ROWS], 1.0)
    for one, factor in ((ranks, 2.0), (alone, 1.0)):
        for rank in one.ranks:
            held = {f"w{i}": torch.tensor([factor if i < others else 1.0]) for i in range(4)}
            kept(one.folder, rank.number, 1, {"parameters": {0: held}, "buffers": {}, "untrained": {}})
    assert found(ranks, alone) == ["initial-state-differs"] * is_found


def test_a_buffer_that_each_rank_draws_tells_nothing(tmp_path: Path) -> None:
    draw: Event = {"kind": "draw", "place": "0|train.py:5|1", "digest": "of a rank", "within": False}
    ranks = begins(tmp_path / "ranks", [ROWS[part] for part in PARTS], 2.0, 1.0, draw)
    assert found(ranks, begins(tmp_path / "alone", [ROWS], 1.0)) == []


def trains(folder: Path, norms: Sequence[float], *, ranks: int = 1, rate: float = 0.1, first: float = 1.0) -> Record:
    """Processes with these norms of gradients, of which the first two steps' gradients were kept, and their end."""
    numbers = range(ranks)
    for rank in numbers:
        for place in (0, 1):
            kept(folder, rank, place, {"w": torch.tensor([first, norms[place]])})

    def steps() -> list[Event]:
        return [
            step(number, "g", norms={"w": norm}, rates=[rate], kept=number if number < 2 else None)
            for number, norm in enumerate(norms)
        ]

    return Record(folder, [Rank(rank, [*steps(), ended()]) for rank in numbers])


NORMS = [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("alone", "how", "is_followed"),
    [
        (NORMS, {}, True),
        ([1.0, 2.0, 3.0, 4.02], {}, True),  # rounding has grown
        ([1.0, 2.0, 3.0, 4.2], {}, False),
        ([*NORMS, 5.0], {}, False),  # it takes a step more
        (NORMS[:3], {}, False),
        (NORMS, {"rate": 0.2}, False),
        (NORMS, {"first": 2.0}, False),  # of one norm, and another direction
    ],
    ids=["the same", "rounded", "another norm", "more steps", "fewer steps", "another rate", "another gradient"],
)
def test_one_process_at_its_own_pace_takes_the_ranks_steps(
    tmp_path: Path, alone: list[float], how: dict[str, float], *, is_followed: bool
) -> None:
    ranks = trains(tmp_path / "ranks", NORMS, ranks=2)
    assert follows(ranks, trains(tmp_path / "alone", alone, **how)) is is_followed


@pytest.mark.parametrize(
    ("times", "rate", "last", "does"),
    [(0.5, 0.2, 3.0, True), (0.5, 0.1, 3.0, False), (1.0, 0.1, 3.0, True), (0.5, 0.2, 3.1, False)],
    ids=["the rate makes up", "it does not", "the same", "other parameters"],
)
def test_one_process_may_arrive_at_the_ranks_parameters(
    tmp_path: Path, times: float, rate: float, last: float, *, does: bool
) -> None:
    """A rank's sum is divided by the number of ranks, and the rate is larger by as much."""

    def takes(folder: Path, times: float, rate: float, end: float, ranks: int) -> Record:
        values = (0.0, 1.0, 2.0, end)
        for number, value in enumerate(values):
            kept(folder, 0, number, {"parameters": {0: {"w": torch.tensor([value, 1.0])}}, "buffers": {}})
        windows = [{"kind": "window", "number": number, "kept": number} for number in range(len(values))]
        about = {"rates": [rate], "kept": 0}
        steps = [step(number, "g", norms={"w": times * norm}, **about) for number, norm in enumerate(NORMS)]
        unkept = [{**one, "kept": None} for one in windows]
        return Record(folder, [Rank(rank, [*(unkept if rank else windows), *steps, ended()]) for rank in range(ranks)])

    ranks = takes(tmp_path / "ranks", times, rate, last, 2)
    alone = takes(tmp_path / "alone", 1.0, 0.1, 3.0, 1)
    assert arrives(ranks, alone) is does
    assert arrives(ranks, alone, by_parameters=True) is (last == 3.0)  # ranks have gradients of their own


def test_steps_behind_those_that_were_asked_for_are_not_compared(tmp_path: Path) -> None:
    """A pass was ended early to reach what follows it, and the ranks go on with other samples."""
    norms = [*NORMS, *NORMS]
    ranks = trains(tmp_path / "ranks", [*norms, 9.0], ranks=2)
    for rank in ranks.ranks:
        rank.events[-1]["enough"] = True
    alone = trains(tmp_path / "alone", [*norms, 1.0])
    assert not follows(ranks, alone)
    for rank in ranks.ranks:
        rank.events.append({"kind": "enough", "event": len(norms)})
    asked = Record(ranks.folder, ranks.ranks)
    assert asked.is_cut_short
    assert follows(asked, alone)


@pytest.mark.parametrize(("digests", "is_together"), [(("a", "b"), True), (("a", "a"), False), (("a", ""), False)])
def test_ranks_draw_together_what_one_process_draws(digests: tuple[str, str], *, is_together: bool) -> None:
    """Each sample has a generator of its own, so the numbers come on the rank that has the sample."""

    def draws(*drawn: str) -> list[Event]:
        places = [(f"0|train.py:5|{number}", digest) for number, digest in enumerate(drawn, 1) if digest]
        return [{"kind": "draw", "place": place, "digest": digest, "within": False} for place, digest in places]

    assert draw_together(recorded(*map(draws, digests)), recorded(draws("a", "b")), 0) is is_together


def test_a_rank_that_takes_other_steps_is_not_followed(tmp_path: Path) -> None:
    ranks = trains(tmp_path / "ranks", NORMS, ranks=2)
    ranks.ranks[1].events[1]["norms"] = {"w": 2.5}
    alone = trains(tmp_path / "alone", NORMS)
    assert not follows(ranks, alone)
    assert go_together(ranks, alone, 1)


def test_what_one_process_at_its_own_pace_has_too_is_no_error(tmp_path: Path) -> None:
    """Ranks that skip a step together leave out samples, which one process leaves out as well."""
    ranks, alone = trains(tmp_path / "ranks", NORMS, ranks=2), trains(tmp_path / "alone", NORMS)
    report = Report(ranks=2, steps=4)
    codes = ("gradient-scale", "samples-missing", "parameters-diverged", "same-order-every-epoch")
    report.add(Finding(code=code, cause="…") for code in codes)
    run = Run(Ended(code=0, hung=False, failure=None, folder=tmp_path), alone)
    _judge_own_pace(cast("Runner", None), ranks, run, report)
    assert [one.code for one in report.errors] == ["parameters-diverged", "same-order-every-epoch"]
    assert report.coverage["gradients"] == report.coverage["updates"] == AGREES
    assert report.coverage["data"] != AGREES


@pytest.mark.parametrize("drops_out", [False, True])
def test_equal_draws_of_the_ranks_may_be_meant_but_no_equal_masks_of_dropout(
    tmp_path: Path, *, drops_out: bool
) -> None:
    """Dropout is off in all runs, so that one process with the ranks' gradients tells nothing of its masks."""
    ranks, alone = trains(tmp_path / "ranks", NORMS, ranks=2), trains(tmp_path / "alone", NORMS)
    for rank in ranks.ranks:
        rank.events.extend([{"kind": "stream", "window": 0, "state": "s", "where": "train.py:20"}] * drops_out)
    report = Report(ranks=2, steps=4)
    report.add([Finding(code="random-streams", cause="…")])
    run = Run(Ended(code=0, hung=False, failure=None, folder=tmp_path), alone)
    assert _judge_own_pace(cast("Runner", None), ranks, run, report)
    assert [one.code for one in report.errors] == ["random-streams"] * drops_out


@pytest.mark.parametrize(
    ("alone", "how", "at"),
    [
        (NORMS, {}, None),
        ([1.0, 2.0, 3.3, 4.4], {}, 2),
        ([1.0, 2.0, 3.01, 4.4], {}, None),  # rounding grows
        ([1.1, 2.0, 3.3, 4.4], {}, None),  # other samples from the start
        ([1.0, 2.0, 3.3, 4.4], {"rate": 0.2}, None),
        ([1.0, 2.0, 3.3, 4.4], {"samples": 3}, None),  # the last batch of a pass is larger
    ],
    ids=["the same", "sudden", "gradual", "other", "another rate", "another batch"],
)
def test_a_step_at_which_one_process_parts_from_the_ranks(
    tmp_path: Path, alone: list[float], how: dict[str, Any], at: int | None
) -> None:
    samples = how.pop("samples", 2)
    ranks, one = trains(tmp_path / "ranks", NORMS, ranks=2), trains(tmp_path / "alone", alone, **how)
    for record, sizes in ((ranks, [1, 1, 1, 1]), (one, [2, 2, samples, 2])):
        for rank in record.ranks:
            rank.events.extend(
                {"kind": "batch", "size": size, "window": window, "training": True} for window, size in enumerate(sizes)
            )
    step = sudden(ranks, one)
    assert (None if step is None else step["event"]) == at


@pytest.mark.parametrize(
    ("alone", "row", "codes"),
    [
        (NORMS, "r", []),
        ([1.0, 2.0, 1.5, 2.0], "r", ["gradient-scale"]),
        ([1.0, 2.0, 1.5, 2.0], "other", []),
        ([1.1, 2.0, 1.5, 2.0], "r", []),  # it has other gradients before, too
    ],
    ids=["the same", "divided by fewer", "other samples", "other gradients"],
)
def test_steps_that_one_rank_takes_under_join_are_those_of_one_process(
    tmp_path: Path, alone: list[float], row: str, codes: list[str]
) -> None:
    ranks, one = trains(tmp_path / "ranks", NORMS, ranks=2), trains(tmp_path / "alone", alone)
    for record, name in ((ranks, "r"), (one, row)):
        record.ranks[0].events.append({"kind": "input", "window": 2, "rows": [name], "numbers": 1})
    first, other = ranks.ranks
    first.events.append({"kind": "joined", "event": 4, "where": "train.py:20"})
    shorter = [event for event in other.events if event.get("event", 0) < 2]
    shorter.append({"kind": "joined", "event": 2, "where": "train.py:20"})
    report = Report(ranks=2)
    judge_tail(Record(ranks.folder, [first, Rank(1, shorter)]), one, report)
    assert [(found.code, found.where) for found in report.errors] == [(code, "train.py:20") for code in codes]


@pytest.mark.parametrize(("seeds", "are_apart"), [(("7", "7"), False), (("7", "8"), True), (("7", None), True)])
def test_generators_that_ranks_seed_otherwise_are_known(seeds: tuple[str | None, ...], *, are_apart: bool) -> None:
    ranks = [[] if seed is None else [{"kind": "seeded", "seed": seed}] for seed in seeds]
    assert are_seeded_apart(recorded(*ranks)) is are_apart


@pytest.mark.parametrize(
    ("sizes", "is_over"),
    [([2] * 4, True), ([2] * 5, True), ([2] * 3, False), ([2] * 6, False)],
    ids=["the same", "the rest of a budget", "fewer", "a step of all ranks more"],
)
def test_one_process_may_take_smaller_steps_to_the_end_of_the_same_samples(
    tmp_path: Path, sizes: list[int], *, is_over: bool
) -> None:
    ranks, one = trains(tmp_path / "ranks", NORMS[:2], ranks=2), trains(tmp_path / "alone", [1.0] * len(sizes))
    for record, each in ((ranks, [2, 2]), (one, sizes)):
        for rank in record.ranks:
            rank.events.extend(
                {"kind": "batch", "size": size, "window": window, "training": True} for window, size in enumerate(each)
            )
    assert ends_with_as_many(ranks, one) is is_over


def begun(record: Record, *more: Event) -> Record:
    """The same processes, which begin with one parameter."""
    start: Event = {"kind": "start", "parameters": {"w": "both"}}
    return Record(record.folder, [Rank(rank.number, [start, *more, *rank.events]) for rank in record.ranks])


@pytest.mark.parametrize(
    ("norms", "how", "more", "apart"),
    [
        ([1.5, 2.0], {}, [], True),
        ([1.001, 2.0], {}, [], False),
        ([1.5, 2.0], {"rate": 0.2}, [], False),
        ([1.5, 2.0], {}, [{"kind": "hook", "name": "top_k", "where": "train.py:9"}], False),
        ([1.5, 2.0], {}, [{"kind": "start", "parameters": {"w": "both"}, "local_norms": 1}], False),
        ([1.5, 2.0], {}, [{"kind": "wrap", "local_norms": 0, "wrapper": "DistributedDataParallel"}], True),
    ],
    ids=["other", "rounded", "another rate", "compressed", "local statistics", "wrapped"],
)
def test_a_first_step_that_is_not_one_process_s(
    tmp_path: Path, norms: list[float], how: dict[str, float], more: list[Event], *, apart: bool
) -> None:
    ranks = begun(trains(tmp_path / "ranks", [1.0, 2.0], ranks=2), *more)
    one = begun(trains(tmp_path / "alone", norms, **how), *(event for event in more if event["kind"] == "start"))
    assert begins_apart(ranks, one) is apart


def test_micro_batches_of_another_number_are_left_to_others(tmp_path: Path) -> None:
    """A model may normalise over them."""
    ranks, one = trains(tmp_path / "ranks", [1.0, 2.0], ranks=2), trains(tmp_path / "alone", [1.5, 2.0])
    one.ranks[0].events[0]["micro"] = 2
    assert not begins_apart(begun(ranks), begun(one))


def test_ranks_whose_first_gradients_differ_are_left_to_others(tmp_path: Path) -> None:
    ranks, one = trains(tmp_path / "ranks", [1.0, 2.0], ranks=2), trains(tmp_path / "alone", [1.5, 2.0])
    ranks.ranks[1].events[0]["gradients"] = {"w": "another"}
    assert not begins_apart(begun(ranks), begun(one))


def test_the_norm_of_a_gradient_that_is_cut_is_that_of_its_parts() -> None:
    """Of two ranks that hold one part, one counts; what every rank has whole counts once."""
    norms = [{"w": 3.0, "b": 2.0}, {"w": 4.0, "b": 2.0}, {"w": 4.0, "b": 2.0}]
    places = ("[0]+[2]", "[2]+[2]", "[2]+[2]")
    ranks = [
        Rank(
            number,
            [
                {"kind": "start", "parameters": {"w": f"{place} digest"}},
                {**step(0, "g", norms=own), "gradients": {"w": f"{place} g", "b": "g"}},
            ],
        )
        for number, (own, place) in enumerate(zip(norms, places, strict=True))
    ]
    record = Record(Path(), ranks)
    assert record.norms(ranks[0].steps[0]) == {"w": 5.0, "b": 2.0}
