"""Starts a command on other hosts over ssh, pdsh or clush, hands it one line, and says in words why that failed.

The line goes by standard input: every user can read a command line, and sshd passes no variables on. The input then
stays open, and the command must end with it: ssh, clush and pdsh that are killed leave the command running.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep._version import __version__
from samestep.errors import UsageError
from samestep.rankenv import child_environment, set_variables, variable

VIAS = ("ssh", "pdsh", "clush")
CONNECT_S = 4  # seconds for a host to answer; the first of two equal ssh options counts, so a user's own wins
SSH_OPTIONS = ("-T", "-x", "-a", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}")
JOIN_INFO = "SAMESTEP_GREETING"
MOST_JOIN_INFO = 1 << 15  # bytes that a pipe takes without a reader
PACKAGES = {"ssh": "openssh-client", "pdsh": "pdsh", "clush": "clustershell"}  # what apt calls them


@dataclass(frozen=True, kw_only=True)
class Start:
    via: str
    hosts: tuple[str, ...]
    argv: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(self.argv)


@dataclass(frozen=True)
class OutputLine:
    """A line of a transport: of which host, and its exit code if that is what the line says."""

    host: str | None
    text: str
    exit_code: int | None = None


class Started:
    """A running transport; the caller must read its standard output and error, which are pipes.

    Closing the standard input of `process`, or ending it in any way, ends the input of the command on every host.
    """

    def __init__(self, start: Start, process: subprocess.Popen[bytes]) -> None:
        self.start = start
        self.process = process

    def parse_line(self, line: bytes) -> OutputLine:
        return attribute(self.start, line.decode(errors="replace").rstrip("\r\n"))

    def release(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def end(self) -> int:
        """Kills the transport if it still runs, closes all pipes and returns its exit code, negative for a signal."""
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return self.process.wait()


def agent_command(python: str | None = None) -> list[str]:
    """Returns the command that starts an agent; `python` is the interpreter there, this one's path by default.

    The path is absolute because sshd gives a command a PATH that knows no virtual environment.
    """
    return [python or sys.executable, "-P", "-m", "samestep.launch.agent"]


def plan(via: str, hosts: Sequence[str], command: Sequence[str], ssh_args: str = "") -> list[Start]:
    """Returns what must be started here for `command` to run on every host; starts nothing.

    `hosts` are names as ssh takes them, none twice (samestep.launch.hosts.hostlist sees to it); `command` is for a
    POSIX shell on the other side, and quoted here; `ssh_args` are more options, as one would type them.
    """
    options = (*_split(ssh_args), *SSH_OPTIONS)
    match via:
        case "ssh":
            return [_ssh(host, command, options) for host in hosts]
        case "pdsh":
            return _pdsh(hosts, command, options)
        case "clush":
            return [_clush(hosts, command, options)]
        case _:
            raise UsageError(
                f"hosts are reached over {', '.join(VIAS[:-1])} or {VIAS[-1]}, and {via!r} is none of them"
            )


def _split(ssh_args: str) -> list[str]:
    try:
        return shlex.split(ssh_args)
    except ValueError as error:
        raise UsageError(f"the options for ssh, {ssh_args!r}, cannot be read: {error}") from None


def _ssh(host: str, command: Sequence[str], options: Sequence[str]) -> Start:
    return Start(via="ssh", hosts=(host,), argv=("ssh", *options, "--", host, shlex.join(command)))


def _pdsh(hosts: Sequence[str], command: Sequence[str], options: Sequence[str]) -> list[Start]:
    """Returns one pdsh for each user: given `user@` for some hosts, it would replace ssh's own choice for the rest.

    pdsh does not read its input, so its `exec` module runs a feeder here for each host (:func:`feed`), which starts
    ssh. By default pdsh starts 32 commands at a time, clush 64, and the others wait for their end: -f is always given.
    """
    theirs = tuple(_split(variable("PDSH_SSH_ARGS_APPEND") or ""))  # what a user of pdsh has set for its ssh
    # env: pdsh cuts the path off argv[0], by which python finds its virtual environment
    feeder = ("env", sys.executable, "-P", "-m", "samestep.launch.hosts.transport")
    starts = []
    for user in dict.fromkeys(host.rpartition("@")[0] for host in hosts):
        group = tuple(host for host in hosts if host.rpartition("@")[0] == user)
        names = ",".join(host.rpartition("@")[2] for host in group)
        head = _escaped([*feeder, "ssh", *options, *theirs, "--"])
        target = (f"{user}@%h" if user else "%h", *_escaped([shlex.join(command)]))
        argv = ("pdsh", "-S", "-f", str(len(group)), "-R", "exec", "-w", names, *head, *target)
        starts.append(Start(via="pdsh", hosts=group, argv=argv))
    return starts


def _escaped(words: Sequence[str]) -> tuple[str, ...]:
    """Returns arguments of pdsh's exec module, which reads %h, %u and %n."""
    return tuple(word.replace("%", "%%") for word in words)


