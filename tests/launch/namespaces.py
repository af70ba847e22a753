"""Hosts as network namespaces: an address, a host name and an sshd of its own each, joined by a bridge.

    with hosts(folder, 2) as lab:            # skips the test, with the reason, where that cannot be had
        lab.reached                          # the options that lead there over ssh; the names are lab.names
        lab.start("node1", [...])            # a process in its network; `run` waits for it
        lab.partition(lab.names[1])          # its cable is pulled: no packet, no reset; `heal` puts it back
        lab.separate("node1", "node2")       # these two no longer hear each other, everybody else does
        lab.limit("node1", "1gbit")          # what it sends goes no faster

                 bridge 10.K.N.254
                 /               \\
        node1 10.K.N.1        node2 10.K.N.2

Samestep's own processes there are forked by the session's fork server: see in_namespaces.py and remote_python.py.

All of it bears a number made from this process's, so that two runs of the tests do not meet, and is gone afterwards.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from samestep.launch.hosts.network import addresses

SERVER = """\
Port 22
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
UseDNS no
MaxStartups 100
SetEnv SHLVL=1
"""  # bash, if it believes that another has started it, reads no ~/.bashrc


HERE = Path(__file__).parent

_built = itertools.count()


def _network(number: int) -> str:
    return f"10.{77 + number // 250 % 50}.{number % 250}"


def _free_number() -> int:
    """Returns a number whose network nobody has here; several labs of one process differ too."""
    taken = {interface.address.rpartition(".")[0] for interface in addresses()}
    numbers = (os.getpid() + 10007 * built for built in _built)
    return next(number for number in numbers if _network(number) not in taken)


class RemotePython:
    """An interpreter for the hosts, `path`, whose modules of samestep are forked where the tests run."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "python"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(folder / "forks"))
        self._listener.listen(64)
        words = f"{sys.executable} -I -S {HERE / 'remote_python.py'} {folder / 'forks'}"
        self.path.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        self.path.chmod(0o755)
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # the listener was shut down
            while True:
                asked, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._run, args=(asked,)))
                self._threads[-1].start()

    def _run(self, asked: socket.socket) -> None:
        with asked:
            text, streams, _, _ = socket.recv_fds(asked, 1 << 20, 3)
            if len(streams) != 3:
                return  # it was killed before
            about = json.loads(text)
            words = [sys.executable, str(HERE / "in_namespaces.py"), ",".join(about["namespaces"]), *about["arguments"]]
            names = ("stdin", "stdout", "stderr")
            process = subprocess.Popen(
                words, env=about["environment"], cwd=about["folder"], **dict(zip(names, streams, strict=True))
            )
            for stream in streams:
                os.close(stream)
            code = process.wait()
            with contextlib.suppress(OSError):
                asked.send(str(code).encode())

    def close(self) -> None:
        """Ends the service; all that it has started must have ended."""
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()


