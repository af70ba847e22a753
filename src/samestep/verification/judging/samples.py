"""Whether the ranks together use every sample once an epoch, in another order each epoch, of one and the same data.

A pass of a DataLoader belongs to training if an optimizer stepped while it lasted. Samples are distinguished by their
index where the dataset has one and all ranks hold the same dataset; else by what is in them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations, pairwise, takewhile, zip_longest
from operator import eq
from typing import Any

from samestep.text import plural
from samestep.verification.findings import AGREES, DECLARED, PROVED, Finding, unchecked
from samestep.verification.journal import Event
from samestep.verification.judging import parted, resumed
from samestep.verification.judging.passes import Pass, cut_after_loading, is_cut_as_alone, passes, together
from samestep.verification.judging.record import PassKey, Rank, Record, both, line_of, pass_of, place_of_draw
from samestep.verification.report import Report

UNDIVIDED = "the ranks draw from the whole dataset, each for itself ({})"
DIVIDE = "DataLoader(…, sampler=DistributedSampler(dataset)), or samestep.shards(dataset, world, batch_size=…)"

OwnPace = Callable[[], Record]
_BY_CHANCE = 0.02  # of the samples of a dataset may be alike without being one
_LEFT_OUT = 0.25  # of what one process reads, at least; less may be tails, one for each rank
_READ = 0.9  # of what one process reads, at least, or as far as it goes there is not seen
_FEWEST = 16  # samples that are in one order on two sides, not by chance
OF_WORKERS = "workers of a rank yields the same samples"
CHOSEN = "that every rank chooses"
_AS_CHOSEN = 0.8  # of the samples that one process chooses
_BY_LUCK = math.log(1000)  # so many orders of some samples there are, or they come in one by chance
_DRAWN = 20  # equal pairs to be expected of drawing with replacement: none at all is then not chance
_MET = 10  # indices in common, to be expected by chance; then there is one but for 1 case in 20,000


def judge(record: Record, report: Report, own_pace: OwnPace | None = None) -> None:
    """Adds what the samples tell; `own_pace` records one process at its own pace."""
    report.add(_shared(record))
    record = record.data
    training = [group for group in together(record) if all(one.is_training for one in group)]
    if cut_after_loading(record):  # each sample once, then, is each sample once on each of them
        training = [group[:1] for group in training]
    if not training:
        why = "no DataLoader tells which samples were trained on, and no gradients were compared"
        report.cover("data", unchecked(why))
        report.add(resumed.judge(record, own_pace))
        report.add(parted.judge(record, own_pace))
        return
    for group in training:
        found = [*_lengths(group), *_same_data(group, record), *_once(group, record, own_pace)]
        known = {(one.code, one.severity, one.where) for one in report.findings}  # in the first epoch and in the next
        report.add([one for one in found if (one.code, one.severity, one.where) not in known])
    report.add(_orders(training, record, own_pace))
    report.add(one for one in _dropped(record, training) if not _drops_alone(one, own_pace))
    report.add(resumed.judge(record, own_pace))
    whole = [group for group in training if _is_whole(group, record)]
    notes = [finding for finding in report.findings if finding.property == "data"]
    margin = f"{plural(len(whole), 'epoch')} of {plural(len(training[0]), 'rank')}" if whole else None
    report.cover("data", DECLARED if notes else PROVED if whole else AGREES, margin)


def judge_sampler(record: Record, alone: Record, report: Report) -> None:
    """Adds whether one process draws samples with replacement, by their weights say, of which ranks take each once."""
    drawn = {pass_of(event): event["sampler"] for rank in alone.ranks for event in rank.of("draws_again")}
    for group in together(record.data):
        first = group[0]
        indices = [index for one in group for index in one.indices or []]
        size = first.size or 0
        pairs = len(indices) * (len(indices) - 1) / 2
        are_unlike = len(set(indices)) == len(indices) and pairs >= _DRAWN * max(size, 1)
        if first.key in drawn and are_unlike:
            found = Finding(
                code="samples-missing",
                where=first.line,
                cause=f"one process draws its samples with replacement ({drawn[first.key]}), and the ranks take each "
                f"of {size} once ({first.sampler}): samples that the sampler repeats are not repeated",
                fix="give every rank its part, [rank::world_size], of the indices that one sampler draws with one seed",
            )
            report.add([found])
            return


def judge_chosen(record: Record, alone: Record, report: Report) -> None:
    """Adds whether the ranks train on other samples of a dataset than one process, where all choose the same.

    Not where something is drawn before: it may choose. One process may have other weights by rounding, and choose a few
    others by them.
    """
    ours = [{pass_of(one): _places(rank, one, record) for one in rank.of("chosen")} for rank in record.data.ranks]
    theirs = {pass_of(one): _places(rank, one, alone) for rank in alone.ranks for one in rank.of("chosen")}
    for group in together(record.data):
        name, first = pass_of(group[0].about), group[0]
        sets = [own.get(name, set()) for own in ours]
        other = theirs.get(name)
        if not first.is_training or not other or any(one != sets[0] for one in sets):
            continue
        window = first.batches[0]["window"] if first.batches else 0
        draws = [place_of_draw(one)[0] for one in record.ranks[0].of("draw")]
        between = [one["window"] for one in record.ranks[0].of("drawn_between")]  # passes, by rank 0 for all, say
        is_drawn = any(place in {window - 1, window} for place in [*draws, *between])
        if not is_drawn and len(sets[0] & other) < _AS_CHOSEN * len(sets[0]):
            count = len(sets[0] - other)
            found = Finding(
                code="datasets-differ",
                step=window,
                where=first.about.get("made") or first.line,
                cause=f"{count} of the {len(sets[0])} samples {CHOSEN} are others than one process chooses with the "
                "same weights: what chooses them, scores of all ranks say, is in another order",
                fix="bring scores into the order of the samples: gather their indices with them, and sort by these",
            )
            report.add([found])
            return


def _places(rank: Rank, event: Event, record: Record) -> set[int]:
    return set(record.value(rank.number, event["kept"]).tolist()) if event["kept"] is not None else set()


def _is_whole(group: Sequence[Pass], record: Record) -> bool:
    """Whether all samples of a pass are known: they were loaded, or their indices were read and mean the same."""
    whole = all(one.complete for one in group)
    return whole or (all(one.is_known for one in group) and mean_the_same(group, record))


def _shared(record: Record) -> Iterator[Finding]:
    """Whether ranks that share the parts of a model (tensor parallelism) get the same batches."""
    numbers = [rank.number for rank in record.data.ranks]
    for rank in record.ranks:
        wraps = [event["ranks"] for event in rank.of("wrap") if event.get("ranks")]
        place = wraps[-1].index(rank.number) if wraps and rank.number in wraps[-1] else 0
        if rank.number in numbers or place >= len(numbers):
            continue
        mine, theirs = _training_batches(rank), _training_batches(record.data.ranks[place])
        for _, other, event in both(theirs, mine):
            if event["rows"] != other["rows"]:
                yield Finding(
                    code="batches-differ",
                    rank=rank.number,
                    step=event["window"],
                    where=line_of(event["key"]),
                    cause=f"rank {rank.number} and rank {numbers[place]} hold parts of the same parameters, and at "
                    f"step {event['window']} they train on different batches",
                    fix="give the ranks of one tensor-parallel group the same batches: shard the data by the rank in "
                    "the data-parallel mesh, and seed what shuffles alike",
                )
                return


def _training_batches(rank: Rank) -> dict[tuple[PassKey, int], Event]:
    return {(pass_of(batch), batch["index"]): batch for batch in rank.of("batch") if batch["training"]}


def _lengths(group: Sequence[Pass]) -> Iterator[Finding]:
    other = next((one for one in group if one.size != group[0].size), None)
    if other is not None and _is_split(group):
        yield _datasets(group, other, f"has {other.size} samples, that of rank 0 {group[0].size}")


def _datasets(group: Sequence[Pass], other: Pass, what: str) -> Finding:
    return Finding(
        code="datasets-differ",
        rank=other.rank,
        where=other.about.get("made") or group[0].line,
        cause=f"the dataset of rank {other.rank} {what}",
        fix="build the dataset alike on all ranks: sort what a directory lists, seed every split alike",
    )


def _is_split(group: Sequence[Pass]) -> bool:
    """Whether the indices themselves are cut between the ranks, which needs one dataset on all."""
    parts = [set(one.indices or ()) for one in group]
    are_disjoint = all(parts) and len(set().union(*parts)) == sum(map(len, parts))
    return (are_disjoint and not _have_hardly_met(group)) or group[0].sampler == "DistributedSampler"


def _have_hardly_met(group: Sequence[Pass]) -> bool:
    """Whether ranks that each shuffle a dataset of their own would not have come by the same index yet, either."""
    drawn = [one.indices or [] for one in group]
    pairs = sum(len(first) * len(other) for first, other in combinations(drawn, 2))
    shuffled = all(indices != sorted(indices) for indices in drawn) and not all(one.is_known for one in group)
    return shuffled and pairs < _MET * max(one.size or 0 for one in group)


def _same_data(group: Sequence[Pass], record: Record) -> Iterator[Finding]:
    """Whether one index means one sample on all ranks; what each rank showed of its dataset is compared."""
    prints = [_fingerprint(record.ranks[i], one.about["key"]) for i, one in enumerate(group)]
    for other, samples in zip(group, prints, strict=True):
        unequal = None if samples is None or prints[0] is None else _unlike(prints[0], samples)
        if unequal is not None and _is_split(group):
            yield _datasets(group, other, f"has another sample {unequal} than that of rank 0")
            return


def _fingerprint(rank: Rank, key: str) -> list[tuple[str, str]] | None:
    return next((list(event["samples"].items()) for event in rank.of("fingerprint") if event["key"] == key), None)


def _unlike(first: list[tuple[str, str]], other: list[tuple[str, str]]) -> str | None:
    """The first sample that is another one, of those that both ranks have shown."""
    return next((mine[0] for mine, theirs in zip(first, other, strict=False) if mine != theirs), None)


def _once(group: Sequence[Pass], record: Record, own_pace: OwnPace | None) -> Iterator[Finding]:
    """Whether each sample is used once: over all ranks, as far as the pass went on all of them."""
    by_index = mean_the_same(group, record)
    identities: list[list[Any]] = [one.indices or [] if by_index else one.rows for one in group]
    padded = by_index and any(len(one.parts or ()) > 1 for one in group) and fills_up(group)
    drawn = by_index and not padded and all(len(set(one.indices or ())) < len(one.indices or ()) for one in group)
    if (not by_index and not all(identities)) or drawn or any(one.about["replacement"] for one in group):
        yield from _drawn_in_parts(group, record) if by_index else ()
        yield from _alike(group)
        return
    counts = Counter(identity for theirs in identities for identity in theirs)
    repeated = [identity for identity, count in counts.items() if count > 1]
    extra = sum(counts.values()) - len(counts)
    size, where = group[0].size, group[0].divided_at
    if extra and (padded or (group[0].sampler == "DistributedSampler" and extra < len(group))):
        yield Finding(
            code="samples-repeated",
            severity="note",
            where=where,
            cause=f"{plural(extra, 'sample')} of {size} used twice in an epoch, so that every rank gets as many: "
            f"{group[0].about.get('cut_by') or group[0].sampler} pads",
            fix="leave the incomplete part out (drop_last=True), or samestep.shards, which cuts exactly",
        )
    elif extra > (0 if by_index else _BY_CHANCE * sum(counts.values())):
        share = extra / sum(counts.values())
        if by_index and _come_in_turn(group):
            return  # one epoch after the other, by one sampler
        if own_pace is not None and _repeat_as_alone(group, record, own_pace(), share):
            return
        yield _repeated(group, identities, extra, len(repeated), _drawn_apart(record) or where)
    elif (
        not by_index
        and own_pace is not None
        and not _follows_a_cut(record.ranks[0], group[0])
        and (alone := _read_alone(group, own_pace())) is not None
    ):
        tail = _largest_tail(group) if all(one.complete for one in [*group, alone]) else None  # else where they end
        if count := passed_over(identities, alone.rows, tail):
            yield left_out(count, where)
    elif by_index and size is not None and all(one.is_known for one in group):
        missing = size - len({*counts, *_begun_before(group, record)})
        if missing > (_largest_tail(group) if group[0].about["drop_last"] else 0) and _is_split(group):
            is_plain = own_pace is None or _fills_no_round(group, missing)
            as_alone = own_pace is not None and not is_plain and _misses_alone(group, own_pace(), missing)
            yield _missing(group, missing, size, where, as_alone=as_alone)


def _repeat_as_alone(group: Sequence[Pass], record: Record, alone: Record, share: float) -> bool:
    """Whether what one process loads tells that samples, or indices, may come on several ranks."""
    if not alone.ranks:
        return False
    is_copied = any(map(_yields_twice, group))  # else a stream, or a sampler that repeats rare samples, may do so
    return (
        (not is_copied and _repeats_alone(group, alone, share))
        or _has_a_part(group, record, alone)
        or _takes_all(group, alone)
        or is_cut_as_alone(record, alone)
    )


def _takes_all(group: Sequence[Pass], alone: Record) -> bool:
    """Whether every batch is the whole dataset, also in one process: a set that each rank needs beside its own part."""
    own = _training_alone(group, alone)
    return bool(own) and all(batch["size"] == one.size for one in [*group, *own] for batch in one.batches)


def _come_in_turn(group: Sequence[Pass]) -> bool:
    """Whether no sample comes again before all others have come, batch by batch of all ranks, in a pass of many epochs.

    An endless sampler, [rank::world] of one order after the other, comes to the second at another place on each rank.
    """
    if not all(one.batches and len(group) * one.batches[0]["size"] < (one.size or 0) for one in group):
        return False
    uses: Counter[int] = Counter()
    samples = Counter({0: group[0].size or 0})  # number of uses -> samples that have as many
    for batches in zip_longest(*(one.parts or [] for one in group), fillvalue=()):
        for index in chain(*batches):
            samples[uses[index]] -= 1
            uses[index] += 1
            samples[uses[index]] += 1
        found = +samples
        if max(found) > min(found) + 1:
            return False
    return True


def _has_a_part(group: Sequence[Pass], record: Record, alone: Record) -> bool:
    """Whether each rank's dataset is a part, of other samples under the same indices: together as many as alone.

    Asked where no two looks at a dataset show the same samples.
    """
    is_shown = any(_fingerprint(record.ranks[number], one.about["key"]) for number, one in enumerate(group))
    whole = next((one.size for one in _training_alone(group, alone)), None)
    return not is_shown and whole is not None and sum(one.size or 0 for one in group) == whole


def _drawn_in_parts(group: Sequence[Pass], record: Record) -> Iterator[Finding]:
    """Whether ranks that draw with replacement never meet: each draws from a part of the data, as one process does not.

    How often two draws of a rank are of one sample tells how often those of two ranks were, if all drew from all data.
    """
    drawn = [one.indices or [] for one in group]
    pairs = sum(count * (count - 1) / 2 for own in drawn for count in Counter(own).values())
    of_all = sum(len(own) * (len(own) - 1) / 2 for own in drawn)
    expected = sum(len(one) * len(other) for one, other in combinations(drawn, 2)) * pairs / max(of_all, 1) / len(group)
    if expected >= _DRAWN and not any(set(one) & set(other) for one, other in combinations(drawn, 2)):
        drawn_at = next((event["where"] for event in record.ranks[0].of("order")), None)
        yield Finding(
            code="batches-differ",
            where=drawn_at or group[0].divided_at,
            cause="each rank draws its samples, with replacement, from a part of the data of its own "
            f"({group[0].sampler}), where one process draws from all {group[0].size}: how often a sample is drawn "
            "depends on the part that it is in",
            fix="give every rank its part, [rank::world_size], of the indices that one sampler draws with one seed",
        )


def _yields_twice(one: Pass) -> bool:
    """Whether most batches of a pass come twice: two workers yield the same stream."""
    batches = Counter(tuple(batch["rows"]) for batch in one.batches)
    return 2 * sum(count - 1 for count in batches.values()) >= len(one.batches) > 1


def _repeats_alone(group: Sequence[Pass], alone: Record, share: float) -> bool:
    """Whether one process, too, meets samples again in a pass over this loader: at least half as often."""
    for one in _training_alone(group, alone):
        used: list[Any] = one.indices or one.rows
        if used:
            return 1 - len(set(used)) / len(used) >= share / 2
    return False


def _training_alone(group: Sequence[Pass], alone: Record) -> list[Pass]:
    """The training passes of one process over the loaders of this line."""
    made = [one for rank in alone.ranks[:1] for one in passes(rank)]
    return [one for one in made if one.is_training and one.line == group[0].line]


def _misses_alone(group: Sequence[Pass], alone: Record, missing: int) -> bool:
    """Whether one process, too, leaves samples out of a pass over this loader: at least half as many."""
    known = [one for one in _training_alone(group, alone) if one.is_known and one.indices and one.size]
    return any(2 * ((one.size or 0) - len(set(one.indices or ()))) >= missing for one in known)


def _follows_a_cut(rank: Rank, one: Pass) -> bool:
    """Whether a pass was ended early before it began: the one of that number may be another one elsewhere."""
    before = takewhile(lambda event: event is not one.about, rank.events)
    return any(event["kind"] == "passed" and event.get("cut") is not None for event in before)


def _read_alone(group: Sequence[Pass], alone: Record) -> Pass | None:
    """The same pass of one process; a line that makes a loader for each pass gives each another key."""
    made = [one for rank in alone.ranks[:1] for one in passes(rank) if one.key == group[0].key]
    return made[0] if made and made[0].rows else None


def passed_over(parts: Sequence[Sequence[str]], stream: Sequence[str], tail: int | None = None) -> int:
    """Returns how many of the samples of one process the ranks leave out, where those are many, else 0.

    Each rank reads what one process reads, in the same order, and leaves some out: those of the others, or more. Two
    orders that are drawn apart have no more than a few samples in common that stand in one order.

    Args:
        parts: the samples of each rank, in order.
        stream: those of one process.
        tail: how many the ranks may leave out at their end, if all are there. Then their order does not matter.
    """
    if tail is not None:
        end, used = len(stream), {row for part in parts for row in part}
        if len(used.difference(stream)) > _BY_CHANCE * len(used):
            return 0
    else:
        read = [(part, *_in_order(part, stream)) for part in parts]
        if any(count < _FEWEST or (count < len(part) and end < _READ * len(stream)) for part, count, end in read):
            return 0
        end = min(end for _, _, end in read)
        used = {row for part, count, _ in read for row in part[:count]}
    passed = set(stream[:end])
    missing = len(passed - used)
    return missing if missing > (_LEFT_OUT * len(passed) if tail is None else tail) else 0


def _in_order(part: Sequence[str], stream: Sequence[str]) -> tuple[int, int]:
    """How many of the first samples of a rank one process has in the same order, and where the last of them ends."""
    end = 0
    for count, row in enumerate(part):
        try:
            end = stream.index(row, end) + 1
        except ValueError:
            return count, end
    return len(part), end


def left_out(count: int, where: str) -> Finding:
    """Returns the finding for samples between those of the ranks that one process uses."""
    return Finding(
        code="samples-missing",
        where=where,
        cause=f"{plural(count, 'sample')} that one process trains on are passed over on all ranks, between those that "
        "they train on in the same order: the samples are divided by the ranks more than once",
        fix="divide the samples once: itertools.islice(samples, rank, None, world_size)",
    )


def _begun_before(group: Sequence[Pass], record: Record) -> set[Any]:
    """What passes that were left before their end have used, over a loader made at the same line: one may go on there.

    A training that resumes makes its loader anew, and skips what was used.
    """
    others = [
        one
        for rank in record.ranks
        for one in passes(rank)
        if one.line == group[0].line and one.about["key"] != group[0].about["key"]
    ]
    return {index for one in others if not one.complete for index in one.indices or ()}


def mean_the_same(group: Sequence[Pass], record: Record) -> bool:
    """Returns whether one index means one sample on every rank; a rank may have a dataset of its own."""
    prints = [_fingerprint(record.ranks[i], one.about["key"]) for i, one in enumerate(group)]
    first = prints[0]
    equal = ((other is None) is (first is None) and _unlike(first or [], other or []) is None for other in prints)
    return all(one.indices is not None for one in group) and all(equal)


def fills_up(group: Sequence[Pass]) -> bool:
    """Returns whether every sample is used, and only the ranks' last batches repeat any: they are filled up."""
    used = {index for one in group for index in one.indices or ()}
    before = [index for one in group for part in (one.parts or [])[:-1] for index in part]
    whole = all(one.is_known for one in group) and len(used) == group[0].size
    return whole and len(before) == len(set(before))


