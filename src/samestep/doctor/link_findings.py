"""What is said of the way between hosts, from what was measured: who is slow, who is late, who sees whose files."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from samestep.doctor.finding import Finding, ok
from samestep.doctor.fixes import as_root, samestep
from samestep.text import format_bytes, format_duration, plural

__all__: list[str] = []

SLOW = 0.5  # of the median bandwidth
LATE = 3.0  # times the median latency
NARROW = 125e6  # bytes a second: 1 Gbit/s
SKEW = 1.0  # seconds
SHARED = "findmnt -t nfs,nfs4,lustre,beegfs,ceph,gpfs,fuse.glusterfs  # cd to a folder that all mount"


def judge(found: dict[str, Any]) -> Iterator[Finding]:
    """Yields lines of what :func:`samestep.doctor.pairwise.measure` has found."""
    hosts, pairs = found["hosts"], found["pairs"]
    yield from _links(hosts, pairs)
    yield from _matrix(hosts, pairs)
    yield from _names(hosts, found["unknown"], found["addresses"])
    yield from _clocks(hosts, pairs)
    yield _folder(hosts, found["shared"], found["folder"])


def _links(hosts: Sequence[str], pairs: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    if not pairs:
        return
    latency = median(pair["latency_s"] for pair in pairs)
    bandwidth = median(pair["bytes_per_s"] for pair in pairs)
    odd = False
    for pair in pairs:
        text = f"{_pair(hosts, pair)}: {_figures(pair)}"
        if len(pairs) > 1 and pair["bytes_per_s"] < SLOW * bandwidth:
            odd = True
            effect = f"every all-reduce waits for it: the others have {format_bytes(bandwidth)}/s"
            fix = "ip -s link  # errors and drops, on both; another network: --interface NAME"
            yield Finding("link", "warning", text, effect, fix)
        elif len(pairs) > 1 and pair["latency_s"] > LATE * latency:
            odd = True
            effect = f"small messages wait for it: the others take {format_duration(latency)}"
            yield Finding(
                "link", "warning", text, effect, f"tracepath {shlex.quote(hosts[pair['second']])}  # on the other"
            )
    text = f"{plural(len(pairs), 'pair')}, median {format_duration(latency)}, {format_bytes(bandwidth)}/s"
    if bandwidth < NARROW and not odd:
        effect = "a gradient of 100 MB takes more than a second"
        fix = f"{samestep()} bench compress  # whether samestep.replicate(…, compress='int8') pays"
        yield Finding("links", "note", text, effect, fix)
    else:
        yield ok("links", text)


def _matrix(hosts: Sequence[str], pairs: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Of more than two hosts a row for each: what lies between it and those behind it."""
    for rank, host in enumerate(hosts[:-1] if len(hosts) > 2 else ()):
        row = [pair for pair in pairs if pair["first"] == rank]
        cells = (f"{hosts[pair['second']]} {_figures(pair)}" for pair in sorted(row, key=lambda pair: pair["second"]))
        yield ok(f"from {host}", "; ".join(cells))


def _names(hosts: Sequence[str], unknown: Sequence[Sequence[int]], addresses: Sequence[str]) -> Iterator[Finding]:
    """Whether every host knows the others by their names: `unknown` are the ranks that a rank cannot look up."""
    for rank, others in enumerate(unknown):
        if others:
            text = f"{', '.join(hosts[other] for other in others)}: not known on {hosts[rank]}"
            effect = "torchrun, and scripts that are given the name, fail there; samestep run goes by addresses"
            known = ", ".join(f"{hosts[other]} is {addresses[other]}" for other in others)
            names = " ".join(hosts[other] for other in others)
            fix = f"getent hosts {names}  # on {hosts[rank]}; torchrun takes addresses too: {known}"
            yield Finding("names", "note", text, effect, fix)
    if not any(unknown):
        yield ok("names", "each host knows the others")


def _figures(pair: dict[str, Any]) -> str:
    return f"{format_duration(pair['latency_s'])}, {format_bytes(pair['bytes_per_s'])}/s"


def _pair(hosts: Sequence[str], pair: dict[str, Any]) -> str:
    first, second = pair["first"], pair["second"]
    named = [hosts[first], hosts[second]]
    return " - ".join(named if named[0] != named[1] else [f"rank {first}", f"rank {second}"])


def _clocks(hosts: Sequence[str], pairs: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Clocks are compared with the first host's."""
    offsets = {pair["second"]: pair["offset_s"] for pair in pairs if pair["first"] == 0}
    far = {rank: skew for rank, skew in offsets.items() if abs(skew) > SKEW}
    for rank, skew in far.items():
        way = "ahead of" if skew > 0 else "behind"
        text = f"that of {hosts[rank]} is {format_duration(abs(skew))} {way} that of {hosts[0]}"
        effect = "times in logs, events and file names do not fit together; make and caches go wrong"
        yield Finding("clock", "warning", text, effect, as_root("timedatectl set-ntp true") + f"  # on {hosts[rank]}")
    if offsets and not far:
        yield ok("clocks", f"at most {format_duration(max(map(abs, offsets.values())))} apart")


def _folder(hosts: Sequence[str], shared: dict[str, list[int]], folder: str) -> Finding:
    missing = [hosts[rank] for rank in range(len(hosts)) if rank not in shared["see"]]
    if missing and len(missing) >= len(hosts) - 1:
        effect = "checkpoints must lie on a shared folder for runs over several hosts; logs stay on each host"
        return Finding("shared folder", "note", f"{folder} is each host's own", effect, SHARED)
    if missing:
        effect = "a run cannot be resumed there"
        return Finding("shared folder", "warning", f"{folder} is not seen by {', '.join(missing)}", effect, SHARED)
    if shared["get"]:
        names = ", ".join(hosts[rank] for rank in shared["get"])
        effect = "samestep.once downloads once a host, and two runs may write one checkpoint"
        fix = f"findmnt -T {shlex.quote(folder)} -o TARGET,FSTYPE,OPTIONS  # NFS: mount it without nolock"
        return Finding("shared folder", "warning", f"locks in {folder} do not keep out {names}", effect, fix)
    return ok("shared folder", f"{folder}, seen by all; locks hold")
