"""What lies between hosts, measured by one rank on each: latency, bandwidth, clocks, files that all can see.

    round   0 ─ 3   1 ─ 2        every pair once, in pairs side by side: N - 1 rounds for N hosts
    round   0 ─ 2   3 ─ 1
    round   0 ─ 1   2 ─ 3

    latency     half of the median of 20 messages there and back
    bandwidth   the fastest of 3 messages of 4 MiB, there and back
    clocks      the other's clock at the middle of the fastest exchange (as NTP does it)

Ranks exchange over gloo: so this is what a training on CPUs would have.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout

import samestep
from samestep.launch.hosts.network import addresses
from samestep.runtime.exchange import all_gather_json

MARK = "samestep-doctor-between:"  # before the line in which rank 0 says what was found
MESSAGES, LARGE, LARGES = 20, 4 << 20, 3
TIMEOUT = 5.0  # seconds for a file that one host has made to be seen by others
LOOKED_UP = 3.0  # seconds for all names
GIVEN_UP = 60.0  # seconds for all to come


@dataclass(frozen=True)
class Pair:
    first: int
    second: int
    latency_s: float
    bytes_per_s: float
    offset_s: float  # by how much the second's clock is ahead


def main() -> None:
    """Measures, and has rank 0 print what was found, for the doctor that has started this."""
    with samestep.world(backend="gloo", device="cpu", timeout=GIVEN_UP, join_timeout=GIVEN_UP) as world:
        found = measure(world, Path.cwd())
        if world.is_first:
            sys.stdout.write(f"{MARK}{json.dumps(found)}\n")


def measure(world: Any, folder: Path) -> dict[str, Any]:
    """Returns, on all ranks, their hosts, every pair, and whether they share a folder. Collective."""
    hosts = all_gather_json(world.everyone, socket.gethostname())
    outer = [each.address for each in addresses() if not each.is_loopback]
    known_as = all_gather_json(world.everyone, outer[0] if outer else "127.0.0.1")
    unknown = all_gather_json(world.everyone, unknown_names(hosts, socket.gethostname()))
    mine = [_pair(world.rank, *pair) for pairs in rounds(world.size) for pair in pairs if world.rank in pair]
    known = [pair for pairs in all_gather_json(world.everyone, [asdict(one) for one in mine if one]) for pair in pairs]
    return {
        "hosts": hosts,
        "addresses": known_as,
        "unknown": unknown,
        "pairs": known,
        "shared": _shared(world, folder),
        "folder": str(folder),
    }


def unknown_names(hosts: Sequence[str], own: str) -> list[int]:
    """Returns the places of those that this host cannot look up; one that takes too long counts as unknown."""
    missing = [place for place, host in enumerate(hosts) if host != own]

    def ask(place: int) -> None:
        with contextlib.suppress(OSError):
            socket.getaddrinfo(hosts[place], None, socket.AF_INET)
            missing.remove(place)

    threads = [threading.Thread(target=ask, args=(place,), daemon=True) for place in list(missing)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + LOOKED_UP
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return list(missing)


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yields pairs of all of them, each pair once, nobody twice in a round: the circle method of tournaments.

    >>> list(rounds(3))
    [[(1, 2)], [(0, 2)], [(0, 1)]]
    """
    places: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    half = len(places) // 2
    for _ in range(len(places) - 1):
        facing = zip(places[:half], reversed(places[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None]
        places = [places[0], places[-1], *places[1:-1]]


def _pair(rank: int, first: int, second: int) -> Pair | None:
    leads, other = rank == first, second if rank == first else first
    small, large = torch.zeros(1, dtype=torch.float64), torch.zeros(LARGE // 8, dtype=torch.float64)
    clocks = [_there_and_back(small, other, leads=leads) for _ in range(MESSAGES)]
    times = [_there_and_back(large, other, leads=leads)[0] for _ in range(LARGES)]
    if not leads:
        return None
    fastest = min(clocks)
    return Pair(first, second, median(took for took, _ in clocks) / 2, 2 * LARGE / min(times), fastest[1])


def _there_and_back(tensor: torch.Tensor, other: int, *, leads: bool) -> tuple[float, float]:
    """Returns how long a message takes there and back, and how far the other's clock is ahead."""
    if not leads:
        dist.recv(tensor, other)
        tensor[0] = time.time()
        dist.send(tensor, other)
        return 0.0, 0.0
    sent, begun = time.time(), time.perf_counter()
    dist.send(tensor, other)
    dist.recv(tensor, other)
    took = time.perf_counter() - begun
    return took, float(tensor[0]) - (sent + took / 2)


def _shared(world: Any, folder: Path) -> dict[str, list[int]]:
    """Returns which ranks see a file that rank 0 has made, and which get a lock that rank 0 holds."""
    name = f".samestep-doctor-{all_gather_json(world.everyone, time.time_ns())[0]}"
    path = folder / name
    held = FileLock(path.with_name(name + ".lock"))
    writable = True
    if world.is_first:
        try:
            path.write_text(name, encoding="utf-8")
            held.acquire(timeout=TIMEOUT)
        except (OSError, Timeout):
            writable = False
    writable = all_gather_json(world.everyone, writable)[0]
    sees = writable and _comes(path, name)
    gets = sees and not world.is_first and _gets(path.with_name(name + ".lock"))
    seen = all_gather_json(world.everyone, [sees, gets])
    if world.is_first:
        held.release()
        for each in (path, path.with_name(name + ".lock")):
            each.unlink(missing_ok=True)
    see, get = ([rank for rank, one in enumerate(seen) if one[which]] for which in (0, 1))
    return {"see": see, "get": get}


def _comes(path: Path, text: str) -> bool:
    """Whether a file of another host is seen; network file systems take some seconds."""
    until = time.monotonic() + TIMEOUT
    while True:
        try:
            return path.read_text(encoding="utf-8") == text
        except OSError:
            if time.monotonic() > until:
                return False
            time.sleep(0.1)


def _gets(path: Path) -> bool:
    try:
        with FileLock(path, timeout=0):
            return True
    except (OSError, Timeout):
        return False


if __name__ == "__main__":
    main()