def _repeated(group: Sequence[Pass], identities: list[list[Any]], extra: int, count: int, where: str) -> Finding:
    first = group[0]
    cause, fix = _why_repeated(group, identities)
    if first.indices is not None and where != first.divided_at:
        cause = f"each rank draws an order of its own at {where}, and parts of different orders overlap"
        fix = "draw the order from a generator that all ranks seed alike, with the epoch: seed + epoch"
    return Finding(
        code="samples-repeated",
        where=where,
        cause=f"in epoch {first.number} {plural(count, 'sample')} are used more than once ({extra} uses too many): "
        f"{cause}",
        fix=fix,
    )


def _why_repeated(group: Sequence[Pass], identities: list[list[Any]]) -> tuple[str, str]:
    """Returns the cause and the fix."""
    first = group[0]
    is_within = any(len(theirs) > len(set(theirs)) for theirs in identities)
    if first.indices is None and is_within and first.about["workers"] > 1:
        return (
            f"each of {first.about['workers']} {OF_WORKERS}",
            "split the stream by worker too: info = get_worker_info(); yield every (rank·workers + info.id)-th sample",
        )
    if first.indices is None:
        are_equal = all({*theirs} == {*identities[0]} for theirs in identities)
        return (
            "each rank yields the same samples: the stream is not split by rank"
            if are_equal
            else "the ranks' parts of the stream overlap: they are not parts of one order",
            "itertools.islice(samples, rank, None, world_size), of samples in the same order on all ranks",
        )
    if (same := _same_rank(group)) is not None:
        return (
            f"the {first.sampler} of every rank has rank={same[0]} of {same[1]}",
            f"{first.sampler}(dataset), which asks the process group, or rank=dist.get_rank()",
        )
    return UNDIVIDED.format(first.sampler), DIVIDE


