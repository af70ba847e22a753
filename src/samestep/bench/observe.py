"""What watching costs: `bench step`'s loop by hand under verify's recorder, --check, a run's events, and nobody.

What an observer changes in torch cannot be taken back in a process, so two sets of ranks are kept, and asked in turn:

    ranks with the observer       block             block     block             …
    ranks without                        block   block             block   block
    what is compared              └── a pair ──┘ └── a pair ──┘

A block is as many steps as lie between two summaries of --check, so each holds one. The recorder keeps whole values at
few steps; they come first, are timed by themselves, and lie outside the blocks.
"""

from __future__ import annotations

import json
import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch
import torch.distributed as dist

import samestep
from samestep import events, progress
from samestep.bench.harness import Comparison, Options, Report, in_sets, interleave, training_device
from samestep.bench.step import align, setting, their_steps
from samestep.bench.workloads import MLP
from samestep.launch.functions.pool import RankPool
from samestep.launch.rank.observers import RankContext
from samestep.launch.rank.timeline import Timeline
from samestep.runtime.digest import digest
from samestep.runtime.world import World

RECORDER = "samestep.verification.recording.recorder:Recorder"
TIMELINE = "samestep.launch.rank.timeline:Timeline"
CHECKER = "samestep.verification.online.checker:Checker"
RECORDED = 1.15  # target of a step whose gradients and parameters are digested
CHECKED = 1.02  # of a step under --check
EVENTFUL = 1.01  # of a step whose events are kept
EVENTS_S = 1e-4  # target for the events of a step of 10 ms: both threads' time, the record in memory included
DIGEST_S = 0.025  # target for DIGESTED bytes on one core
DIGESTED = 100_000_000
STEPS = 16  # in a block
NOTED_STEPS = 300
SETS = 4  # pairs of sets, as in `bench step`
WARMUP = 130  # steps: with those whose values the recorder keeps
_KEPT = (4, 16, 64)  # of them
_ACCEPT_S = 0.2


def run(options: Options) -> Report:
    device = training_device(options.ranks)
    recorded, facts = _compared(
        "verify's recorder / nobody, a step without kept values", RECORDER, RECORDED, options, device
    )
    checked, _ = _compared("--check / nobody", CHECKER, CHECKED, options, device)
    events, _ = _compared("events / none", TIMELINE, EVENTFUL, options, device)
    return Report("observe", [recorded, checked, events, _notes(), _digests()], facts)


def _compared(
    name: str, observer: str, most: float, options: Options, device: str | None
) -> tuple[Comparison, dict[str, Any]]:
    def measure(pairs: int, _: bool) -> tuple[list[list[float]], dict[str, Any]]:
        with TemporaryDirectory(prefix="samestep-bench-") as folder:
            ours, theirs, facts = compare(observer, Path(folder), options.ranks, pairs, device)
        return [ours, theirs], facts

    (ours, theirs), facts = in_sets(options.repeats, SETS, measure)
    return Comparison(name, "step", ours, theirs, most), facts[-1]


def compare(
    observer: str, folder: Path, ranks: int, pairs: int, device: str | None, warmup: int = WARMUP
) -> tuple[list[float], list[float], dict[str, Any]]:
    """Times one pair of sets; returns seconds per step with and without the observer, and what else was seen."""
    with (
        RankSet(folder / "plain.socket", ranks, device) as plain,
        RankSet(folder / "seen.socket", ranks, device, observer) as seen,
    ):
        first = [side.ask(f"warm {warmup}") for side in (seen, plain)]
        times = interleave(lambda: float(seen.ask("block")), lambda: float(plain.ask("block")), pairs=pairs)
        ends = [side.ask("stop") for side in (seen, plain)]
    each = [[seconds / STEPS for seconds in side] for side in times]
    facts: dict[str, Any] = ends[0]["setting"] | {
        "ms_more_with_kept_values": round(1000 * _more(first[0]), 1),
        "megabytes_more": round((ends[0]["peak"] - ends[1]["peak"]) / 1e6, 1),
        "bytes_of_journal_a_step": round(_size(folder, "*.jsonl") / ends[0]["steps"] / ranks),
        "megabytes_of_values": round(_size(folder, "*.pt") / 1e6, 1),
    }
    return each[0], each[1], facts


def _more(seconds: list[float]) -> float:
    """How much longer the steps of kept values take than their neighbours."""
    kept = [seconds[step] for step in _KEPT if step < len(seconds)]
    beside = [seconds[step + way] for step in _KEPT for way in (-2, 2) if step + way < len(seconds)]
    return median(kept) - median(beside) if kept and beside else 0.0


def _size(folder: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in folder.rglob(pattern))


