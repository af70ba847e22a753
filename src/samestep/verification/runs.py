"""One supervised run of the script: its output in a file, its time limited, no process left over.

A run hangs when none of its journals grows for a while, and neither a rank nor a process that it has started computes,
or waits for a processor core or a disk. Its ranks are then asked for their stacks, and ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.launch.process import Process, children, signal_alone, start, stat_of, wait_all
from samestep.launch.rank.user_code import STACKS_SIGNAL, place_in
from samestep.launch.start.prefork_server import PreforkServer
from samestep.rankenv import child_environment, variable
from samestep.verification import journal

HANG_TIMEOUT_S = 60.0  # seconds without a sign of life until a run counts as hung
_LONGER = 10.0
_LEAST_S, _WAITING = 0.5, 0.1  # processor time that is no sign of life: so much, and this share of the time
_LOOK_S = 0.2
_STACKS_S = 2.0  # for the stacks to be written
_END_S = 20.0  # for the launcher to end what it started


@dataclass(frozen=True, kw_only=True)
class Script:
    """What is to be run: a path or a module's name, and its arguments."""

    program: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    mpi: bool = False  # mpiexec starts its ranks
    local_rank: str | None = None  # the option that brings each rank its local one, "--local-rank" or "--local_rank"

    def words(self) -> list[str]:
        return [*(["-m"] if self.is_module else []), self.program, *self.arguments]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run has ended."""

    code: int  # of the launcher
    hung: bool  # whether it was ended because nothing moved any more
    failure: dict[str, Any] | None  # what the launcher blames, as in `samestep run --json`; None where nothing failed
    folder: Path  # of its journals, its output ("output.txt") and its ranks' logs ("run/")

    def tail(self, lines: int = 8) -> str:
        try:
            text = (self.folder / "output.txt").read_bytes()[-20_000:].decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.strip().splitlines()[-lines:])

    @property
    def found_port_taken(self) -> bool:
        """Whether it failed because something had an address that it asked for: another program, or itself."""
        words = f"{(self.failure or {}).get('message')} {self.tail(40)}".lower()
        return self.code != 0 and ("eaddrinuse" in words or "address already in use" in words)


def run(
    script: Script,
    ranks: int,
    folder: Path,
    observer: str,
    order: dict[str, Any],
    *,
    still_s: float,
    threads: int = 1,
    variables: Mapping[str, str] | None = None,
    fork_server: PreforkServer | None = None,
    progress: Callable[[Path, float], None] = lambda *_: None,
) -> Ended:
    """Runs the script on so many ranks, each watched by `observer`, which finds `order` in SAMESTEP_VERIFY.

    Everything that the run leaves is in `folder`, which is made here. It counts as hung after `still_s` seconds without
    a sign of life; `progress` is called again and again with the folder and these seconds. The fork server has imported
    torch for so many threads, and starts the run; without one, fresh interpreters do.
    """
    folder.mkdir(parents=True)
    arguments = [
        *("run", "-n", str(ranks), *(("--start", "fork") if fork_server else ("--start", "spawn", "--hash-seeds"))),
        *(["--mpi"] if script.mpi and ranks > 1 else []),
        *([] if script.local_rank is None else [f"--pass{script.local_rank[1:]}"]),
        *("--run-dir", str(folder / "run"), "--json", str(folder / "run.json"), "--grace", "5", "--no-events"),
        *("--on-hang", "wait", "--hang-after", str(_LONGER * still_s)),  # its words would be a sign of life
        *script.words(),
    ]
    options = json.dumps({**order, "folder": str(folder / "journals")})
    environment = {"SAMESTEP_OBSERVERS": observer, "SAMESTEP_VERIFY": options, **shared_variables(threads)}
    environment |= variables or {}
    with (folder / "output.txt").open("wb") as output:
        process = _start(arguments, child_environment(environment), output.fileno(), fork_server)
        try:
            hung = _wait(process, folder, still_s, progress)
        except BaseException:
            _end(process)
            raise
    return Ended(code=process.wait(), hung=hung, failure=_failure(folder), folder=folder)


def shared_variables(threads: int) -> dict[str, str]:
    """Returns the variables that all runs have in common: sums depend on the number of threads, and TF32 is off.

    On GPUs it rounds the factors of products to 10 bits. The variable holds whatever a script sets. Source: NVIDIA's
    documentation of cuBLAS.
    """
    threads_of_one = variable("OMP_NUM_THREADS") or str(threads)
    return {"OMP_NUM_THREADS": threads_of_one, "NVIDIA_TF32_OVERRIDE": "0"}


def _start(
    arguments: list[str], environment: dict[str, str], output: int, fork_server: PreforkServer | None
) -> Process:
    if fork_server is not None:
        return fork_server.command(arguments, environment, output)
    command = [sys.executable, "-P", "-m", "samestep", *arguments]
    return start(command, {**environment, "SAMESTEP_PARENT": str(os.getpid())}, stdout=output, stderr=output)


def _wait(process: Process, folder: Path, still_s: float, progress: Callable[[Path, float], None]) -> bool:
    """Waits for the end of a run; returns whether it hung and was ended."""
    moved, seen = time.monotonic(), _Signs(-1, 0.0)
    while not wait_all([process], _LOOK_S):
        signs, still = _Signs.of(folder), time.monotonic() - moved
        if signs.moved_since(seen, still):
            moved, seen, still = time.monotonic(), signs, 0.0
        elif still > still_s:
            _ask_for_stacks(process.pid, folder)
            _end(process)
            return True
        progress(folder, still)
    return False


@dataclass(frozen=True)
class _Signs:
    """Signs of progress: the bytes that a run has written, and the seconds that its ranks have been busy."""

    written: int
    computed: float
    reads: bool = False  # whether a rank waits for a disk

    @classmethod
    def of(cls, folder: Path) -> _Signs:
        """Returns those of a run."""
        ranks = pids(folder)
        written = sum(_size(path) for path in (folder / "output.txt", *(folder / "journals").rglob("*.jsonl")))
        return cls(written, sum(map(_computed, ranks)), any(stat_of(pid)[0] == "D" for pid in ranks))

    def moved_since(self, earlier: _Signs, seconds: float) -> bool:
        """Returns whether there was progress; a rank that waits in a collective computes a little, too."""
        computed = abs(self.computed - earlier.computed)  # what ended processes have computed is not counted any more
        return self.reads or self.written != earlier.written or computed > _LEAST_S + _WAITING * seconds


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _computed(pid: int) -> float:
    """Seconds that a process and its descendants have computed, or waited for a core: a worker may load for a rank."""
    return stat_of(pid)[1] + _waited_for_core(pid) + sum(map(_computed, children(pid)))


def _waited_for_core(pid: int) -> float:
    """Seconds in which a process's main thread could have run and other programs had the cores; 0 if unknown."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def pids(folder: Path) -> list[int]:
    paths = (folder / "journals").rglob("rank*.jsonl")
    first = [journal.first(path) for path in paths]  # asked again and again: a whole journal may have megabytes
    return [int(event["pid"]) for event in first if event is not None and event["kind"] == "begin"]