def _drawn_apart(record: Record) -> str | None:
    """The user's line at which samplers draw their order, if it is another on each rank."""
    for events in zip(*(rank.of("order") for rank in record.ranks), strict=False):
        if len({event["where"] for event in events}) == 1 and len({event["digest"] for event in events}) > 1:
            return str(events[0]["where"])
    return None


def _same_rank(group: Sequence[Pass]) -> tuple[int, int] | None:
    """Rank and number of ranks that the samplers take themselves for, where all take themselves for one."""
    places = {(one.about.get("rank"), one.about.get("replicas")) for one in group}
    rank, replicas = places.pop()
    return None if places or rank is None or replicas is None else (rank, replicas)


def _fills_no_round(group: Sequence[Pass], missing: int) -> bool:
    """Whether so few samples are left out that they fill no batch of all ranks, which all get as many.

    Fewer samples than there are ranks, as drop_last=True of a sampler leaves out; of whole batches, less than one for
    each rank; or of a sampler of batches, fewer of these than there are ranks.
    """
    ranks, size = len(group), group[0].about["batch_size"]
    sizes = [[batch["size"] for batch in one.batches] for one in group]
    if size:
        return missing < ranks or (missing < size * ranks and all(one == size for own in sizes for one in own))
    largest = max((one for own in sizes for one in own), default=0)
    return missing < ranks or (len(set(map(len, sizes))) == 1 and missing <= (ranks - 1) * largest)


