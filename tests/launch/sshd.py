"""A private sshd on the loopback network, reached under several host names: several hosts on one machine.

    with private_sshd(tmp_path) as server:                 # skips the test, with the reason, where it cannot be had
        samestep run --hosts node1,node2 --ssh-args server.ssh_args …

    node1, node2, node3 -> 127.0.0.1, 127.0.0.2, 127.0.0.3, one port, one sshd, the user who runs the tests

`Talk` runs transports and takes apart what they say; `family` and `have_ended` watch processes to their end.
Keys, configuration and log lie in the given folder; ~/.ssh and the system's own sshd are not touched.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import selectors
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ports import free_port
from samestep.launch.hosts.transport import start

SERVER = """\
Port {port}
{addresses}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
UseDNS no
PrintMotd no
MaxStartups 100
AcceptEnv SAMESTEP_*
SetEnv SHLVL=1
"""  # bash, if it believes that another has started it, reads no ~/.bashrc
PATIENCE = 60  # seconds for what takes a tenth of one on a quiet machine
ATTEMPTS = 20  # ports to try: another process may take one between our look and sshd's


class Sshd:
    """A running sshd.

    Attributes:
        names: the hosts that it plays.
        port: where it listens, on the address of each host.
        config: a configuration file for ssh that knows these names.
        ssh_args: what `--ssh-args` must be.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder = folder
        self.names = tuple(names)
        self.config = folder / "ssh_config"
        self.ssh_args = f"-F {self.config}"
        self._addresses = {name: f"127.0.0.{number}" for number, name in enumerate(names, start=1)}
        self._process: subprocess.Popen[str] | None = None
        self._logger: subprocess.Popen[bytes] | None = None
        for key in ("host_key", "user_key", "other_key"):
            _keygen(folder / key)
        shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
        self._start()
        self.config.touch()
        for name in names:
            self.alias(name)

    def address(self, name: str) -> str:
        """Returns the address of a host."""
        return self._addresses[name]

    def alias(self, name: str, **options: str | int | Path) -> str:
        """Adds a name to the ssh configuration, or replaces what it means; returns it.

        Args:
            name: of one of the hosts, or a new one, which is then the first host under another name.
            options: ssh's own, which replace those that lead to this server: `Port=9`, `HostName="x.invalid"`,
                `IdentityFile=server.other_key`, `StrictHostKeyChecking="yes"`.
        """
        usual = {
            "HostName": self._addresses.get(name, "127.0.0.1"),
            "Port": self.port,
            "User": getpass.getuser(),
            "IdentityFile": self.folder / "user_key",
            "IdentitiesOnly": "yes",
            "IdentityAgent": "none",
            "StrictHostKeyChecking": "no",
            "UserKnownHostsFile": "/dev/null",
            "GlobalKnownHostsFile": "/dev/null",
            "LogLevel": "ERROR",
        }
        lines = [f"Host {name}", *(f"  {key} {value}" for key, value in (usual | options).items())]
        self.config.write_text("\n".join(lines) + "\n" + self.config.read_text())  # ssh takes the first it finds
        return name

    @property
    def other_key(self) -> Path:
        """A user's key that the server does not accept."""
        return self.folder / "other_key"

    @property
    def host_key(self) -> str:
        """The server's public key, type and value, as known_hosts has it."""
        return " ".join((self.folder / "host_key.pub").read_text().split()[:2])

    @property
    def log(self) -> str:
        """What the server has said so far."""
        return (self.folder / "sshd.log").read_text()

    def sessions(self) -> list[int]:
        """Returns the processes that serve a connection or were started through one and have not left it."""
        assert self._process is not None
        return _descendants(self._process.pid)

    def _start(self) -> None:
        for _ in range(ATTEMPTS):
            self.port = free_port()
            addresses = "\n".join(f"ListenAddress {address}" for address in self._addresses.values())
            text = SERVER.format(port=self.port, addresses=addresses, folder=self.folder)
            (self.folder / "sshd_config").write_text(text)
            if self._listens(len(self._addresses)):
                return
            self.stop()
            if "Address already in use" not in self.log:
                break
        pytest.skip("sshd does not start here: " + (self.log.strip().splitlines() or ["without a word"])[-1])

    def _listens(self, count: int) -> bool:
        """Starts sshd; returns whether it listens on all `count` addresses. Its own words are the sign."""
        command = [_program(), "-f", str(self.folder / "sshd_config"), "-D", "-e"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, bufsize=1
        )
        assert self._process.stderr is not None
        with (self.folder / "sshd.log").open("w") as log, self._process.stderr as said:
            for line in said:
                log.write(line)
                count -= line.startswith("Server listening on")
                if not count or "in use" in line:
                    break
            log.flush()
            if not count:  # from here on `cat` writes the log, until no sshd is left
                self._logger = subprocess.Popen(["cat"], stdin=said, stdout=log)
        return not count

    def stop(self) -> None:
        """Ends the server and every session, by number."""
        if self._process is None:
            return
        for pid in [*self.sessions(), self._process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        if self._logger is not None:
            self._logger.kill()
            self._logger.wait()
        self._process = self._logger = None


def _keygen(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path)], check=True)