class Lab:
    """Hosts that run. `names` are theirs, `bridge` is this machine's address among them."""

    def __init__(self, folder: Path, count: int) -> None:
        number = _free_number()
        self.folder = folder
        self.names = [f"node{index}" for index in range(1, count + 1)]
        self.network = _network(number)
        self.bridge = f"{self.network}.254"
        self.ssh_args = f"-F {folder / 'ssh_config'}"
        self._tag = f"s{number % 10**9}"
        self.python: Path | None = None
        self._remote: RemotePython | None = None
        self._servers: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def reached(self) -> list[str]:
        """The options of a run that lead to the hosts."""
        return ["--ssh-args", self.ssh_args, "--remote-python", str(self.python)]

    def address(self, name: str) -> str:
        return f"{self.network}.{self.names.index(name) + 1}"

    def namespace(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def build(self, *, servers: bool) -> None:
        _ip("link", "add", f"{self._tag}b", "type", "bridge")
        _ip("addr", "add", f"{self.bridge}/24", "dev", f"{self._tag}b")
        _ip("link", "set", f"{self._tag}b", "up")
        for index, name in enumerate(self.names, start=1):
            space = self.namespace(name)
            _ip("netns", "add", space)
            _ip("link", "add", f"{self._tag}v{index}", "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", f"{self._tag}v{index}", "master", f"{self._tag}b", "up")
            _ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")
        if servers:
            self._start_servers()

    def _start_servers(self) -> None:
        self._remote = RemotePython(self.folder)
        self.python = self._remote.path
        for key in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / key], check=True)
        Path("/run/sshd").mkdir(exist_ok=True)
        lines = ["Host *", f"  IdentityFile {self.folder / 'user_key'}", "  IdentitiesOnly yes"]
        lines += ["  StrictHostKeyChecking no", "  UserKnownHostsFile /dev/null", "  LogLevel ERROR"]
        for name in self.names:
            config = self.folder / f"{name}.conf"
            config.write_text(SERVER.format(address=self.address(name), folder=self.folder))
            self._serve(name)
            lines += [f"Host {name}", f"  HostName {self.address(name)}"]
        (self.folder / "ssh_config").write_text("\n".join(lines) + "\n")
        for name in self.names:
            self._await_server(name)

    def _serve(self, name: str) -> None:
        """Starts a host's sshd."""
        with (self.folder / f"{name}.log").open("ab") as log:
            inside = f"hostname {name}; exec /usr/sbin/sshd -f {self.folder / f'{name}.conf'} -D -e"
            self._servers[name] = self.start(name, ["unshare", "--uts", "sh", "-c", inside], stdout=log, stderr=log)

    def serve(self, name: str) -> None:
        """Starts the sshd of a host that has crashed; returns when it answers."""
        self._servers[name].wait()
        self._serve(name)
        self._await_server(name)

    def _await_server(self, name: str) -> None:
        for _ in range(100):
            done = subprocess.run(
                ["ssh", "-F", self.folder / "ssh_config", "-o", "ConnectTimeout=2", name, "true"],
                capture_output=True,
                check=False,
            )
            if done.returncode == 0:
                return
        raise AssertionError(f"sshd of {name} does not answer: {(self.folder / f'{name}.log').read_text()}")

    def start(self, name: str, command: list[str], **options: object) -> subprocess.Popen[bytes]:
        """Starts a command on a host, in its network but with this machine's files and processes."""
        space = f"/run/netns/{self.namespace(name)}"
        entering = ["nsenter", f"--net={space}"]
        if command[:3] == [sys.executable, "-P", "-m"]:
            entering, command = [sys.executable, str(HERE / "in_namespaces.py"), space], command[3:]
        elif command[0] == sys.executable and command[1].endswith(".py"):
            entering, command = [sys.executable, str(HERE / "in_namespaces.py"), space], command[1:]
        return subprocess.Popen([*entering, *command], **options)  # type: ignore[call-overload, no-any-return]

    def run(self, name: str, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Runs a command on a host to its end, which must be a good one; returns it with what it said."""
        entering = ["nsenter", f"--net=/run/netns/{self.namespace(name)}"]
        return subprocess.run([*entering, *command], capture_output=True, text=True, timeout=60, check=True)

    def partition(self, name: str) -> None:
        """Pulls a host's cable."""
        _ip("link", "set", self._cable(name), "down")

    def heal(self, name: str) -> None:
        """Puts it back, and lets the host hear those again from which it was separated."""
        _ip("link", "set", self._cable(name), "type", "bridge_slave", "isolated", "off")
        _ip("link", "set", self._cable(name), "up")
        for host in self.names:  # else a search for a neighbour that began before goes on to fail
            _ip("-n", self.namespace(host), "neigh", "flush", "dev", "eth0", "nud", "all")

    def separate(self, *names: str) -> None:
        """Lets these hosts hear everybody but each other."""
        for name in names:
            _ip("link", "set", self._cable(name), "type", "bridge_slave", "isolated", "on")

    def forget(self, name: str, other: str) -> None:
        """Leaves a host without a way to another."""
        _ip("-n", self.namespace(name), "route", "add", "unreachable", f"{self.address(other)}/32")

    def limit(self, name: str, rate: str) -> None:
        """Lets a host send no faster than `rate`, as tc writes it."""
        shape = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
        self.run(name, ["tc", "qdisc", "replace", "dev", "eth0", *shape])

    def narrow(self, name: str, rate: str) -> None:
        """Lets a host send and receive no faster than `rate`, hardly anything at once: as a cable of that bandwidth.

        Whatever this machine's own choice, TCP is Linux's default there: BBR stops for 200 ms every 10 s, to see how
        short the way is.
        """
        _ip("-n", self.namespace(name), "route", "change", f"{self.network}.0/24", "dev", "eth0", "congctl", "cubic")
        shape = ["root", "tbf", "rate", rate, "burst", "16kb", "latency", "400ms"]
        self.run(name, ["tc", "qdisc", "replace", "dev", "eth0", *shape])
        subprocess.run(["tc", "qdisc", "replace", "dev", self._cable(name), *shape], check=True, capture_output=True)

    def widen(self, name: str) -> None:
        """Takes all limits off a host's cable."""
        self.run(name, ["tc", "qdisc", "del", "dev", "eth0", "root"])
        subprocess.run(["tc", "qdisc", "del", "dev", self._cable(name), "root"], check=True, capture_output=True)

    def _cable(self, name: str) -> str:
        """Returns the bridge's end of it."""
        return f"{self._tag}v{self.names.index(name) + 1}"

    def pids(self, name: str) -> list[int]:
        """Returns the processes in a host's network."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.namespace(name)], capture_output=True, text=True, check=True
        )
        return [int(pid) for pid in found.stdout.split()]

    def crash(self, name: str) -> None:
        """Kills everything on a host at once, its sshd too."""
        for pid in self.pids(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)

    def repair(self) -> None:
        """Brings back the hosts that a test has crashed or cut off; ends what it has left running there."""
        for name in self.names:
            self.heal(name)
            _ip("-n", self.namespace(name), "route", "flush", "type", "unreachable")
        for name, server in self._servers.items():
            left = set(self.pids(name)) - {server.pid}
            if left or server.poll() is not None:
                self.crash(name)
                self.serve(name)

    def destroy(self) -> None:
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                self.crash(name)
        for server in self._servers.values():
            server.kill()
            server.wait()
        if self._remote is not None:
            self._remote.close()
        for index, name in enumerate(self.names, start=1):
            for command in (("link", "del", f"{self._tag}v{index}"), ("netns", "del", self.namespace(name))):
                with contextlib.suppress(subprocess.CalledProcessError):
                    _ip(*command)
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "del", f"{self._tag}b")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def hosts(folder: Path, count: int, *, servers: bool = True) -> Iterator[Lab]:
    """Yields `count` hosts, with sshd's if they are to be `servers`; skips where this machine cannot have them."""
    for program in ("ip", "nsenter", *(("ssh", "unshare") if servers else ())):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: scripts/install-test-tools installs it")
    if servers and not Path("/usr/sbin/sshd").exists():
        pytest.skip("sshd is not installed: scripts/install-test-tools installs it")
    if os.geteuid() != 0:
        pytest.skip("only root may make network namespaces")
    lab = Lab(folder, count)
    try:
        try:
            lab.build(servers=servers)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.cmd}: {error.stderr}")
        yield lab
    finally:
        lab.destroy()