def _largest_tail(group: Sequence[Pass]) -> int:
    """How many samples ranks leave out at most that leave out what fills no round of the ranks, or no batch."""
    about, sizes = group[0].about, [batch["size"] for one in group for batch in one.batches]
    drops_batches = about["drop_last"] or about["batch_size"] is None
    return len(group) * (1 + (max(sizes, default=0) if drops_batches else 0))


def _missing(group: Sequence[Pass], missing: int, size: int, where: str, *, as_alone: bool) -> Finding:
    cause = f"in epoch {group[0].number} {plural(missing, 'sample')} of {size} are used on no rank"
    why = None
    if as_alone:
        why = "one process leaves samples out of a pass as well"
    elif _fills_no_round(group, missing):
        why = f"{group[0].sampler} leaves out what fills no batch of all ranks"
    if why is not None:
        return Finding(code="samples-missing", severity="note", where=where, cause=f"{cause}: {why}")
    return Finding(code="samples-missing", where=where, cause=cause, fix=DIVIDE)


def _alike(group: Sequence[Pass]) -> Iterator[Finding]:
    """Drawn with replacement, samples may come twice; but not in the same sequence on two ranks."""
    other = next((one for one in group[1:] if one.order and one.order == group[0].order), None)
    if other is not None:
        yield Finding(
            code="samples-repeated",
            rank=other.rank,
            where=group[0].line,
            cause=f"rank {other.rank} draws the very samples that rank 0 draws, in the same order ({group[0].sampler})",
            fix="give each rank's sampler a generator of its own: torch.Generator().manual_seed(seed + rank)",
        )


