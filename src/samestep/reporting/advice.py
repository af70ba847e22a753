"""What to change so that a run takes less time, and by how much at most: each piece from the run's own numbers.

Where collectives take more than a quarter of a step, whose they are is said first. Then, by their gain:

    what                     is advised where it takes   and would bring, at most
    data wait                5 % of a step               the steps' longest own time less that without the data wait
    a slow rank              3 %                         what every step would be shorter if it kept up
    uneven batches           2 %                         what an even division would save, where times follow the work
    changing slow ranks      5 %                         what is waited for others beyond that
    exchange of gradients    5 %                         all of it if hidden, half of it with half as many
    collectives in the step  2 %                         what the rank that waits least waits in them
    saving, evaluating       2 %, 10 % of the run        half of it, done half as often
    idle stages              10 %                        what they are idle

Nothing is advised that would bring less than 2 %, and nothing is known of how the gains add up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from samestep.reporting.analysis import RunAnalysis
from samestep.reporting.overlap import SYNC_BATCHNORM, Collective
from samestep.reporting.timeline import idle
from samestep.text import escape_control, format_duration, format_percent

LEAST = 0.02  # of the time
DATA, SLOW, EXCHANGE, CHANGING, EVALUATION, IDLE = 0.05, 0.03, 0.05, 0.05, 0.10, 0.10
COMMUNICATION = 0.25


@dataclass(frozen=True)
class Advice:
    code: str  # what it is about
    text: str  # what was seen, and what to do about it
    how: str  # where the gain comes from
    gain: float  # the share of the time that it would save at most
    of: Literal["step", "run"] = "step"  # a "step", or the whole "run"

    @property
    def sentence(self) -> str:
        whole = "a step would take" if self.of == "step" else "the run would take"
        return f"{self.text}: {whole} up to {format_percent(self.gain)} less time ({self.how})."


def advice(analysis: RunAnalysis) -> list[Advice]:
    """Returns what stands out: a cause that takes much of a step, then the greatest gain first; empty without any."""
    found = [piece for kind in KINDS for piece in kind(analysis) if piece.gain >= LEAST]
    return [*_communication(analysis), *sorted(found, key=lambda piece: -piece.gain)]


SLOWER = "waiting for slower ranks"
CHANGES = {
    SYNC_BATCHNORM: (
        'It exchanges statistics in every layer, forwards and backwards; `samestep.replicate(…, batchnorm="local")` '
        "does not, with statistics of each rank's own batch, which is another training"
    ),
    "the exchange of gradients": "Steps of more samples do it less often, and are another training",
    "the script's own calls": "Call them less often, or with `async_op=True`",
    "calls within libraries": "Look which library calls them in each step",
    SLOWER: "Look for what makes ranks slower than others",
}


def _communication(analysis: RunAnalysis) -> Iterator[Advice]:
    """Whose the collectives are, where they take more than a quarter of a step."""
    account = analysis.account
    if account.part(account.waits) < COMMUNICATION or analysis.is_staged or analysis.size < 2:
        return
    causes = sorted(_causes(analysis).items(), key=lambda each: -each[1])
    parts = [(name, account.part(spent)) for name, spent in causes]
    shares = ", ".join(f"{name} {format_percent(part)}" for name, part in parts if part >= LEAST)
    name, spent = causes[0]
    how = f"all of the time that {name} takes"
    calls = [call for call in analysis.calls if _cause_of(call) == name]
    where = f", called at {escape_control(calls[0].where)}" if calls else ""
    text = (
        f"Collectives take {format_percent(account.part(account.waits))} of a step: {shares}. The largest is "
        f"{name}{where}. {CHANGES[name]}"
    )
    if name == SLOWER:  # `spent` is the mean of the ranks; the slow one, which does not wait, is included
        waits = analysis.table.steady.waits
        spent = analysis.table.steady.mean(waits.max(axis=0) - waits.min(axis=0))
        how = "what the rank that waits longest in a step waits beyond the one that waits least"
    yield Advice("communication", text, how, account.part(spent))


def _causes(analysis: RunAnalysis) -> dict[str, float]:
    """Seconds of a step in collectives, by whose they are; of the calls only those of a step that are written down."""
    account = analysis.account
    spent = dict.fromkeys(CHANGES, 0.0)
    for call in analysis.calls:
        spent[_cause_of(call)] += call.least
    collective, named = account.phases.get("collective", 0.0), sum(call.seconds for call in analysis.calls)
    is_cut = any(line["more"] for log in analysis.logs for line in log.steps[-1:])  # not all pieces are written down
    share = collective / named if named and (named > collective or is_cut) else 1.0
    spent = {name: seconds * share for name, seconds in spent.items()}
    spent["calls within libraries"] = max(0.0, collective - named * share)
    left = account.transfer - sum(spent.values())
    spent["the exchange of gradients"] = max(0.0, min(left, account.phases.get("wait", 0.0)))
    spent[SLOWER] = max(0.0, account.waits - sum(spent.values()))
    return spent


def _cause_of(call: Collective) -> str:
    return SYNC_BATCHNORM if call.operation == SYNC_BATCHNORM else "the script's own calls"


def _data(analysis: RunAnalysis) -> Iterator[Advice]:
    table, account = analysis.table.steady, analysis.account
    waiting = table.of_phases("data")
    part = account.part(table.mean(waiting))
    slow = analysis.pace.straggler
    only_one = slow is not None and slow.phase == "data" and account.part(slow.gain) >= SLOW
    if part > DATA and not only_one and not analysis.is_staged:
        without = table.own.max(axis=0) - (table.own - waiting).max(axis=0)
        text = (
            f"The ranks wait {format_duration(table.mean(waiting))} of a step for data, {format_percent(part)} of it. "
            "Load with more workers (`workers=` of samestep.shards, `num_workers=` of a DataLoader), or prepare "
            "the data beforehand"
        )
        how = "the longest own time of each step, less what it is without data"
        yield Advice("data", text, how, account.part(table.mean(without)))


LOOK = {
    "data": "at what it reads its data from",
    "other": "at what the script does there beside model and optimizer, and what else runs there",
}


def _straggler(analysis: RunAnalysis) -> Iterator[Advice]:
    slow = analysis.pace.straggler
    gain = analysis.account.part(slow.gain) if slow else 0.0
    if slow is None or gain < SLOW or analysis.is_staged or _uneven_gain(analysis) > gain / 2:
        return
    times = (
        f"{slow.own / slow.others:.2f} times the others' {format_duration(slow.others)}"
        if slow.others
        else "the others none"
    )
    look = LOOK.get(slow.phase, "what else runs there, at its cores and device")
    host = next((escape_control(log.host) for log in analysis.logs if log.rank == slow.rank), "")
    text = (
        f"Rank {slow.rank} on {host} is a straggler: it is busy for {format_duration(slow.own)} "
        f"a step, {times}, and it loses most in {slow.phase}. Look {look}"
    )
    how = "what the longest own time of each step would be shorter if it kept up"
    yield Advice("straggler", text, how, gain)


def _uneven(analysis: RunAnalysis) -> Iterator[Advice]:
    ledger = analysis.ledger
    if ledger is None or ledger.imbalance is None or analysis.is_staged:
        return
    what = {"samples": "samples", "weight": "weight (tokens, say)", "elements": "numbers in batches"}[ledger.unit]
    text = (
        f"The steps' work is uneven: the rank that has most has {format_percent(ledger.imbalance)} more {what} than "
        "the mean, and the times follow. Divide by cost (`samestep.shards(…, cost=lengths)`)"
    )
    how = "what a unit of work costs, times what the fullest rank has beyond the mean"
    yield Advice("imbalance", text, how, _uneven_gain(analysis))


def _changing(analysis: RunAnalysis) -> Iterator[Advice]:
    account, slow = analysis.account, analysis.pace.straggler
    explained = max(slow.gain if slow else 0.0, analysis.ledger.cost if analysis.ledger else 0.0)
    left = account.part(max(0.0, account.delay - explained))
    if left < CHANGING or analysis.is_staged:
        return
    text = (
        f"The ranks wait {format_duration(account.delay)} of a step for slower ones, and not always for the same. Look "
        "for batches of unequal cost, and for other programs on the hosts' cores"
    )
    yield Advice("changing stragglers", text, "what is waited beyond the messages, and not for one slow rank", left)


def _exchange(analysis: RunAnalysis) -> Iterator[Advice]:
    account, overlap = analysis.account, analysis.overlap
    own_calls = sum(call.least for call in analysis.calls)
    exchange = max(0.0, min(account.transfer - own_calls, account.phases.get("wait", 0.0)))
    part = account.part(exchange)
    if part < EXCHANGE or analysis.is_staged:
        return
    text = (
        f"Every rank spends {format_duration(exchange)} of a step, {format_percent(part)} of it, exchanging gradients"
    )
    if overlap is not None and overlap.part is not None:
        text += f", though {format_percent(overlap.part)} of it passes beside the backward"
    more = f"{text}. Steps of twice as many samples would halve it for an epoch, and are another training"
    yield Advice("accumulation", more, "half of the least that any rank waits", part / 2)
    if overlap is not None and overlap.buckets:
        text = 'Hide the exchange behind the backward (`samestep.replicate(…, buckets="auto")`)'
        if len({log.host for log in analysis.logs}) > 1:  # machines of one name have folders of their own
            text += ', or send less (`compress="int8"`, say)'
        yield Advice("overlap", text, "the least that any rank waits for gradients, if nothing of it were left", part)


def _calls(analysis: RunAnalysis) -> Iterator[Advice]:
    for call in analysis.calls:
        if call.operation == SYNC_BATCHNORM:  # of which the first piece speaks, where it takes much
            continue
        text = (
            f"{escape_control(call.operation)} at {escape_control(call.where)} takes {format_duration(call.seconds)} "
            "of every step. Call it less often, or with `async_op=True`"
        )
        how = "what the rank that waits least in it waits"
        yield Advice(f"collective {call.operation} {call.where}", text, how, analysis.account.part(call.least))


def _saves(analysis: RunAnalysis) -> Iterator[Advice]:
    spent = analysis.account.outside_training.get("save", 0.0)
    part = analysis.account.of_run(spent)
    text = (
        f"Saving stops the training for {format_duration(spent)}, {format_percent(part)} of the run. Save half as "
        'often (`every=`; the end of each epoch is saved too, unless it is `every="2 epochs"`, say)'
    )
    written = max((len(log.checkpoints) for log in analysis.logs), default=0)
    if part >= LEAST and written != 1:  # the last state is saved in any case
        yield Advice("save", text, "half of the time that saves take", part / 2, "run")


def _evaluations(analysis: RunAnalysis) -> Iterator[Advice]:
    spent = analysis.account.outside_training.get("evaluate", 0.0)
    part = analysis.account.of_run(spent)
    text = f"Evaluation takes {format_duration(spent)}, {format_percent(part)} of the run. Evaluate half as often"
    if part >= EVALUATION:
        yield Advice("evaluate", text, "half of the time that evaluations take", part / 2, "run")


def _idle(analysis: RunAnalysis) -> Iterator[Advice]:
    if not analysis.is_staged:
        return
    part, last = idle(analysis.gantts), analysis.gantts[-1]
    text = (
        f"The stages of the pipeline are idle {format_percent(part)} of a step. Cut it into more than "
        f"{last.micro_batches} micro-batches, or the model elsewhere (`samestep.plan_pipeline`)"
    )
    if part >= IDLE:
        yield Advice("idle stages", text, "what the ranks' time holds besides actions", part)


KINDS = (_data, _straggler, _uneven, _changing, _exchange, _calls, _saves, _evaluations, _idle)


def _uneven_gain(analysis: RunAnalysis) -> float:
    return 0.0 if analysis.ledger is None else analysis.account.part(analysis.ledger.cost)
