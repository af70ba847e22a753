"""Runs the tests and measures each: `make test-times`, or `python scripts/test_times.py [PYTEST ARGUMENTS]`.

For each test it measures the wall time, the processor time of the test process and of all processes under it, and the
number of processes started. It prints a table for each directory and file and the 40 dearest tests, and writes
build/test-times.json. `python scripts/test_times.py --show FILE` prints the tables of an earlier run.

Processor time comes from /proc, so a daemon that has left the process tree (slurmd, sshd) is not counted. The number
of processes comes from the kernel's process events, which only root may read; elsewhere the column is empty.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "test-times.json"
DEAREST = 40
_TICK = os.sysconf("SC_CLK_TCK")


class Spent(NamedTuple):
    """What one test, or several, took."""

    tests: int
    wall: float  # s
    processor: float  # s
    processes: int | None


def total(rows: Iterable[Spent]) -> Spent:
    """Returns the sum of several."""
    rows = list(rows)
    started = [row.processes for row in rows if row.processes is not None]
    return Spent(
        sum(row.tests for row in rows),
        sum(row.wall for row in rows),
        sum(row.processor for row in rows),
        sum(started) if started else None,
    )


# --- as a plugin of pytest: one file of JSON lines for each process that runs tests -------------------------------


class ProcessEvents:
    """Counts the processes that this one and those under it start, from the kernel's netlink connector."""

    _FORK, _EXIT = 1, 0x80000000

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 11)  # NETLINK_CONNECTOR
        self._socket.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)  # SO_RCVBUFFORCE: events of a long test wait here
        self._socket.bind((0, 1))  # CN_IDX_PROC
        listen = struct.pack("=IIIIHHI", 1, 1, 0, 0, 4, 0, 1)  # PROC_CN_MCAST_LISTEN
        self._socket.send(struct.pack("=IHHII", 16 + len(listen), 3, 0, 0, 0) + listen)
        self._tree = {os.getpid()}

    def started(self) -> int:
        """Returns how many processes were started since the last call."""
        count = 0
        while True:
            try:
                event = self._socket.recv(4096, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return count
            kind, *_ = struct.unpack_from("=I", event, 36)
            if kind == self._FORK:
                _, parent, child, group = struct.unpack_from("=IIII", event, 52)
                if child == group and parent in self._tree:  # a thread has the number of its process as group
                    self._tree.add(child)
                    count += 1
            elif kind == self._EXIT:
                number, group = struct.unpack_from("=II", event, 52)
                if number == group:
                    self._tree.discard(number)


def processor_time() -> float:
    """Returns the seconds of processor time of this process and all under it, alive or reaped."""
    own = os.times()
    children, used = defaultdict(list), {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            children[int(fields[1])].append(int(folder.name))
            used[int(folder.name)] = sum(map(int, fields[11:15])) / _TICK
    seconds, waiting = sum(own[:4]), list(children[os.getpid()])
    while waiting:
        seconds += used[number := waiting.pop()]
        waiting += children[number]
    return seconds


class Times:
    """The plugin."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8")
        try:
            self._events: ProcessEvents | None = ProcessEvents()
        except PermissionError:
            self._events = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Measures one test, with the fixtures that it sets up or tears down."""
        wall, processor = time.monotonic(), processor_time()
        if self._events:
            self._events.started()
        try:
            return (yield)
        finally:
            processes = self._events.started() if self._events else None
            spent = (1, time.monotonic() - wall, processor_time() - processor, processes)
            self._file.write(json.dumps([item.nodeid, *spent]) + "\n")
            self._file.flush()


def pytest_configure(config: pytest.Config) -> None:
    """Measures in each process that runs tests."""
    if folder := os.environ.get("SAMESTEP_TEST_TIMES"):
        config.pluginmanager.register(Times(Path(folder)))


# --- as a command --------------------------------------------------------------------------------------------------


def read(folder: Path) -> dict[str, Spent]:
    """Returns what the processes have written."""
    lines = [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    return {test: Spent(*spent) for test, *spent in lines}


def grouped(tests: dict[str, Spent], depth: int | None) -> dict[str, Spent]:
    """Returns the sums for each file, or for each folder that lies `depth` deep."""
    groups = defaultdict(list)
    for test, spent in tests.items():
        path = Path(test.partition("::")[0])
        groups["/".join(path.parts[:depth] if depth and len(path.parts) > depth else path.parts)].append(spent)
    return {name: total(rows) for name, rows in groups.items()}


def table(title: str, rows: dict[str, Spent], limit: int | None = None) -> Iterator[str]:
    """Yields the lines of a table, the dearest first."""
    yield f"\n{'tests':>6} {'wall s':>8} {'cpu s':>8} {'started':>8}  {title}"
    for name, spent in sorted(rows.items(), key=lambda row: -row[1].processor)[:limit]:
        started = "" if spent.processes is None else spent.processes
        yield f"{spent.tests:6} {spent.wall:8.1f} {spent.processor:8.1f} {started!s:>8}  {name}"


def show(tests: dict[str, Spent]) -> None:
    """Prints all tables."""
    for title, rows, limit in (
        ("directory", grouped(tests, 2), None),
        ("file", grouped(tests, None), None),
        (f"test, the {DEAREST} dearest", tests, DEAREST),
        ("all", {"": total(tests.values())}, None),
    ):
        print("\n".join(table(title, rows, limit)))


def main() -> int:
    """Runs the tests, or shows the figures of an earlier run."""
    if sys.argv[1:2] == ["--show"]:
        shown = json.loads(Path(sys.argv[2] if sys.argv[2:] else OUT).read_text())
        show({test: Spent(*spent) for test, spent in shown.items()})
        return 0
    folder = ROOT / "build" / "test-times"
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("*.jsonl"):
        file.unlink()
    path = os.pathsep.join(filter(None, (str(ROOT / "scripts"), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "SAMESTEP_TEST_TIMES": str(folder), "PYTHONPATH": path}
    code = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "test_times", "-q", *sys.argv[1:]],
        cwd=ROOT,
        env=environment,
        check=False,
    ).returncode
    tests = read(folder)
    OUT.write_text(json.dumps(tests, indent=0))
    show(tests)
    print(f"\n{OUT.relative_to(ROOT)}")
    return code


if __name__ == "__main__":
    sys.exit(main())