def _draws_orders(rank: Rank, key: str) -> bool:
    """Whether a line draws an order while a loader loads: once a pass, and not for each batch or sample."""
    drawn = Counter(event["where"] for event in rank.of("order") if event.get("key", key) == key)
    return bool(drawn) and min(drawn.values()) <= len(rank.of("pass"))


def _orders(training: list[list[Pass]], record: Record, own_pace: OwnPace | None) -> Iterator[Finding]:
    """Whether the order changes from epoch to epoch, where it is one that was drawn.

    Where nothing was drawn, an order that one process repeats too is a note, unless torch is asked for another one.

    An order that no sampler is asked to shuffle, such as one by length, may be the same in all of them; and a few
    samples may come in one order by chance.
    """
    by_key: dict[str, list[Pass]] = {}
    for group in training:
        by_key.setdefault(group[0].about["key"], []).append(group[0])
    for key, ranks_passes in by_key.items():
        draws = any(_draws_orders(rank, key) for rank in record.ranks)
        same = [(one, common) for one, other in pairwise(ranks_passes) if (common := _begin_alike(one, other, draws))]
        orders = [math.lgamma(common + 1) for _, common in same]  # the logarithms of how many there are
        if max(orders, default=0) > _BY_LUCK or (len(same) == len(ranks_passes) - 1 and sum(orders) > _BY_LUCK):
            one, common = same[0]
            is_meant = not (draws or _must_change(one)) and own_pace is not None and _repeats_its_order(one, own_pace())
            yield _same_order(one, common, is_meant=is_meant)
            return


