"""The hosts of a run on several: found, asked, checked against each other, put in order.

    agents come in (gather)  ->  facts  ->  order and numbers of ranks  ->  doorbells, probes  ->  interfaces, address
                                                  |
                                                  +-- an objection: one line, exit 2, before any rank starts

torchrun's agents elect the host of the store by comparing names, and wait a minute where none matches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from samestep.errors import UsageError
from samestep.launch.facts import Facts
from samestep.launch.head import Head, Host
from samestep.launch.network import Target, addresses
from samestep.launch.preflight import objection

__all__: list[str] = []


@dataclass(frozen=True, kw_only=True)
class Part:
    """One host's share of a run.

    `machine` tells hosts apart whose agents are several; `address` is where the others reach it, `interface` the one
    that leads to them; `cores` what its ranks may use together.
    """

    name: str
    machine: str
    ranks: int
    cores: int
    address: str = "127.0.0.1"
    interface: str = "lo"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What was asked for: the script, ranks on each host (None: one per GPU, else 1), room by host, an interface."""

    program: str
    is_module: bool
    ranks: int | None
    slots: Mapping[str, int | None]
    interface: str | None


def examine(head: Head, wanted: Wanted) -> list[Part]:
    """Returns every host's part, after all checks; puts the hosts of `head` in their order.

    Raises:
        UsageError: they cannot run the script together; says why.
    """
    asked = {"program": wanted.program, "is_module": wanted.is_module}
    told = head.ask("look", "facts", lambda host: {**asked, "name": host.host})
    facts = [Facts.from_json(answer["facts"]) for answer in told]
    rings = head.ask("ring", "ringing", lambda _: {"address": "0.0.0.0"})  # noqa: S104  (any way in is tried)
    doors = {
        host.host: Target(_address(host, head), ring["port"], ring["nonce"])
        for host, ring in zip(head.hosts, rings, strict=True)
    }
    found = head.ask("probe", "probed", lambda host: _others(host, doors, wanted.interface))
    for host in head.hosts:
        host.send("quiet")
    if one_machine(head.hosts):  # then nobody else needs to reach the store
        doors = {name: replace(door, address="127.0.0.1") for name, door in doors.items()}
    faults = [answer["fault"] for answer in found if "fault" in answer]
    reached = {host.host: answer.get("reached", {}) for host, answer in zip(head.hosts, found, strict=True)}
    parts = [
        Part(
            name=host.host,
            machine=fact.host,
            ranks=_count(fact, wanted),
            cores=fact.cores,
            address=doors[host.host].address,
            interface=answer.get("interface") or "lo",
        )
        for host, fact, answer in zip(head.hosts, facts, found, strict=True)
    ]
    room = {part.name: (part.ranks, limit) for part in parts if (limit := wanted.slots.get(part.name)) is not None}
    fault = faults[0] if faults else objection(facts, reached, wanted.program, room)
    if fault is not None:
        raise UsageError(fault)
    return parts


def one_machine(hosts: Sequence[Host]) -> bool:
    """Tells whether all agents have come from this host's own addresses."""
    own = {interface.address for interface in addresses()}
    return all(host.address is None or host.address in own for host in hosts)


def _address(host: Host, head: Head) -> str:
    """Returns where others reach a host: where the head does, and the head's own where the others did."""
    if host.address is not None:
        return host.address
    return next((other.local_address for other in head.hosts if other.local_address is not None), "127.0.0.1")


def _others(host: Host, doors: Mapping[str, Target], interface: str | None) -> dict[str, object]:
    targets = {name: asdict(target) for name, target in doors.items() if name != host.host}
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
