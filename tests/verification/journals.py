"""Records as ranks would have written them, for judges."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from samestep.verification.findings import Finding
from samestep.verification.journal import value_path
from samestep.verification.judging import chance
from samestep.verification.judging.record import Rank, Record, Run
from samestep.verification.report import Report
from samestep.verification.runs import Ended

Event = dict[str, Any]


def findings(judge: Any, ranks: Record) -> list[Finding]:
    """Returns what a module of `samestep.verification.judging` finds in a record."""
    report = Report(ranks=ranks.size, steps=ranks.steps)
    judge.judge(ranks, report)
    return report.findings


def chance_findings(ranks: Record, *alone: Event) -> list[Finding]:
    """Returns what is found of the random numbers in a record, where the script alone has written down `alone`."""
    report = Report(ranks=ranks.size, steps=ranks.steps)
    ended = Ended(code=0, hung=False, failure=None, folder=ranks.folder)
    chance.judge(ranks, Run(ended, record([*alone])), report)
    return report.findings


def trained(folder: Path, gradients: Sequence[torch.Tensor], more: Sequence[Event] = (), **of_steps: Any) -> Run:
    """A process that has kept the one gradient of each of its steps; `of_steps` is in every step's event."""
    events: list[Event] = list(more)
    value_path(folder, 0, 0).parent.mkdir(parents=True)
    for number, gradient in enumerate(gradients):
        torch.save({"w": gradient}, value_path(folder, 0, number))
        events += [
            {"kind": "rates", "event": number, "optimizer": 0, "rates": [0.1]},
            {"kind": "window", "number": number, "others": {}, "kept": None},
            {"kind": "backward", "window": number, "where": "train.py:25"},
            step(number, "g", kept=number, **of_steps),
            stepped(number),
        ]
    return Run(Ended(code=0, hung=False, failure=None, folder=folder), Record(folder, [Rank(0, events)]))


def record(*ranks: list[Event]) -> Record:
    """Returns a record of so many ranks."""
    return Record(Path("/nowhere"), [Rank(number, events) for number, events in enumerate(ranks)])


def step(event: int, gradient: str, parameter: str = "p", **more: Any) -> Event:
    """One optimizer step of one tensor."""
    return {
        "kind": "step",
        "event": event,
        "optimizer": 0,
        "window": event,
        "micro": 1,
        "where": "train.py:30",
        "rates": [0.1],
        "settings": [{"weight_decay": 0.0}],
        "gradients": {"w": gradient},
        "parameters": {"w": f"{parameter}{event}"},
        "orphans": [],
        "left_out": [],
        "empty_groups": 0,
        "probe": 1.0,
        "kept": None,
        **more,
    }


def stepped(event: int, parameter: str = "p") -> Event:
    """What is behind it."""
    return {"kind": "stepped", "event": event, "optimizer": 0, "parameters": {"w": f"{parameter}{event + 1}"}}


def ended() -> Event:
    """A script that came to its end."""
    return {"kind": "end", "error": None, "message": "", "enough": False}


def call(where: str, op: str = "all_reduce", shape: tuple[int, ...] = (4,), **more: Any) -> Event:
    """A collective."""
    return {
        "kind": "collective",
        "op": op,
        "shapes": [list(shape)],
        "dtypes": ["float32"],
        "reduce": "SUM",
        "root": None,
        "group": "world",
        "between_two": False,
        "where": where,
        "window": 0,
        **more,
    }


def wrap(*names: str, wrapper: str = "DistributedDataParallel", **more: Any) -> Event:
    """A model that is wrapped."""
    about = {"wrapper": wrapper, "names": list(names), "trained": list(names), "norms": False, "where": "train.py:12"}
    return {"kind": "wrap", **about, **more}


def passed(indices: list[int], *, samples: int, number: int = 0, window: int = 0, **more: Any) -> list[Event]:
    """A whole pass over a DataLoader, in one batch, in a window that a step ends."""
    about = {
        "kind": "pass",
        "key": "train.py:10#1",
        "number": number,
        "where": "train.py:20",
        "length": 1,
        "samples": samples,
        "dataset": "Data",
        "sampler": "DistributedSampler",
        "replacement": False,
        "epoch": number,
        "drop_last": False,
        "batch_size": 4,
        "workers": 0,
        **more,
    }
    batch = {
        "kind": "batch",
        "key": about["key"],
        "number": number,
        "index": 0,
        "indices": indices,
        "rows": [f"row {index}" for index in indices],
        "size": len(indices),
        "kept": None,
        "training": True,
        "window": window,
    }
    backward = {"kind": "backward", "window": window, "where": "train.py:25"}
    return [
        about,
        batch,
        backward,
        step(window, "g"),
        stepped(window),
        {"kind": "passed", "key": about["key"], "number": number},
    ]
