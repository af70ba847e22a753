"""Whether the ranks draw different noise: equal numbers on all of them make N ranks less than N times one."""

from __future__ import annotations

from collections.abc import Iterator

from samestep.verification.findings import PROVED, Finding, unchecked
from samestep.verification.journal import Event
from samestep.verification.judging.record import Record
from samestep.verification.judging.samples import are_loaded
from samestep.verification.judging.single import Run
from samestep.verification.report import Report

__all__: list[str] = []

_NOISE = {f"torch.{name}" for name in ("rand", "randn", "normal", "bernoulli", "rand_like", "randn_like")}
_NOISE |= {f"numpy.random.{name}" for name in ("rand", "randn", "normal", "random", "standard_normal", "uniform")}
_NOTHING = "the script draws nothing itself while it trains"
_BETWEEN = "what the script draws by itself it draws before a step's samples are there, and may be the samples"
_FEWEST = 16  # numbers in a draw that cannot be equal by chance, and are no setting


def judge(record: Record, whole: Run, report: Report) -> None:
    """Adds what the draws tell; `whole` is the script alone, with what all ranks used."""
    report.add(_masks_of_copies(record))
    record = record.data
    drawn = [{event["place"]: event for event in rank.of("draw") if event["within"]} for rank in record.ranks]
    report.add(_alike(record, drawn, whole))
    report.add(_alike_without_loader(record, whole))
    report.add(_no_longer_apart(record))
    report.add(_masks(record))
    report.add(_workers(record))
    report.add(_noise(record, drawn))
    seen = any(drawn) or any(rank.of("stream") for rank in record.ranks)
    before = not are_loaded(record) and any(rank.of("draw") for rank in record.ranks)
    report.cover("random", PROVED if seen else unchecked(_BETWEEN if before else _NOTHING))


def _alike(record: Record, drawn: list[dict[str, dict[str, object]]], whole: Run) -> Iterator[Finding]:
    """Equal numbers where one process draws more of them, for the samples of all ranks; not where it draws as many."""
    alone = {event["place"]: event["shape"] for rank in whole.record.ranks for event in rank.of("own_draw")}
    for rank, theirs in enumerate(drawn[1:], 1):
        for place, event in theirs.items():
            first = drawn[0].get(place)
            if first is None or first["digest"] is None or event["name"] not in _NOISE or not _is_much(event["shape"]):
                continue
            if first["digest"] == event["digest"] and alone.get(place) != event["shape"]:
                yield _drawn_alike(record.ranks[rank].number, event, is_error=place in alone)
                return


def _alike_without_loader(record: Record, whole: Run) -> Iterator[Finding]:
    """Equal noise at several steps, of which one process draws N times as much: the ranks share one batch."""
    if are_loaded(record):
        return
    alone = {event["place"]: event["shape"] for rank in whole.record.ranks for event in rank.of("own_draw")}
    first = {event["place"]: event["digest"] for event in record.ranks[0].of("draw")}
    for rank in record.ranks[1:]:
        begun: dict[str, Event] = {}
        for event in rank.of("draw"):
            place, shape = event["place"], event["shape"]
            if event["name"] not in _NOISE or event["digest"] is None or first.get(place) != event["digest"]:
                continue
            if _is_much(shape) and alone.get(place) == [record.size * shape[0], *shape[1:]]:
                window, _, line = place.partition("|")
                if begun.setdefault(line, event)["place"].partition("|")[0] != window:
                    yield _drawn_alike(rank.number, begun[line], is_error=True)
                    return


def _drawn_alike(rank: int, event: Event, *, is_error: bool) -> Finding:
    window, where = event["place"].rpartition("|")[0].split("|", 1)  # a path may have one too
    return Finding(
        code="random-streams",
        severity="error" if is_error else "note",
        rank=rank,
        step=int(window),
        where=where,
        cause=f"rank {rank} draws the very numbers that rank 0 draws ({event['name']} of {event['shape']}): "
        "all ranks were seeded alike",
        fix="torch.manual_seed(seed + rank)    # after the model is made, which all ranks seed alike",
    )


def _no_longer_apart(record: Record) -> Iterator[Finding]:
    """Noise that is another on each rank at first, and the same from some step on: a state that one rank had saved."""
    told = [_by_line(rank.of("draw")) for rank in record.ranks]
    for rank, theirs in enumerate(told[1:], 1):
        for line, windows in theirs.items():
            first = told[0].get(line, {})
            common = sorted(windows.keys() & first.keys())
            alike = [window for window in common if windows[window] == first[window]]
            apart = [window for window in common if windows[window] != first[window]]
            if len(alike) > 1 and apart and max(apart) < min(alike):
                yield Finding(
                    code="random-streams",
                    rank=record.ranks[rank].number,
                    step=alike[0],
                    where=line.rpartition("|")[0],
                    cause=f"from step {alike[0]} on rank {record.ranks[rank].number} draws the very numbers that rank "
                    "0 draws; before, it drew others",
                    fix="save and restore each rank's own random state",
                )
                return