def _begin_alike(earlier: Pass, later: Pass, draws: bool) -> int:
    """Returns how many samples two shuffled passes begin with in the same order; 0 if they do not."""
    common = min(len(earlier.order), len(later.order))
    are_of_one_length = len(earlier.order) == len(later.order) or not (earlier.is_known and later.is_known)
    is_same = are_of_one_length and earlier.order[:common] == later.order[:common]
    return common if is_same and _was_drawn(earlier, later, draws) else 0


def _was_drawn(earlier: Pass, later: Pass, draws: bool) -> bool:
    """Whether somebody shuffled: an order that simply ascends was meant, and so is a stream's, unless it has epochs."""
    if earlier.about.get("dataset_epoch") != later.about.get("dataset_epoch"):
        if earlier.indices is None:
            return True
        if earlier.about["workers"]:  # they may live on with a copy of the dataset that does not know its epoch
            return all(map(eq, earlier.rows, later.rows))
    is_asked_for = draws or earlier.about.get("shuffles", True)
    return is_asked_for and earlier.indices is not None and earlier.indices != sorted(earlier.indices)


def _must_change(one: Pass) -> bool:
    """Whether torch is asked for another order in each epoch, or workers may keep a dataset of an earlier epoch."""
    return one.sampler == "DistributedSampler" or _keeps_datasets(one)