class RankSet:
    """A set of ranks that takes its steps when it is asked to.

    Args:
        path: of the socket on which it is asked; the observer's files lie beside it.
        ranks: how many.
        device: of the training.
        observer: watches every rank, if given.
    """

    def __init__(self, path: Path, ranks: int, device: str | None, observer: str | None = None) -> None:
        variables = {"OMP_NUM_THREADS": "1"}
        if observer is not None:
            folder = str(path.with_suffix(".journals"))
            order = json.dumps({"folder": folder, "steps": None})
            variables |= {"SAMESTEP_OBSERVERS": observer, "SAMESTEP_VERIFY": order, "SAMESTEP_LOGS": folder}
        self._pool = RankPool(ranks, extra=variables)
        self._thread = ThreadPoolExecutor(1)
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
                listener.listen()
                listener.settimeout(_ACCEPT_S)
                self._call = self._thread.submit(self._pool.call, train, (str(path), device))
                self._connection = self._accepted(listener)
        except BaseException:
            self._pool.kill()
            self._thread.shutdown()
            raise
        self._file = self._connection.makefile("rw", encoding="utf-8")

    def _accepted(self, listener: socket.socket) -> socket.socket:
        while True:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if self._call.done():
                    self._call.result()  # raises what has become of it
                continue
            connection.settimeout(None)
            return connection

    def ask(self, order: str) -> Any:
        """Sends an order to all ranks and returns the first one's answer."""
        self._file.write(f"{order}\n")
        self._file.flush()
        answer = self._file.readline()
        return json.loads(answer) if answer else self._call.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._connection.close()  # which ends the ranks' waiting
        self._pool.kill()
        self._thread.shutdown()


def train(path: str, device: str | None) -> None:
    """Runs on every rank: does as it is asked until it is asked to stop. Collective."""
    with samestep.world(device=device) as world, socket.socket(socket.AF_UNIX) as connection:
        steps = their_steps(MLP, MLP.network(), world)
        if world.rank == 0:
            connection.connect(path)
        with connection.makefile("rw", encoding="utf-8") as file:
            taken = 0
            while count := _ordered(file, world):
                taken += count
                answer = _steps(steps, count, world)
                _answer(file, world, answer if count != STEPS else sum(answer))
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            facts = {"setting": setting(world) | {"steps_per_block": STEPS}, "peak": peak, "steps": taken}
            _answer(file, world, facts)


def _ordered(file: Any, world: World) -> int:
    """How many steps are to be taken, on all ranks the same; 0 for none any more."""
    count = torch.zeros(1, dtype=torch.int64)
    if world.rank == 0:
        order, _, number = file.readline().strip().partition(" ")
        count[0] = {"warm": int(number or 0), "block": STEPS}.get(order, 0)
    if world.size > 1:
        dist.broadcast(count, src=0)
    return int(count)


def _steps(steps: Iterator[None], count: int, world: World) -> list[float]:
    """Takes steps; returns the seconds of each, and in a block no more than both ends are waited for."""
    align(world)
    times = [time.perf_counter()]
    for number in range(count):
        next(steps)
        if count != STEPS or number == count - 1:
            align(world)
        times.append(time.perf_counter())
    return [later - earlier for earlier, later in pairwise(times)]


def _answer(file: Any, world: World, value: Any) -> None:
    if world.rank == 0:
        file.write(json.dumps(value) + "\n")
        file.flush()


def _notes(repeats: int = 30) -> Comparison:
    """What a script's usual calls of :mod:`samestep.progress` cost with events, held against its target."""
    times = []
    for _ in range(repeats):
        with TemporaryDirectory(prefix="samestep-bench-") as folder:
            progress.attach(progress.create())
            timeline = Timeline()
            began = time.process_time()
            timeline.begin(RankContext(rank=0, size=1, folder=Path(folder)))
            for _ in range(NOTED_STEPS):
                _note_step()
            timeline.end(None)
            times.append((time.process_time() - began) / NOTED_STEPS)
            progress.detach()
            events.detach()
    return Comparison("events of a step / 0.1 ms", "step", tuple(times), (EVENTS_S,) * repeats, 1.0)


def _note_step() -> None:
    """All that a step of four buckets, with a collective of its own and a logged loss, gives rise to."""
    for phase in ("data", "train", "backward"):
        progress.set_phase(phase)
    for bucket in range(4):
        progress.bucket_filled(bucket, 1 << 20, begun=True)
        progress.bucket_reduced(bucket)
    progress.gradients_ready()
    progress.backward_done()
    progress.set_phase("train")
    progress.enter_collective("all_reduce", "train.py:12")
    progress.exit_collective()
    progress.set_phase("optimizer")
    progress.set_phase("train")
    progress.count_step()
    progress.log_values({"loss": 0.5})


def _digests(repeats: int = 30) -> Comparison:
    """The digest of 100 MB on one core, held against its target."""
    tensor = torch.arange(DIGESTED // 4, dtype=torch.int32)
    digest(tensor)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        digest(tensor)
        times.append(time.perf_counter() - began)
    return Comparison("digest of 100 MB / 25 ms", "digest", tuple(times), (DIGEST_S,) * repeats, 1.0)
