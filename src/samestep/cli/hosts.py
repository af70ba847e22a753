"""`samestep run` on several hosts: what its options mean, and what is started where."""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from samestep.cli.options import Parser, seconds
from samestep.errors import RankVariablesError, SamestepError, UsageError
from samestep.launch.controller import Controller, open_here
from samestep.launch.hosts.hostlist import HostSlots, parse_hostfile, parse_hosts
from samestep.launch.hosts.join import Replacement, start_by_transport, stop_transports, wait_for_agents
from samestep.launch.hosts.network import addresses, interface_named
from samestep.launch.hosts.preflight import HostRanks, preflight
from samestep.launch.hosts.rendezvous_file import user_secret
from samestep.launch.hosts.secure_link import new_token
from samestep.launch.hosts.sources import (
    ANY_ADDRESS,
    JOIN_TIMEOUT_S,
    JoinSource,
    NodeSpec,
    TransportSource,
    TransportSpec,
    node_spec,
    notify_end,
    stream_descriptors,
)
from samestep.launch.hosts.transport import VIAS, Started
from samestep.launch.output.console import say
from samestep.launch.rank.store import check_loopback
from samestep.launch.resources import check_room, visible_gpus
from samestep.launch.run import local_ranks
from samestep.rankenv import child_environment, read_rank_variables, variable

TASK_LAUNCHERS = ("slurm", "openmpi", "pmi")  # whose tasks meet by themselves
FORWARDED = ("OMP_", "MKL_", "KMP_", "NCCL_", "GLOO_", "UCX_", "FI_", "TORCH", "PYTORCH_", "PYTHON", "CUDA_")
SHORTEST_TOKEN = 16
TORCHRUN_PORT = 29500
NOT_FORWARDED = ("CUDA_VISIBLE_DEVICES", "PYTHONHOME", "PYTHONSTARTUP")  # this host's own affair


def add_options(parser: Parser) -> None:
    """Adds the options that name hosts, and torchrun's names for some of them."""
    parser.also("--node_rank", dest="node_rank", type=int)
    parser.also("--rdzv-endpoint", "--rdzv_endpoint", dest="rendezvous")
    parser.also("--master-addr", "--master_addr", dest="master_addr")
    parser.also("--master-port", "--master_port", dest="master_port", type=int)
    for name in ("--rdzv-backend", "--rdzv_backend", "--rdzv-id", "--rdzv_id"):
        parser.also(name, dest="without_meaning")  # there is one way to meet, and every run has its own number
    add = parser.add_argument_group("several hosts").add_argument
    add("--hosts", metavar="LIST", help="start there instead of here: a,b[3-9],user@c:4 (:4 is room for 4 ranks)")
    add("--hostfile", metavar="FILE", type=Path, help="the same from a file, one host a line: name, or name slots=4")
    add("--via", choices=VIAS, help="how --hosts are reached (default: ssh)")
    add("--ssh-args", metavar="TEXT", default="", help="more options for ssh: --ssh-args '-p 2222 -F config'")
    add("--remote-python", metavar="PATH", help="the interpreter there, if it is not where it is here")
    add("--env", metavar="NAME", action="append", default=[], help="take this variable along too (OMP_*, NCCL_*, … go)")
    add("--interface", metavar="NAME", help="the network between the hosts; found by trying them if not given")
    add("--nnodes", metavar="N", type=int, help="start by hand on N hosts, once on each")
    add("--node-rank", metavar="R", type=int, default=None, help="which of them this is, from 0")
    add("--rendezvous", metavar="HOST:PORT", help="where host 0 waits, the same on all; or a file that all share")
    add("--slurm", action="store_true", help="queue it on --nnodes nodes; with --dry-run print the batch script")
    add("--sbatch-args", metavar="TEXT", default="", help="more options for sbatch: '--time=2:00:00 --gpus-per-node=4'")
    add(
        "--join-timeout",
        metavar="S",
        type=seconds,
        default=JOIN_TIMEOUT_S,
        help="seconds to wait for the others (default: %(default)g)",
    )
    add(
        "--lost-host",
        choices=("stop", "continue", "wait"),
        default="stop",
        help="with --restarts, when a host is lost: continue with those left, or wait up to --join-timeout for it, or "
        "for another in its place (default: stop)",
    )