def _clush(hosts: Sequence[str], command: Sequence[str], options: Sequence[str]) -> Start:
    settings = ("-S", "-R", "ssh", "-f", str(len(hosts)), "-t", str(CONNECT_S), "--color=never")
    program = program_named("clush") or "clush"
    argv = (program, *settings, "-w", ",".join(hosts), "-o", shlex.join(options), shlex.join(command))
    return Start(via="clush", hosts=tuple(hosts), argv=argv)


def program_named(name: str) -> str | None:
    """Returns where a program is; pip puts clush beside python, and that folder need not be on PATH."""
    beside = Path(sys.executable).parent / name
    return str(beside) if name == "clush" and beside.exists() else shutil.which(name)


def check_installed(via: str) -> None:
    """Raises UsageError where a program that `via` needs is not installed on this machine."""
    for name in dict.fromkeys((via, "ssh")):
        if program_named(name) is None:
            pip = " or `pip install ClusterShell`" if name == "clush" else ""
            others = "" if name == "ssh" else "; or reach the hosts with --via ssh"
            raise UsageError(f"{name} is not installed here: `apt-get install {PACKAGES[name]}`{pip}{others}")


def start(starts: Sequence[Start], info: str) -> list[Started]:
    """Starts all of it and hands every host one line; the caller reads the pipes.

    The command finds `info` on its standard input; it is never on a command line.
    """
    line = info.encode() + b"\n"
    if b"\n" in line[:-1] or b"\0" in line or len(line) > MOST_JOIN_INFO:
        raise ValueError(f"the info is one line of at most {MOST_JOIN_INFO} bytes")
    for via in dict.fromkeys(start.via for start in starts):
        check_installed(via)
    started: list[Started] = []
    try:
        started.extend(_start(one, info, line) for one in starts)  # keeps those before one that fails
    except BaseException:
        for other in started:
            other.end()
        raise
    return started


