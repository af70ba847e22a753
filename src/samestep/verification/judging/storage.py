"""Whether a training that was saved and loaded goes on as it was: parameters, optimizer state, learning rate."""

from __future__ import annotations

from collections.abc import Iterator

from samestep.verification.findings import PROVED, Finding, unchecked
from samestep.verification.journal import Event
from samestep.verification.judging.record import Rank, Record
from samestep.verification.judging.states import differing
from samestep.verification.judging.words import listed
from samestep.verification.report import Report

__all__: list[str] = []


def judge(record: Record, report: Report) -> None:
    """Adds what saves and loads tell."""
    saves = [event for rank in record.ranks for event in rank.of("save")]
    resumed = [(rank, event) for rank in record.ranks for event in rank.of("resumed")]
    compared = False
    report.add(_without_buffers(record))
    for rank, event in resumed:
        mine = [save for save in saves if save["path"] == event["path"] and "state" in save]
        before = [save for save in mine if save["event"] <= event["event"]]
        if before:
            compared = True
            report.add(_compared(rank, event, before[-1]))
    if compared:
        report.cover("checkpoint", PROVED)
    else:
        why = "nothing that was saved was loaded again" if saves else "nothing was saved"
        report.cover("checkpoint", unchecked(why))


def _without_buffers(record: Record) -> Iterator[Finding]:
    """Whether a file holds all parameters of a model and none of its buffers."""
    for rank in record.ranks:
        for save in rank.of("save"):
            held, state = set(save["digests"].values()), save.get("state")
            if not state or not state["buffers"] or not set(state["parameters"].values()) <= held:
                continue
            if not set(state["buffers"].values()) & held:
                yield Finding(
                    code="checkpoint-inexact",
                    property="checkpoint",
                    rank=rank.number,
                    where=save["where"],
                    cause=f"all parameters are saved, and no buffer ({listed(list(state['buffers']), 'buffer')})"
                    ": whoever loads this normalises with other statistics",
                    fix="torch.save(model.state_dict(), …), which has both",
                )
                return


def _compared(rank: Rank, event: Event, save: Event) -> Iterator[Finding]:
    step = rank.steps[event["event"]] if event["event"] < len(rank.steps) else None
    if step is None:
        return
    where = next((load["where"] for load in rank.of("load") if load["path"] == event["path"]), None)
    saved = {"state": save["state"], "where": save["where"]}
    if not saved["state"]["parameters"]:
        return  # saved before there was an optimizer
    if sorted(step["parameters"].values()) != sorted(_of_names(saved["state"]["parameters"], step["parameters"])):
        yield _lost(rank, event, where, "the parameters", "load the model's state before the first step")
        return
    if lost := differing(saved["state"]["buffers"], event["buffers"]):
        yield _lost(
            rank, event, where, f"{listed(lost, 'buffer')}", "save model.state_dict(), which has the buffers too"
        )
        return
    was, now = save["state"]["optimizers"], event["optimizers"]
    pairs = zip(was[-len(now) :], now, strict=False)
    for old, new in pairs:
        if old["state"] and old["state"] != new["state"]:
            fix = 'save {"optimizer": optimizer.state_dict()} as well, and load it'
            yield _lost(rank, event, where, "the optimizer's state", fix)
            return
        if old["rates"] != new["rates"]:
            fix = 'save {"scheduler": scheduler.state_dict()} as well, and load it'
            yield _lost(rank, event, where, f"the learning rate ({old['rates']} is now {new['rates']})", fix)
            return


def _of_names(saved: dict[str, str], wanted: dict[str, str]) -> list[str]:
    """The saved digests; of several models only the one that steps."""
    named = [saved[name] for name in wanted if name in saved]
    return named if len(named) == len(wanted) else list(saved.values())


def _lost(rank: Rank, event: Event, where: str | None, what: str, fix: str) -> Finding:
    return Finding(
        code="checkpoint-inexact",
        property="checkpoint",
        rank=rank.number,
        step=event["event"],
        where=where,
        cause=f"rank {rank.number} goes on at step {event['event']} after loading a checkpoint, and {what} did not "
        "come back as it was when that was saved",
        fix=fix,
    )