def reject_ineffective(options: argparse.Namespace) -> None:
    """Refuses options that would have no effect beside the others."""
    hosts = [f"--{name}" for name in ("hosts", "hostfile") if getattr(options, name) is not None]
    given = {
        "--via": options.via,
        "--ssh-args": options.ssh_args,
        "--remote-python": options.remote_python,
        "--env": [] if options.slurm else options.env,
    }
    idle = [name for name, value in given.items() if value] if not hosts else []
    if options.slurm:
        by_hand = {"--node-rank": options.node_rank, "--rendezvous": options.rendezvous}
        other = [*hosts, *(name for name, value in by_hand.items() if value is not None), *idle]
        if other:
            raise UsageError(f"--slurm and {other[0]} do not go together: Slurm chooses the hosts, --nnodes N how many")
    elif options.sbatch_args:
        raise UsageError("--sbatch-args is for sbatch: say --slurm as well")
    if idle:
        raise UsageError(f"{idle[0]} is about other hosts, and none is named: say --hosts or --hostfile as well")
    if options.node_rank is not None and options.nnodes is None:
        raise UsageError("--node-rank says which of several hosts this is: say --nnodes N, of how many, as well")
    if options.nnodes is not None and options.nnodes < 1:
        raise UsageError(f"--nnodes {options.nnodes}: give the number of hosts, 1 or more")


@contextmanager
def open_hosts(
    options: argparse.Namespace, where: TransportSpec | NodeSpec | None
) -> Iterator[tuple[Controller, tuple[HostRanks, ...], Replacement]]:
    """Yields the controller of a run, its parts, all examined, and what replaces hosts; ends all agents at the end.

    `where` is what :func:`host_mode` has made of the options.
    """
    if where is None:
        ranks = options.ranks or visible_gpus() or 1
        check_room(ranks)
        check_loopback()
        with Controller([open_here(socket.gethostname(), ranks)]) as controller:
            parts: tuple[HostRanks, ...] = (local_ranks(ranks),)
            yield controller, parts, Replacement(controller, None, lambda _: parts, options.join_timeout, say)
        return
    started: list[Started] = []
    if isinstance(where, TransportSpec):
        hosts, started = start_by_transport(where, say)
    else:
        hosts = wait_for_agents(where, local_rank_count(options, where), say)
    try:
        with Controller(hosts) as controller:
            controller.read_streams([descriptor for one in started for descriptor in stream_descriptors(one)], _show)
            named = listed(options) if options.hosts or options.hostfile else []
            check = partial(
                preflight,
                controller,
                program=options.program[0],
                is_module=options.module,
                ranks=options.ranks,
                slots={host.name: host.slots for host in named},
                interface=options.interface,
                launcher=where.launcher if isinstance(where, NodeSpec) else None,
            )
            if isinstance(where, TransportSpec):
                source: TransportSource | JoinSource = TransportSource(where, started, controller, _show)
            else:
                source = JoinSource(where)
            try:
                parts = tuple(check(lambda text: say(f"note: {text}")))
                yield controller, parts, Replacement(controller, source, check, options.join_timeout, say)
            except SamestepError as error:
                if isinstance(where, NodeSpec):  # people at the other hosts should know why
                    notify_end(controller, f"error: {error}", error.exit_code)
                raise
    finally:
        stop_transports(started)


def host_mode(options: argparse.Namespace) -> TransportSpec | NodeSpec | None:
    """Returns the hosts that the options name, or that others have started this on; None for this one alone."""
    if options.interface is not None and not (options.hosts or options.hostfile or options.slurm):
        interface_named(options.interface)
    named = [name for name in ("hosts", "hostfile", "nnodes") if getattr(options, name) is not None]
    if len(named) > 1:
        raise UsageError(f"--{named[0]} and --{named[1]} both say which hosts: give one of them")
    if options.hosts is not None or options.hostfile is not None:
        names = tuple(host.name for host in listed(options))
        return TransportSpec(
            hosts=names,
            via=options.via or VIAS[0],
            ssh_args=options.ssh_args,
            python=options.remote_python,
            variables=forwarded_environment(options.env),
        )
    if options.nnodes is not None and options.nnodes != 1:
        return _by_hand(options)
    try:
        task = read_rank_variables()
    except RankVariablesError:
        return None  # of the process that started this; the ranks get their own
    if task is not None and task.source in TASK_LAUNCHERS and task.size > 1:
        return node_spec(task, options.join_timeout, _program(options))
    return None


