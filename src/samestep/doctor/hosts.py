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
from typing import Any

from samestep.doctor.finding import Finding, from_remote
from samestep.doctor.fixes import samestep
from samestep.doctor.link_findings import judge
from samestep.doctor.pairwise import MARK
from samestep.doctor.trial import read_failure
from samestep.launch.hosts.transport import Started, explain, plan, start
from samestep.rankenv import fresh_environment

__all__: list[str] = []

TIMEOUT = 90.0  # seconds for a busy host to look at itself
MEASURING_TIMEOUT = 120.0  # seconds for all to meet, and to be measured
THERE = 'cd "$1" 2>/dev/null; shift; exec "$@"'  # as `samestep run` starts ranks: in the folder of the same name


@dataclass(frozen=True, kw_only=True)
class HostList:
    """Hosts, and how they are reached."""

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