def _by_line(draws: list[Event]) -> dict[str, dict[int, str]]:
    """Line and number of noise that is drawn there -> window -> digest."""
    found: dict[str, dict[int, str]] = {}
    for one in draws:
        if one["name"] in _NOISE and one["digest"] is not None and _is_much(one["shape"]):
            window, _, line = one["place"].partition("|")
            found.setdefault(line, {})[int(window)] = one["digest"]
    return found


def _workers(record: Record) -> Iterator[Finding]:
    """Whether workers of one rank draw alike from a generator that they use."""
    for rank in record.ranks:
        first: dict[tuple[str, str, str], int] = {}
        for event in rank.of("worker"):
            for name in event["used"]:
                place = (event["key"], name, event["states"][name])
                if first.setdefault(place, event["worker"]) != event["worker"]:
                    yield Finding(
                        code="random-streams",
                        rank=rank.number,
                        where=event["key"].rpartition("#")[0],
                        cause=f"workers {first[place]} and {event['worker']} of rank {rank.number} begin with the same "
                        f"state of {name}'s generator, and draw the same numbers for different samples",
                        fix="leave worker_init_fn out (torch seeds each worker), or seed with torch.initial_seed()",
                    )
                    return


def _noise(record: Record, drawn: list[dict[str, dict[str, object]]]) -> Iterator[Finding]:
    """Generators of datasets that begin a batch alike on two ranks, whose samples are different ones.

    A mistake where the script lets ranks draw apart elsewhere, in dropout say; where it does so nowhere, a note.
    """
    noise = [{_batch(one): one for one in rank.of("noise")} for rank in record.ranks]
    if not all(noise):
        return
    told = [{place: one["state"] for place, one in theirs.items()} for theirs in noise]
    batches = [{_batch(one): one["indices"] for one in rank.of("batch") if one["training"]} for rank in record.ranks]
    for rank, theirs in enumerate(told[1:], 1):
        for place, state in theirs.items():
            mine, other = batches[0].get(place), batches[rank].get(place)
            if told[0].get(place) != state or mine is None or other is None or set(mine) & set(other):
                continue
            yield Finding(
                code="random-streams",
                severity="error" if _draw_apart(record, rank, drawn) else "note",
                rank=record.ranks[rank].number,
                where=noise[rank][place]["where"] or place[0].rpartition("#")[0],
                cause=f"the dataset of rank {record.ranks[rank].number} draws from a generator of its own the very "
                "numbers that rank 0's draws, for other samples: both were seeded alike",
                fix="seed the dataset's generator with the rank, or draw from (seed, epoch, index) of each sample",
            )
            return


def _batch(event: Event) -> tuple[str, int, int]:
    return event["key"], event["number"], event["index"]


def _draw_apart(record: Record, rank: int, drawn: list[dict[str, dict[str, object]]]) -> bool:
    """Whether a rank and the first one are known to draw different numbers anywhere."""
    streams = [
        {one["window"]: one["state"] for one in each.of("stream")} for each in (record.ranks[0], record.ranks[rank])
    ]
    apart = any(streams[1].get(window, state) != state for window, state in streams[0].items())
    return apart or any(
        drawn[rank][place]["digest"] != one["digest"] for place, one in drawn[0].items() if place in drawn[rank]
    )


def _masks(record: Record) -> Iterator[Finding]:
    """Dropout's states: alike on all ranks from the beginning is a habit, alike after they differed a mistake."""
    states = [{event["window"]: event for event in rank.of("stream")} for rank in record.ranks]
    for rank, theirs in enumerate(states[1:], 1):
        common = [window for window in theirs if window in states[0]]
        alike = [window for window in common if states[0][window]["state"] == theirs[window]["state"]]
        if not alike:
            continue
        always = len(alike) == len(common)
        where = theirs[alike[0]]["where"]
        yield Finding(
            code="random-streams",
            severity="note" if always else "error",
            rank=record.ranks[rank].number,
            step=alike[0],
            where=where,
            cause=f"rank {record.ranks[rank].number} drops the units that rank 0 drops"
            + (": all ranks were seeded alike" if always else f" from step {alike[0]} on; before, it dropped others"),
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
    masks = [(rank.number, event) for rank in record.ranks for event in rank.of("mask")]
    first: dict[tuple[int, int, str], tuple[int, str]] = {}
    fixed = set()
    for rank, event in masks:
        place = event["window"], event["number"], event["of"]
        if rank in of_samples and first.setdefault(place, (rank, event["state"]))[0] != rank:
            fixed.add(place)
    for rank, event in masks:
        place = event["window"], event["number"], event["of"]
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


def _is_much(shape: object) -> bool:
    count = 1
    for length in shape if isinstance(shape, list) else [0]:
        count *= int(length)
    return count >= _FEWEST