def local_rank_count(options: argparse.Namespace, where: NodeSpec) -> int:
    """Returns how many ranks this process brings: a task of srun or mpiexec is one, a host as many as it has GPUs."""
    if options.ranks is not None:
        return int(options.ranks)
    return 1 if where.launcher is not None else visible_gpus() or 1


def _program(options: argparse.Namespace) -> tuple[str, ...]:
    return (*(["-m"] if options.module else []), *options.program)


def listed(options: argparse.Namespace) -> list[HostSlots]:
    """Returns the hosts that the options name, or raises UsageError."""
    if options.hosts is not None:
        return parse_hosts(options.hosts)
    try:
        text = options.hostfile.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the host file {options.hostfile} cannot be read: {error.strerror}") from error
    return parse_hostfile(text, str(options.hostfile))


def _show(said: bytes) -> None:
    sys.stderr.write(said.decode(errors="replace"))
    sys.stderr.flush()


def forwarded_environment(more: list[str]) -> dict[str, str]:
    """Returns the variables that go to other hosts: those that FORWARDED names, and `more`, which must be set."""
    missing = [name for name in more if variable(name) is None]
    if missing:
        raise UsageError(f"--env {missing[0]}: there is no such variable here; set it first")
    return {
        name: value
        for name, value in child_environment({}).items()
        if name in more or (name.startswith(FORWARDED) and name not in NOT_FORWARDED)
    }


def _by_hand(options: argparse.Namespace) -> NodeSpec:
    count, index = options.nnodes, options.node_rank
    if options.rendezvous is None and hasattr(options, "master_addr"):
        options.rendezvous = f"{options.master_addr}:{getattr(options, 'master_port', TORCHRUN_PORT)}"
    if index is None or not 0 <= index < count:
        raise UsageError(f"--nnodes {count} needs --node-rank, from 0 to {count - 1}, a different one on every host")
    if options.rendezvous is None:
        raise UsageError(f"--nnodes {count} needs --rendezvous HOST:PORT, a name of host 0 and a port free there")
    known = {"index": index, "count": count, "join_timeout": options.join_timeout, "program": _program(options)}
    if "/" in options.rendezvous:
        file = Path(options.rendezvous).absolute()
        return NodeSpec(**known, file=file, token=new_token(), named=str(file))
    host, colon, port = options.rendezvous.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UsageError(
            f"--rendezvous {options.rendezvous}: give HOST:PORT, such as node0:29500, or a file's path with a /"
        )
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise UsageError(f"--rendezvous {options.rendezvous}: the name {host} is unknown on this host") from error
    own = [interface.address for interface in addresses()]
    loopback = address.startswith("127.")
    if index == 0 and address not in own and not loopback:
        named = host if host == address else f"{host} ({address})"
        raise UsageError(f"--rendezvous {named} is not this host, which is node 0 and has {', '.join(own)}")
    token = variable("SAMESTEP_TOKEN") or ""
    if len(token) < SHORTEST_TOKEN and not loopback:
        raise UsageError(
            f"--nnodes {count} needs a secret, or anybody on the network could run code here: set SAMESTEP_TOKEN to "
            f"the same {SHORTEST_TOKEN} or more random characters on every host (openssl rand -hex 16)"
        )
    # a host's own name may lead to 127.0.1.1 on that host alone; without a secret that is as far as it goes
    kept = loopback and (len(token) < SHORTEST_TOKEN or host in {address, "localhost"})
    if len(token) < SHORTEST_TOKEN:
        token = user_secret()  # of the host's users, only this one comes in
    bind = address if kept else ANY_ADDRESS
    return NodeSpec(**known, address=address, port=int(port), token=token, named=options.rendezvous, bind=bind)