def _start(start: Start, info: str, line: bytes) -> Started:
    fed = start.via == "pdsh"
    process = subprocess.Popen(
        start.argv,
        env=child_environment({JOIN_INFO: info if fed else None}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,  # a selector sees what is in the pipe, not what Python has read ahead
        start_new_session=True,  # the keyboard's signals are the controller's
    )
    assert process.stdin is not None
    if not fed:
        with contextlib.suppress(BrokenPipeError):  # it has ended already, and its exit code will be asked for
            process.stdin.write(line)
    return Started(start, process)


def feed(argv: Sequence[str]) -> int:
    """Runs ssh for one host of pdsh with the info on its input, and returns its exit code.

        caller -> pipe -> pdsh          pdsh -> socket -> feeder -> pipe -> ssh

    The pipe that is pdsh's own input is opened by its name under /proc, to see the caller end; pdsh ignores it.
    """
    info = (variable(JOIN_INFO) or "").encode() + b"\n"
    set_variables({JOIN_INFO: None})
    ssh = subprocess.Popen(argv, stdin=subprocess.PIPE, bufsize=0)
    assert ssh.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        ssh.stdin.write(info)
    poller = select.poll()
    poller.register(os.pidfd_open(ssh.pid), select.POLLIN)
    poller.register(sys.stdin.fileno(), select.POLLIN)
    if not _watch_input_of(os.getppid(), poller):
        poller.poll()
    ssh.stdin.close()
    code = ssh.wait()
    return code if code >= 0 else 128 - code


def _watch_input_of(parent: int, poller: select.poll) -> bool:
    """Adds the standard input of pdsh to `poller`; returns whether it has ended already, which poll does not report."""
    try:
        pipe = os.open(f"/proc/{parent}/fd/0", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:  # not a pipe: then there is no end to see
        return False
    try:
        ended = os.read(pipe, 1) == b""
    except OSError:  # BlockingIOError: the other end is open
        ended = False
    poller.register(pipe, 0)  # POLLHUP comes unasked
    return ended


# --- what they say -----------------------------------------------------------------------------

_REPORTS = (  # on standard error, by pdsh and clush themselves
    re.compile(r"pdsh@\S+: (?P<host>\S+): .* exited with exit code (?P<code>\d+)"),
    re.compile(r"pdsh@\S+: (?P<host>\S+): .* killed by signal (?P<signal>\d+)"),
    re.compile(r"clush: (?P<host>\S+): exited with exit code (?P<code>\d+)"),
    re.compile(r"clush: (?P<host>\S+): killed by signal (?P<signal>\d+)"),
)


def attribute(start: Start, line: str) -> OutputLine:
    """Returns of which host a line of `start` is, without the name that pdsh and clush put before it."""
    if start.via == "ssh":
        return OutputLine(start.hosts[0], line)
    for report in _REPORTS:
        if match := report.fullmatch(line):
            found = match.groupdict()
            code = int(found["code"]) if found.get("code") else 128 + int(found["signal"])
            return OutputLine(_host_of(start, match["host"]), line, code)
    label, colon, text = line.partition(": ")
    if not colon and line.endswith(":"):  # an empty line, its space stripped
        label, text = line[:-1], ""
    host = _host_of(start, label)
    return OutputLine(None, line) if host is None else OutputLine(host, text)


def _host_of(start: Start, label: str) -> str | None:
    """Returns the host that a label means; pdsh leaves the domain out where that does no harm."""
    if label in start.hosts:
        return label
    names = {host: host.rpartition("@")[2] for host in start.hosts}
    matches = [host for host, name in names.items() if label in {name, name.partition(".")[0]}]
    return matches[0] if len(matches) == 1 else None


# --- why it failed -----------------------------------------------------------------------------

_REASONS = {  # what ssh, a shell or python says, and what that means; the first that is found
    r"REMOTE HOST IDENTIFICATION HAS CHANGED": (
        "its key is not the one that ~/.ssh/known_hosts remembers; if it was installed anew, forget the old one with "
        "`ssh-keygen -R {machine}`"
    ),
    r"Host key verification failed": (
        "its key is not known here; connect once with `ssh {host}` and accept it, or pass "
        "--ssh-args '-o StrictHostKeyChecking=accept-new'"
    ),
    r"Could not resolve hostname": (
        "its name is unknown; look for a typing error, or add it to ~/.ssh/config, /etc/hosts or DNS"
    ),
    r"Connection refused": "nothing listens there; start sshd on it, or give its port with --ssh-args '-p PORT'",
    r"timed out|No route to host|Network is unreachable": (
        "it does not answer; see that it is up and no firewall is between, with `ssh {host} true`"
    ),
    r"Permission denied \(|Too many authentication failures": (
        "it does not accept your key; put it there with `ssh-copy-id {host}`, or name another with "
        "--ssh-args '-i KEYFILE' (passwords are not asked for)"
    ),
    r"kex_exchange_identification|banner exchange|Connection (closed|reset) by": (
        "it hangs up before any login; look for too many connections at once (MaxStartups in its sshd_config) and for "
        "access rules"
    ),
    r"Bad configuration option|Can't open user config file": "ssh does not understand its options: {last}",
    r"No module named '?samestep[.\w]+": (
        "its samestep is of another version; {copy}run `{python} -m pip install --upgrade {source}` there"
    ),
    r"No module named '?samestep": ("samestep is missing there; {copy}run `{python} -m pip install {source}` there"),
    r"No such rcmd module": "the pdsh here lacks its `exec` module; install pdsh-rcmd-exec, or use --via ssh",
}


def explain(host: str, transport: str, exit_code: int | None, stderr: str, python: str | None = None) -> str:
    """Returns one line that says why a host could not be used, and what fixes it.

    `stderr` is what came from that host, without labels; `python` the interpreter that was to run there.
    """
    words = {"host": host, "machine": host.rpartition("@")[2], "python": python or sys.executable}
    source = shlex.quote(_source())
    words |= {"last": _last_line(stderr), "source": source}
    words["copy"] = f"copy {source} to it and " if "/" in source and "://" not in source else ""
    for pattern, reason in _REASONS.items():
        if re.search(pattern, stderr):
            return f"host {host}: {reason.format_map(words)}"
    return f"host {host}: {_explain_code(exit_code, transport, words)}"


def _source() -> str:
    """Returns what samestep was installed from here, as pip takes it: a copy of its repository, a wheel, an address."""
    from importlib.metadata import PackageNotFoundError, distribution  # 12 ms, and hardly ever needed

    try:
        origin = distribution("samestep").read_text("direct_url.json")
    except PackageNotFoundError:
        return str(Path(__file__).parents[4])  # run from its repository
    return f"samestep=={__version__}" if origin is None else str(json.loads(origin)["url"]).removeprefix("file://")


def _explain_code(code: int | None, transport: str, words: dict[str, str]) -> str:
    last = f": {words['last']}" if words["last"] else ", without a word"
    if code == 127:  # a shell's "not found", whatever its language
        return f"there is no {words['python']} on it; name the interpreter there with --remote-python PATH"
    if code == 126:
        return f"{words['python']} cannot be executed there{last}; name another with --remote-python PATH"
    if code == 255:
        return f"{transport} could not connect{last}; try `ssh {words['host']} true`"
    if code is None:
        return f"{transport} ended early{last}"
    return f"the command ended there with exit code {code}{last}"


def _last_line(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    weighty = [line for line in lines if not re.match(r"Warning: |\*\* ", line)]
    return (weighty or lines or [""])[-1]


if __name__ == "__main__":
    sys.exit(feed(sys.argv[1:]))
