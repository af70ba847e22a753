"""Whether the ranks draw different noise: equal numbers on all of them make N ranks less than N times one."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from samestep.verification.findings import NOTHING_DRAWN, PROVED, Finding, unchecked
from samestep.verification.journal import Event
from samestep.verification.judging.passes import are_loaded
from samestep.verification.judging.record import Rank, Record, Run, beside_first, line_of, pass_of, place_of_draw
from samestep.verification.report import Report

_NOISE = {f"torch.{name}" for name in ("rand", "randn", "normal", "bernoulli", "rand_like", "randn_like")}
_NOISE |= {f"numpy.random.{name}" for name in ("rand", "randn", "normal", "random", "standard_normal", "uniform")}
_NOISE |= {"torch.Tensor.normal_", "torch.Tensor.uniform_"}
_BETWEEN = "what the script draws by itself it draws before a step's samples are there, and may be the samples"
_FEWEST = 16  # numbers in a draw that cannot be equal by chance, and are no setting

Draws = Mapping[str, Event]  # by place


def judge(record: Record, whole: Run, report: Report) -> None:
    """Adds what the draws tell; `whole` is the script alone, with what all ranks used."""
    report.add(_masks_of_copies(record))
    record = record.data
    drawn = [_draws(rank, "draw") for rank in record.ranks]
    within = [{place: draw for place, draw in draws.items() if draw["within"]} for draws in drawn]
    alone = _draws(whole.rank, "own_draw")
    report.add(_alike(record, within, {place: draw["shape"] for place, draw in alone.items()}))
    ended = list(_no_longer_apart(record, drawn))
    report.add(ended if ended or are_loaded(record) else _alike_without_loader(record, drawn, alone))
    report.add(_masks(record))
    report.add(_workers(record))
    report.add(_noise(record, within))
    is_seen = any(within) or any(rank.of("stream") for rank in record.ranks)
    is_before = not are_loaded(record) and any(drawn)
    report.cover("random", PROVED if is_seen else unchecked(_BETWEEN) if is_before else NOTHING_DRAWN)


def draw_for_all_rows(record: Record, whole: Run) -> bool:
    """Whether all ranks, and one process, draw the same numbers for each sample of a batch that is loaded."""
    ranks = [_draws(rank, "draw") for rank in record.data.ranks]
    alone = _draws(whole.rank, "own_draw") if whole.record.ranks else {}
    rows: dict[int, int] = {}
    for event in (one for rank in record.data.ranks for one in rank.of("batch") if one["training"]):
        rows[event["window"]] = rows.get(event["window"], 0) + event["size"]
    return any(
        draw["shape"]
        and draw["shape"][0] == rows.get(place_of_draw(draw)[0])
        and all(place in theirs and theirs[place]["digest"] == draw["digest"] for theirs in ranks)
        for place, draw in alone.items()
    )


def _draws(rank: Rank, kind: str) -> Draws:
    return {draw["place"]: draw for draw in rank.of(kind)}


def _is_noise(draw: Event) -> bool:
    return _tells_streams(draw) and draw["name"] in _NOISE and prod(draw["shape"]) >= _FEWEST


def _tells_streams(draw: Event) -> bool:
    """Whether equal numbers show equal states: not if all numbers of a draw are one."""
    return draw["digest"] is not None and not draw.get("is_one_number")


def _alike(record: Record, within: Sequence[Draws], alone: Mapping[str, list[int]]) -> Iterator[Finding]:
    """Equal numbers where one process draws more of them, for the samples of all ranks; not where it draws as many."""
    for rank, place, first, draw in beside_first(within):
        if _is_noise(draw) and first["digest"] == draw["digest"] and alone.get(place) != draw["shape"]:
            yield _drawn_alike(record.ranks[rank].number, draw, is_error=place in alone)
            return


def _alike_without_loader(record: Record, drawn: Sequence[Draws], alone: Draws) -> Iterator[Finding]:
    """Equal noise at several steps, of which one process draws N times as much: the ranks share one batch.

    Integers are noise where the ranks draw what one process draws first; else they may be places in a rank's samples.
    """
    numbers: dict[tuple[int, str], int] = {}
    for draw in alone.values():
        if draw["shape"] is not None:
            drawn_at = place_of_draw(draw)
            numbers[drawn_at] = numbers.get(drawn_at, 0) + prod(draw["shape"])
    integers = {place for place, draw in alone.items() if draw.get("begins")}
    begun: dict[tuple[int, str], int] = {}
    for rank, line, first, windows in beside_first([_by_line(draws, integers) for draws in drawn]):
        for window, noise in windows.items():
            where = line.rpartition("|")[0]
            if noise != first.get(window) or numbers.get((window, where)) != record.size * noise.numbers:
                continue
            if begun.setdefault((rank, where), window) != window:
                first_place = begun[rank, where], where
                earlier = next(draw for draw in drawn[rank].values() if place_of_draw(draw) == first_place)
                yield _drawn_alike(record.ranks[rank].number, earlier, is_error=True)
                return


def _drawn_alike(rank: int, draw: Event, *, is_error: bool) -> Finding:
    window, where = place_of_draw(draw)
    return Finding(
        code="random-streams",
        severity="error" if is_error else "note",
        rank=rank,
        step=window,
        where=where,
        cause=f"rank {rank} draws the very numbers that rank 0 draws ({draw['name']} of {draw['shape']}): "
        "all ranks were seeded alike",
        fix="torch.manual_seed(seed + rank)    # after the model is made, which all ranks seed alike",
    )


def _no_longer_apart(record: Record, drawn: Sequence[Draws]) -> Iterator[Finding]:
    """Noise that is another on each rank at first, and the same from some step on: a state that one rank had saved."""
    for rank, line, first, windows in beside_first([_by_line(draws) for draws in drawn]):
        common = sorted(windows.keys() & first.keys())
        alike = [window for window in common if windows[window] == first[window]]
        apart = [window for window in common if windows[window] != first[window]]
        if len(alike) > 1 and apart and max(apart) < min(alike):
            number = record.ranks[rank].number
            yield Finding(
                code="random-streams",
                rank=number,
                step=alike[0],
                where=line.split("|")[0],
                cause=f"from step {alike[0]} on rank {number} draws the very numbers that rank 0 draws; before, it "
                "drew others",
                fix="save and restore each rank's own random state",
            )
            return


@dataclass(frozen=True)
class _Noise:
    """What a rank draws at a line during a step."""

    digests: tuple[str, ...]
    numbers: int


def _by_line(draws: Draws, integers: Container[str] = ()) -> dict[str, dict[int, _Noise]]:
    """Line where noise is drawn, for training or an evaluation -> window -> all that is drawn there."""
    found: dict[str, dict[int, list[Event]]] = {}
    for draw in draws.values():
        if (draw["name"] in _NOISE or draw["place"] in integers) and _tells_streams(draw):
            window, where = place_of_draw(draw)
            found.setdefault(f"{where}|{draw['trains']}", {}).setdefault(window, []).append(draw)
    whole = {
        line: {
            window: _Noise(tuple(draw["digest"] for draw in drawn), sum(prod(draw["shape"]) for draw in drawn))
            for window, drawn in windows.items()
        }
        for line, windows in found.items()
    }
    return {line: {at: one for at, one in noise.items() if one.numbers >= _FEWEST} for line, noise in whole.items()}


def _workers(record: Record) -> Iterator[Finding]:
    """Whether workers of one rank draw alike from a generator that they use, for samples that have an index.

    Those of a stream may have to: each takes its share of one order that all draw.
    """
    for rank in record.ranks:
        first: dict[tuple[str, str, str], int] = {}
        streams = {one["key"] for one in rank.of("batch") if one.get("indices", ()) is None}
        for event in [one for one in rank.of("worker") if one["key"] not in streams]:
            for name in event["used"]:
                worker = first.setdefault((event["key"], name, event["states"][name]), event["worker"])
                if worker != event["worker"]:
                    yield Finding(
                        code="random-streams",
                        rank=rank.number,
                        where=line_of(event["key"]),
                        cause=f"workers {worker} and {event['worker']} of rank {rank.number} begin with the same state "
                        f"of {name}'s generator, and draw the same numbers for different samples",
                        fix="leave worker_init_fn out (torch seeds each worker), or seed with torch.initial_seed()",
                    )
                    return


def _noise(record: Record, within: Sequence[Draws]) -> Iterator[Finding]:
    """Generators of datasets that begin a batch alike on two ranks, whose samples are different ones.

    A mistake where the script lets ranks draw apart elsewhere, in dropout say; where it does so nowhere, a note.
    """
    noise = [{_batch(one): one for one in rank.of("noise")} for rank in record.ranks]
    if not all(noise):
        return
    batches = [{_batch(one): one["indices"] for one in rank.of("batch") if one["training"]} for rank in record.ranks]
    for rank, place, first, other in beside_first(noise):
        mine, theirs = batches[0].get(place), batches[rank].get(place)
        begin_alike = first["state"] == other["state"] and first["after"] == other["after"]  # or it was seeded anew
        if not begin_alike or mine is None or theirs is None or set(mine) & set(theirs):
            continue
        number = record.ranks[rank].number
        yield Finding(
            code="random-streams",
            severity="error" if _draw_apart(record, rank, within) else "note",
            rank=number,
            where=other["where"] or line_of(other["key"]),
            cause=f"the dataset of rank {number} draws from a generator of its own the very numbers that rank 0's "
            "draws, for other samples: both were seeded alike",
            fix="seed the dataset's generator with the rank, or draw from (seed, epoch, index) of each sample",
        )
        return


def _batch(event: Event) -> tuple[tuple[str, int], int]:
    return pass_of(event), event["index"]


def _draw_apart(record: Record, rank: int, within: Sequence[Draws]) -> bool:
    """Whether a rank and the first one are known to draw different numbers anywhere."""
    streams = [{one["window"]: one["state"] for one in record.ranks[each].of("stream")} for each in (0, rank)]
    return any(mine != theirs for _, _, mine, theirs in beside_first(streams)) or any(
        mine["digest"] != theirs["digest"] for _, _, mine, theirs in beside_first([within[0], within[rank]])
    )


def _masks(record: Record) -> Iterator[Finding]:
    """Dropout's states: a note where ranks begin alike, an error where they differed before and are alike then."""
    states = [{event["window"]: event for event in rank.of("stream")} for rank in record.ranks]
    for rank, theirs in enumerate(states[1:], 1):
        common = [window for window in theirs if window in states[0]]
        alike = [window for window in common if states[0][window]["state"] == theirs[window]["state"]]
        apart = [window for window in common if window not in alike]
        always, number = bool(alike) and min(alike) == min(common), record.ranks[rank].number
        if not alike or (not always and max(apart) > min(alike)):
            continue
        why = ": all ranks were seeded alike" if always else f" from step {alike[0]} on; before, it dropped others"
        yield Finding(
            code="random-streams",
            severity="note" if always else "error",
            rank=number,
            step=alike[0],
            where=theirs[alike[0]]["where"],
            cause=f"rank {number} drops the units that rank 0 drops{why}",
            fix="torch.manual_seed(seed + rank) once the model is made"
            if always
            else "save and restore each rank's own random state",
        )
        return


def _masks_of_copies(record: Record) -> Iterator[Finding]:
    """Other masks for the same values, on ranks that hold parts of one layer and have the same samples.

    What is the same for other samples too, such as embedded positions, may be masked otherwise.
    """
    of_samples = {rank.number for rank in record.data.ranks}
    if len(of_samples) == record.size:
        return
    masks = [
        (rank.number, (event["window"], event["number"], event["of"]), event)
        for rank in record.ranks
        for event in rank.of("mask")
    ]
    first: dict[tuple[int, int, str], tuple[int, str]] = {}
    fixed = set()
    for rank, place, event in masks:
        if rank in of_samples and first.setdefault(place, (rank, event["state"]))[0] != rank:
            fixed.add(place)
    for rank, place, event in masks:
        other, state = first.setdefault(place, (rank, event["state"]))
        if state != event["state"] and place not in fixed:
            yield Finding(
                code="random-streams",
                rank=rank,
                step=event["window"],
                where=event["where"],
                cause=f"rank {rank} drops other units than rank {other} of the same values: both hold parts of one "
                "layer and have the same samples, and what they hold alike comes apart",
                fix="seed all ranks of a tensor-parallel group alike: torch.manual_seed(seed), without a rank",
            )
            return
