"""`samestep doctor`: would training work here, and what would be slow?"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from samestep.cli.checks import check_outputs, write_json
from samestep.cli.options import Parser
from samestep.doctor.finding import Finding, worst_level
from samestep.errors import RankVariablesError, UsageError
from samestep.rankenv import RankVariables, read_rank_variables
from samestep.text import escape_control

DESCRIPTION = """Looks at this machine, or at several, as a training would find them: versions that do not fit, GPUs in
use, cores and memory, /dev/shm, limits, the disk, names and networks, variables that surprise; and two
ranks take a real step of DistributedDataParallel over every backend. Each line is ok, or says what is
wrong, what that will cause, and the command that fixes it. On a terminal, lines that are ok are counted.
It changes nothing, and takes some seconds.

Between hosts: every pair's latency and bandwidth, clocks, and whether a folder is shared and locks hold."""

EXAMPLES = """examples:
  samestep doctor                               this machine
  samestep doctor --hosts node1,node2           these, over ssh, and what lies between them
  samestep doctor --hostfile hosts.txt --via pdsh
  srun --nodes 2 --ntasks-per-node 1 samestep doctor        inside a job of Slurm
  mpiexec -n 2 samestep doctor                  as mpiexec starts ranks
  samestep doctor --json doctor.json            for programs; - is standard output
  samestep doctor --all                         on a terminal, also what is ok
  samestep doctor --wrong                       in a file or pipe, only what is not ok

exit code: 1 when training would fail, else 0; 2 for a usage error."""

FORMAT = 2  # of --json
WORDS = {"ok": "ok", "note": "note", "warning": "WARNING", "error": "ERROR"}
COLOURS = {"ok": "32", "note": "36", "warning": "33;1", "error": "31;1"}
STANDARD = "-"
CHECK_WIDTH, INDENT = 20, 11  # characters of the name of a check; before what follows from it
NARROWEST = 30  # letters in a line


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    options = _parser().parse(arguments)
    if options.all and options.wrong:
        raise UsageError("--all and --wrong exclude each other: give one of them")
    if str(options.json) != STANDARD:
        check_outputs(options, "json")
    lines, shows = _look(options)
    code = int(worst_level(lines) == "error")
    return _tell(lines, options, code) if shows else code


def _parser() -> Parser:
    parser = Parser("doctor", usage="samestep doctor [options]", description=DESCRIPTION, epilog=EXAMPLES)
    parser.verbatim = ("--ssh-args",)
    add = parser.add_argument
    add("--hosts", metavar="LIST", help="look there instead: a,b[3-9],user@c")
    add("--hostfile", metavar="FILE", type=Path, help="the same from a file, one host a line")
    add("--via", choices=("ssh", "pdsh", "clush"), help="how hosts are reached (default: ssh)")
    add("--ssh-args", metavar="TEXT", default="", help="more options for ssh: --ssh-args '-p 2222 -F config'")
    add("--remote-python", metavar="PATH", help="the interpreter there, if it is not where it is here")
    add("--interface", metavar="NAME", help="the network between the hosts; found by trying them if not given")
    add("--all", action="store_true", help="show every line (default, unless on a terminal)")
    add("--wrong", action="store_true", help="show only what is not ok (default on a terminal)")
    add("--json", metavar="FILE", type=Path, help="write all lines to this file; - is standard output")
    return parser


def _look(options: argparse.Namespace) -> tuple[list[Finding], bool]:
    """Returns what was found, and whether this process shows it."""
    if options.hosts is not None or options.hostfile is not None:
        return _hosts(options), True
    idle = [name for name in ("via", "ssh_args", "remote_python", "interface") if getattr(options, name)]
    if idle:
        option = "--" + idle[0].replace("_", "-")
        raise UsageError(f"{option} is about other hosts, and none is named: say --hosts or --hostfile as well")
    found = _launched()
    from samestep.doctor.checks import check_job, run_checks

    if found is not None and found.size > 1:
        return check_job(found, Path.cwd())
    lines = run_checks(Path.cwd(), _progress)
    _progress("")
    return lines, True


