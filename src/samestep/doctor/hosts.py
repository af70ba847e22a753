"""Several hosts: each looks at itself, then they are measured against each other.

    1  over ssh, pdsh or clush    samestep doctor --json -                     on every host, whatever lies between them
    2  `samestep run --hosts`     samestep.doctor.pairwise, a rank on each      if they can run anything together

The first needs no network between the hosts, so that of a broken one all else is known; what the second cannot do is
said in the launcher's own line.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from samestep.doctor.finding import Finding, as_root, from_remote, ok, samestep
from samestep.doctor.pairwise import MARK
from samestep.doctor.trial import read_failure
from samestep.launch.hosts.transport import Started, explain, plan, start
from samestep.rankenv import fresh_environment
from samestep.text import format_bytes, format_duration, plural

TIMEOUT = 90.0  # seconds for a busy host to look at itself
MEASURING_TIMEOUT = 120.0  # seconds for all to meet, and to be measured
THERE = 'cd "$1" 2>/dev/null; shift; exec "$@"'  # as `samestep run` starts ranks: in the folder of the same name
SLOW = 0.5  # of the median bandwidth
LATE = 3.0  # times the median latency
NARROW = 125e6  # bytes a second: 1 Gbit/s
SKEW = 1.0  # seconds
SHARED = "findmnt -t nfs,nfs4,lustre,beegfs,ceph,gpfs,fuse.glusterfs  # cd to a folder that all mount"


@dataclass(frozen=True, kw_only=True)
class HostList:
    hosts: tuple[str, ...]
    via: str = "ssh"
    ssh_args: str = ""
    python: str | None = None
    interface: str | None = None


@dataclass
class _Answer:
    code: int | None = None
    out: list[str] = field(default_factory=list)
    err: list[str] = field(default_factory=list)


def check_hosts(named: HostList) -> list[Finding]:
    lines = list(_each(named))
    unreached = {line.host for line in lines if line.check == "host"}
    if unreached:
        text = f"not measured, for want of {', '.join(sorted(unreached))}"
        rest = ",".join(host for host in named.hosts if host not in unreached)
        fix = f"{samestep()} doctor {shlex.join(['--hosts', rest, *_reached_by(named)])}  # the others" if rest else ""
        effect = "a run on these hosts does not start"
        return [*lines, Finding("between hosts", "error", text, effect, fix or "fix what is said of each host")]
    return [*lines, *_between(named)]


def _each(named: HostList) -> Iterator[Finding]:
    words = [named.python or sys.executable, "-P", "-m", "samestep", "doctor", "--json", "-"]
    command = ["/bin/sh", "-c", THERE, "sh", str(Path.cwd()), *words]
    started = start(plan(named.via, named.hosts, command, named.ssh_args), "")
    answers = {host: _Answer() for host in named.hosts}
    with ThreadPoolExecutor(len(started)) as pool:
        list(pool.map(lambda one: _hear(one, answers), started))
    for host, answer in answers.items():
        found = _parsed(answer.out)
        if found is None:
            text = explain(host, named.via, answer.code, "\n".join(answer.err), named.python)
            text = text.removeprefix(f"host {host}: ")  # which the finding names itself
            fix = f"ssh {named.ssh_args} {shlex.quote(host)} true".replace("  ", " ")
            yield Finding("host", "error", text, "no rank can be started there", fix, host)
        else:
            yield from from_remote(host, found)


def _hear(one: Started, answers: dict[str, _Answer]) -> None:
    try:
        out, err = one.process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        out, err = b"", f"did not answer within {TIMEOUT:.0f} s".encode()
    finally:
        code = one.end()
    for stream, raw in (("out", out), ("err", err)):
        for line in raw.splitlines():
            said = one.parse_line(line)
            for host in [said.host] if said.host else one.start.hosts:
                getattr(answers[host], stream).append(said.text)
                answers[host].code = said.exit_code if said.exit_code is not None else answers[host].code
    if one.start.via == "ssh":
        answers[one.start.hosts[0]].code = code


def _parsed(out: Sequence[str]) -> dict[str, Any] | None:
    """Returns what a doctor has said, whatever the account's shell has said before it."""
    for line in reversed(out):
        if line.startswith('{"v": '):
            with contextlib.suppress(ValueError, RecursionError):
                known: dict[str, Any] = json.loads(line)
                return known
    return None


def _between(named: HostList) -> Iterator[Finding]:
    """Starts a rank on every host, and says what they have measured, or why they could not."""
    with tempfile.TemporaryDirectory(prefix="samestep-doctor-") as name:
        file = Path(name) / "run.json"
        words = [sys.executable, "-P", "-m", "samestep", "run", "--hosts", ",".join(named.hosts), "--via", named.via]
        words += [f"--ssh-args={named.ssh_args}", "-n", "1", "--no-events", "--run-dir", str(Path(name) / "run")]
        words += ["--json", str(file), *_optional(named), "-m", "samestep.doctor.pairwise"]
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, timeout=MEASURING_TIMEOUT, check=False, env=fresh_environment()
            )
        except subprocess.TimeoutExpired:
            yield _failed(named, f"did not end within {MEASURING_TIMEOUT:.0f} s")
            return
        found = [line.partition(MARK)[2] for line in done.stdout.splitlines() if MARK in line]
        if found:
            yield from judge(json.loads(found[0]))
        else:
            errors = [line for line in done.stderr.splitlines() if line.strip()]
            yield _failed(named, read_failure(file) or (errors[-1] if errors else f"ended with code {done.returncode}"))


def _optional(named: HostList) -> list[str]:
    given = {"--remote-python": named.python, "--interface": named.interface}
    return [word for option, value in given.items() if value is not None for word in (option, value)]


def _reached_by(named: HostList) -> list[str]:
    via = [] if named.via == "ssh" else ["--via", named.via]
    return [*via, *([f"--ssh-args={named.ssh_args}"] if named.ssh_args else []), *_optional(named)]


def _failed(named: HostList, why: str) -> Finding:
    words = ["--hosts", ",".join(named.hosts), *_reached_by(named), "-n", "1", "-m", "samestep.doctor.pairwise"]
    fix = f"{samestep()} run {shlex.join(words)}  # the same alone, with all that it says"
    return Finding("between hosts", "error", why.removeprefix("samestep: error: "), "a run on these hosts fails", fix)


# --- what is said of the way between hosts: who is slow, who is late, who sees whose files ------


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
            fix = f"tracepath {shlex.quote(hosts[pair['second']])}  # on the other"
            yield Finding("link", "warning", text, effect, fix)
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