def _program() -> str:
    """Returns sshd's absolute path, which it insists on."""
    return shutil.which("sshd") or "/usr/sbin/sshd"


def _descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [*_descendants(child), child]
    return found


@contextlib.contextmanager
def private_sshd(folder: Path, names: Sequence[str] = ("node1", "node2", "node3")) -> Iterator[Sshd]:
    """Starts a server in `folder` and ends it, with all sessions; skips the test where that cannot be."""
    for program in ("ssh", "ssh-keygen", _program()):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (apt-get install openssh-server openssh-client)")
    if os.geteuid() == 0:  # sshd insists on this folder when root starts it
        try:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        except OSError as error:
            pytest.skip(f"sshd needs /run/sshd, which cannot be made: {error}")
    server = Sshd(folder, names)
    try:
        login = ["ssh", "-F", str(server.config), "-o", "BatchMode=yes", names[0], "true"]
        done = subprocess.run(login, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, check=False)
        if done.returncode:
            pytest.skip(f"nobody can log in to an own sshd here: {done.stderr.strip()} ({server.log.strip()[-200:]})")
        yield server
    finally:
        server.stop()


class Talk:
    """Transports that run, and what they have said so far; a context manager that leaves nothing behind."""

    def __init__(self, starts, greeting="hello"):
        self.said = {"out": [], "err": []}
        self.selector = selectors.DefaultSelector()
        self.started = start(starts, greeting)
        for one in self.started:
            for stream in ("out", "err"):
                pipe = getattr(one.process, f"std{stream}")
                self.selector.register(pipe, selectors.EVENT_READ, (one, stream, bytearray()))

    def until(self, heard):
        """Reads on until `heard()`; fails where everything ends before."""
        while not heard():
            assert self.selector.get_map(), self.said
            self._read()

    def end(self):
        """Reads to the end of all pipes; returns the exit code of every host."""
        while self.selector.get_map():
            self._read()
        codes = {said.host: said.exit_code for said in self.said["err"] if said.exit_code is not None}
        for one in self.started:
            code = one.process.wait(PATIENCE)
            usual = code if one.start.via == "ssh" else 0  # the others report what is not 0
            codes |= {host: codes.get(host, usual) for host in one.start.hosts}
        return codes

    def _read(self):
        events = self.selector.select(PATIENCE)
        assert events, f"nothing more within {PATIENCE} s after {self.said}"
        for key, _ in events:
            one, stream, held = key.data
            data = os.read(key.fd, 65536)
            held += data
            *lines, held[:] = held.split(b"\n") if data else [*held.split(b"\n"), b""]
            self.said[stream] += [one.parse_line(bytes(line)) for line in lines if line or data]
            if not data:
                self.selector.unregister(key.fileobj)

    def lines(self, host, stream="out"):
        return [said.text for said in self.said[stream] if said.host == host and said.exit_code is None]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.selector.close()
        for one in self.started:
            one.end()


def handles(pids):
    """Returns handles, which do not follow a reused number, of those processes that still are."""
    found = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            found.append(os.pidfd_open(int(pid)))
    return found


def family(pid):
    """Returns handles of a process and all that it has started."""
    found = handles([pid])
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += family(int(child))
    return found


def have_ended(opened):
    """Waits until processes have ended, by their handles, and closes these."""
    with selectors.DefaultSelector() as selector:
        for handle in opened:
            selector.register(handle, selectors.EVENT_READ)
        while selector.get_map():
            events = selector.select(PATIENCE)
            assert events, f"{len(selector.get_map())} processes still run after {PATIENCE} s"
            for key, _ in events:
                selector.unregister(key.fd)
                os.close(key.fd)
    return True
