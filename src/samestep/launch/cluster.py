"""The hosts of a run on several: found, asked, checked against each other, put in order.

    agents come in (gather)  ->  facts  ->  order and numbers of ranks  ->  doorbells, probes  ->  interfaces, address
                                                  |
                                                  +-- an objection: one line, exit 2, before any rank starts

torchrun's agents elect the host of the store by comparing names, and wait a minute where none matches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from samestep.errors import UsageError
from samestep.launch.cores import binding_warning
from samestep.launch.facts import Facts, digest
from samestep.launch.head import Controller, Host
from samestep.launch.network import Target, addresses
from samestep.launch.preflight import objection

__all__: list[str] = []


@dataclass(frozen=True, kw_only=True)
class HostRanks:
    """One host's share of a run.

    `name` is what the user calls it; parts of one `machine` share it, as tasks of Slurm may. `address` is where the
    others reach it, `interface` the one that leads to them; each rank gets so many `threads`.
    """

    name: str
    machine: str
    ranks: int
    threads: int
    address: str = "127.0.0.1"
    interface: str = "lo"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What was asked for: the script, ranks on each host (None: one per GPU, else 1), room by host, an interface.

    `launcher` is what has started the agents, if not this: its name in samestep.rankenv.
    """

    program: str
    is_module: bool
    ranks: int | None
    slots: Mapping[str, int | None]
    interface: str | None
    launcher: str | None = None


def preflight(head: Controller, wanted: Wanted, warn: Callable[[str], None]) -> list[HostRanks]:
    """Returns the part of every host of `head`, in its order, after all checks; says what is amiss but not wrong.

    Raises:
        UsageError: they cannot run the script together; says why.
    """
    labels = tell_apart([host.host for host in head.hosts])
    asked = {"program": wanted.program, "is_module": wanted.is_module}
    told = head.ask("look", "facts", lambda host: {**asked, "name": labels[head.hosts.index(host)]})
    facts = [Facts.from_json(answer["facts"]) for answer in told]
    doors = _ring(head, facts, wanted.interface)
    found = head.ask("probe", "probed", lambda host: _others(labels[head.hosts.index(host)], doors, wanted.interface))
    for host in head.hosts:
        host.send("quiet")
    counts = {label: _count(fact, wanted) for label, fact in zip(labels, facts, strict=True)}
    fault = next((answer["fault"] for answer in found if "fault" in answer), None) or objection(
        facts,
        {label: answer["reached"] for label, answer in zip(labels, found, strict=True) if "reached" in answer},
        wanted.program,
        {label: (counts[label], limit) for label in labels if (limit := wanted.slots.get(label)) is not None},
        own=digest(wanted.program, is_module=wanted.is_module),
        interface=wanted.interface,
    )
    if fault is not None:
        raise UsageError(fault)
    for warning in bound_too_closely(facts, wanted.launcher):
        warn(warning)
    alone = one_machine(head.hosts)  # then nobody else needs to reach the store
    machines = [(fact.host, doors[label].address) for label, fact in zip(labels, facts, strict=True)]
    return [
        HostRanks(
            name=label,
            machine=fact.host if all(name != fact.host or place == own for name, place in machines) else label,
            ranks=counts[label],
            threads=threads_of(fact, counts[label], facts),
            address="127.0.0.1" if alone else own,
            interface="lo" if alone else answer.get("interface") or "lo",
        )
        for label, fact, (_, own), answer in zip(labels, facts, machines, found, strict=True)
    ]


def tell_apart(names: Sequence[str]) -> list[str]:
    """Returns names of which none is there twice.

    >>> tell_apart(["a", "b", "a"])
    ['a', 'b', 'a (2)']
    """
    return [
        name if name not in names[:number] else f"{name} ({names[: number + 1].count(name)})"
        for number, name in enumerate(names)
    ]


def _ring(head: Controller, facts: Sequence[Facts], interface: str | None) -> dict[str, Target]:
    """Lets every host open a doorbell; returns where they are: on the network that was asked for, where it has it."""
    rings = head.ask("ring", "ringing", lambda _: {"address": "0.0.0.0"})  # noqa: S104  (any way in is tried)
    asked = [None if interface is None else fact.address_on(interface) for fact in facts]
    return {
        fact.name: Target(address or _address(host, head), ring["port"], ring["nonce"])
        for fact, host, ring, address in zip(facts, head.hosts, rings, asked, strict=True)
    }


def threads_of(fact: Facts, ranks: int, facts: Sequence[Facts]) -> int:
    """Returns how many threads each of a part's ranks gets, where several parts may share a machine and its cores."""
    sharing = [other for other in facts if other.place == fact.place and set(other.cpus) & set(fact.cpus)]
    return max(1, fact.cores // max(ranks, sum(other.ranks or ranks for other in sharing)))


def bound_too_closely(facts: Sequence[Facts], launcher: str | None) -> list[str]:
    """Returns a warning for each machine on which whoever started the agents has bound them to single cores."""
    machines: dict[tuple[str, str], list[Facts]] = {}
    for fact in facts:
        machines.setdefault(fact.place, []).append(fact)
    each = machines.values()
    found = (binding_warning([fact.cpus for fact in here], here[0].unbound, launcher=launcher) for here in each)
    return [warning for warning in found if warning is not None]


def one_machine(hosts: Sequence[Host]) -> bool:
    """Tells whether all agents have come from this host's own addresses."""
    own = {interface.address for interface in addresses()}
    return all(host.address is None or host.address in own for host in hosts)


def _address(host: Host, head: Controller) -> str:
    """Returns where others reach a host: where the head does, and the head's own where the others did."""
    if host.address is not None:
        return host.address
    return next((other.local_address for other in head.hosts if other.local_address is not None), "127.0.0.1")


def _others(own: str, doors: Mapping[str, Target], interface: str | None) -> dict[str, object]:
    targets = {label: asdict(target) for label, target in doors.items() if label != own}
    return {"targets": targets, "interface": interface}


def _count(fact: Facts, wanted: Wanted) -> int:
    """Returns how many ranks a host gets: what was said there, else for all, else its room, its GPUs, or one."""
    if fact.ranks is not None:
        return fact.ranks
    return wanted.ranks or wanted.slots.get(fact.name) or fact.gpus or 1


def ordered(hosts: Sequence[Host], names: Sequence[str], aliases: Mapping[str, set[str]]) -> list[Host]:
    """Returns agents in the order of the list that their hosts stand in, and calls them as it does.

    An agent knows its own host's name and addresses; the list has what ssh calls it. What cannot be told apart, such
    as several containers of one name, keeps the order of its coming.

    Args:
        hosts: in any order.
        names: as the user wrote them.
        aliases: by name, what else it may be called.
    """
    left = list(hosts)
    placed: dict[str, Host] = {}
    for name in names:
        for host in left:
            known = {host.host, host.host.partition(".")[0], *([host.address] if host.address else [])}
            if known & (aliases.get(name, set()) | {name}):
                placed[name] = host
                left.remove(host)
                break
    for name in names:
        if name not in placed:
            placed[name] = left.pop(0)
        placed[name].host = name
    return [placed[name] for name in names]