def _keeps_datasets(one: Pass) -> bool:
    """Whether workers live longer than a pass, with a copy of a dataset that knows its epoch."""
    has_epoch = one.about.get("dataset_epoch") is not None
    return bool(one.about["workers"] and one.about.get("persistent", True) and has_epoch)


def _repeats_its_order(one: Pass, alone: Record) -> bool:
    """Whether one process, too, has the same order in two passes of a loader that is made at this line."""
    made: dict[str, list[Pass]] = {}
    for other in [own for rank in alone.ranks[:1] for own in passes(rank)]:
        if other.is_training and other.line == one.line:
            made.setdefault(other.about["key"], []).append(other)
    return any(_begin_alike(*pair, draws=False) for theirs in made.values() for pair in pairwise(theirs))


def _same_order(one: Pass, common: int, *, is_meant: bool) -> Finding:
    begins = f"epoch {one.number + 1} begins with the same {common} samples in the same order as epoch {one.number}"
    found = Finding(
        code="same-order-every-epoch", where=one.line, severity="note", cause=f"{begins}, as in one process"
    )
    if is_meant:
        return found
    why = f"{one.sampler}, whose epoch stays {one.about['epoch']}"
    if _keeps_datasets(one):
        why = "the dataset knows its epoch, and its workers live on with a copy that does not"
    fix = "draw the order anew in every epoch, from seed and epoch"
    if one.sampler == "DistributedSampler":
        fix = "sampler.set_epoch(epoch)    # at the start of every epoch"
    return replace(found, severity="error", cause=f"{begins}, and the order is a shuffled one ({why})", fix=fix)