def _ask_for_stacks(launcher: int, folder: Path) -> None:
    run = set(_descended(launcher))
    for pid in run.intersection(pids(folder)):  # a rank may have ended, and its number be another's
        with contextlib.suppress(OSError):
            os.kill(pid, STACKS_SIGNAL)
    time.sleep(_STACKS_S)  # they tell nobody when they have written


def _descended(pid: int) -> Iterator[int]:
    for child in children(pid):
        yield child
        yield from _descended(child)


def stack_positions(folder: Path) -> dict[int, str]:
    """Returns rank -> the line of the script in the stack that it was asked for."""
    places = {}
    for suffix in ("err", "stacks"):
        for path in (folder / "run").glob(f"*/*/rank*.{suffix}"):
            where, source = place_in(path.read_text(encoding="utf-8", errors="replace"))
            if where is not None:
                places[int(path.stem.removeprefix("rank"))] = f"{where}  {source or ''}".rstrip()
    return places


def failures(folder: Path) -> list[dict[str, Any]]:
    """Returns what the ranks of a run, by their number, have written down of their failures."""
    found = []
    for path in sorted((folder / "run").glob("*/*/rank*.error.json")):
        with contextlib.suppress(OSError, ValueError):
            found.append(json.loads(path.read_text(encoding="utf-8")))
    return found


def failure_positions(folder: Path) -> dict[int, str]:
    """Returns rank -> the line of the script at which its failure, or that of another rank, was raised."""
    return {
        int(failure["rank"]): f"{failure['where']}  {failure.get('source') or ''}".rstrip()
        for failure in failures(folder)
        if failure.get("where")
    }


def _end(process: Process) -> None:
    signal_alone(process, signal.SIGTERM)
    if not wait_all([process], _END_S):
        signal_alone(process, signal.SIGKILL)
    process.wait()


def _failure(folder: Path) -> dict[str, Any] | None:
    try:
        result: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    failure: dict[str, Any] | None = result["failure"]
    return failure