def _launched() -> RankVariables | None:
    try:
        return read_rank_variables()
    except RankVariablesError:
        return None  # a line says so


def _hosts(options: argparse.Namespace) -> list[Finding]:
    from samestep.cli.hosts import listed
    from samestep.doctor.hosts import HostList, check_hosts

    if options.hosts is not None and options.hostfile is not None:
        raise UsageError("--hosts and --hostfile both say which hosts: give one of them")
    _progress("hosts")
    found = check_hosts(
        HostList(
            hosts=tuple(host.name for host in listed(options)),
            via=options.via or "ssh",
            ssh_args=options.ssh_args,
            python=options.remote_python,
            interface=options.interface,
        )
    )
    _progress("")
    return found


def _progress(left: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{f'looking at {left} …'[:100] if left else ''}")
        sys.stderr.flush()


def _tell(lines: Sequence[Finding], options: argparse.Namespace, code: int) -> int:
    found = {"v": FORMAT, "verdict": "fails" if code else "works", "lines": [line.as_json() for line in lines]}
    if str(options.json) == STANDARD:
        print(json.dumps(found))
        return code
    here = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if here else None
    for line in shown(lines, wrong=options.wrong or (here and not options.all), coloured=here, width=width):
        print(line)
    return write_json(options.json, found, code)


def shown(lines: Sequence[Finding], *, wrong: bool, coloured: bool, width: int | None = None) -> list[str]:
    """Returns what a person reads: what several hosts have in common once, in lines of at most `width` letters."""
    hosts: dict[Finding, list[str]] = {}
    for line in lines:
        common = Finding(line.check, line.level, line.text, line.effect, line.fix)
        hosts.setdefault(common, []).append(line.host)
    everybody = len({line.host for line in lines if line.host})
    hidden = [line for line in hosts if wrong and line.level == "ok"]
    found: list[str] = []
    for line, named in hosts.items():
        if line not in hidden:
            found += _lines(line, _where(named, everybody), coloured=coloured, width=width)
    if hidden:
        others = f"{len(hidden)} other" if found else f"all {len(hidden)}"
        found += _lines(Finding(f"{others} checks", "ok", "(--all shows them)"), "", coloured=coloured, width=width)
    return [*found, "", verdict([*hosts])]  # a line of several hosts counts once


def _where(named: Sequence[str], everybody: int) -> str:
    names = list(dict.fromkeys(name for name in named if name))
    if not names or everybody < 2:
        return ""
    return "all hosts: " if len(names) == everybody else f"{', '.join(names)}: "


def _lines(line: Finding, where: str, *, coloured: bool, width: int | None) -> list[str]:
    word = f"{WORDS[line.level]:<8}"
    head = f"{word} {escape_control(line.check):<{CHECK_WIDTH}} "
    rows = _wrapped(f"{head}{escape_control(where)}{escape_control(line.text)}", len(head), width)
    if line.level != "ok":
        for name, text in (("causes", line.effect), ("fix", line.fix)):
            label = f"{'':<{INDENT}}{name + ':':<8}"
            rows += _wrapped(label + escape_control(text), len(label), width) if text else []
    if coloured:
        rows[0] = f"\x1b[{COLOURS[line.level]}m{word}\x1b[0m{rows[0][len(word) :]}"
    return rows


def _wrapped(text: str, indent: int, width: int | None) -> list[str]:
    if width is None:
        return [text.rstrip()]
    room = max(width, indent + NARROWEST)
    return textwrap.wrap(text, room, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def verdict(lines: Sequence[Finding]) -> str:
    """Returns the last line.

    >>> verdict([Finding("disk", "warning", "slow")])
    'training would work: 1 warning'
    """
    counts = {level: sum(line.level == level for line in lines) for level in ("error", "warning", "note")}
    found = ", ".join(f"{count} {level}{'s' * (count > 1)}" for level, count in counts.items() if count)
    works = "training would fail" if counts["error"] else "training would work"
    return f"{works}: {found or 'everything is ok'}"