def _dropped(record: Record, training: list[list[Pass]]) -> Iterator[Finding]:
    """Whether a pass ends with batches that none of its steps used: dropped, or left to the next epoch's first step."""
    rank = record.ranks[0]
    stepped = {event["window"]: event for event in rank.steps}
    full = _most_backwards(rank)
    last_passes = {group[0].about["key"]: group[0].number for group in training}
    for one in (group[0] for group in training):
        if not one.complete or not one.batches:
            continue
        last = one.batches[-1]["window"]
        rest = [batch for batch in one.batches if batch["window"] == last]
        shared = {pass_of(batch) for batch in rank.in_window(last, "batch") if batch["key"] in last_passes}
        if last in stepped and len(shared) > 1 and one.number < last_passes[one.about["key"]]:
            backwards = len(rank.added_in(last))
            if full is not None and backwards > full:
                yield _leaked(one, rest, stepped[last], backwards)
                return
        skipped = any(event["skipped"] for event in rank.of("scaler") if event["window"] == last)
        if last not in stepped and len(one.batches) > len(rest) and not skipped:
            yield _unstepped(one, rest)
            return


def _drops_alone(found: Finding, own_pace: OwnPace | None) -> bool:
    """Whether one process, too, loads last batches that no step uses: those that are smaller, say."""
    alone = None if own_pace is None or found.code != "samples-missing" else own_pace()
    if alone is None or not alone.ranks:
        return False
    training = [[one] for one in passes(alone.ranks[0]) if one.is_training]
    return any((one.code, one.where) == (found.code, found.where) for one in _dropped(alone, training))


def _most_backwards(rank: Rank) -> int | None:
    """How many backward passes a step takes at most whose batches come from one pass; None where there is none.

    A loader that is begun anew in the middle of a step, which takes as many batches as any other, loses nothing.
    """
    found = []
    for step in rank.steps:
        batches = [one for one in rank.in_window(step["window"], "batch") if one["training"]]
        if batches and len({pass_of(one) for one in batches}) == len({one["key"] for one in batches}):
            found.append(len(rank.added_in(step["window"])))
    return max(found, default=None)


def _leaked(one: Pass, rest: list[Event], step: Event, backwards: int) -> Finding:
    return Finding(
        code="gradient-differs",
        step=step["event"],
        where=step["where"],
        cause=f"the last {plural(len(rest), 'batch')} of epoch {one.number} fill no whole window, and their gradients "
        f"are left to the first step of the next epoch ({backwards} backward passes in it)",
        fix="step at the last batch of an epoch too, divided by the number of batches that are in that step",
    )


def _unstepped(one: Pass, rest: list[Event]) -> Finding:
    samples = sum(batch["size"] for batch in rest)
    return Finding(
        code="samples-missing",
        where=one.about["where"],
        cause=f"the last {plural(len(rest), 'batch')} of epoch {one.number} ({plural(samples, 'sample')} on rank 0) "
        "were loaded, and no optimizer step used them",
        fix="step at the last batch of an epoch too: if (i + 1) % k == 0 or i + 1 == len(loader): optimizer.step()",
    )
