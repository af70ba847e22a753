"""Whether the hosts of a run fit together, found out before any rank starts.

Every host reaches every other, has the same versions and the same script, and room for its ranks; else one line says
where not. Then ranks, threads and addresses are known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from samestep.errors import UsageError
from samestep.launch.controller import AgentConnection, Controller
from samestep.launch.cpus import binding_warning
from samestep.launch.hosts.host_info import HostInfo, digest
from samestep.launch.hosts.network import ProbeTarget, addresses
from samestep.schema import from_json

MOST_PAIRS = 8  # that are named after the first

Reached = Mapping[str, Mapping[str, str | None]]  # by source and target host: why it is not reached, or None


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


def preflight(
    controller: Controller,
    warn: Callable[[str], None],
    *,
    program: str,
    is_module: bool,
    ranks: int | None,
    slots: Mapping[str, int | None],
    interface: str | None,
    launcher: str | None,
) -> list[HostRanks]:
    """Returns the part of every host of `controller`, in its order; says what is amiss but not wrong.

    Each host gets as many ranks as it says itself, else `ranks`, else its room in `slots`, its GPUs, or one;
    `launcher` is what has started the agents, if not this: its name in samestep.rankenv. Raises UsageError where they
    cannot run the script together.
    """
    labels = unique_names([host.host for host in controller.hosts])
    label_of = dict(zip(controller.hosts, labels, strict=True))
    script = {"program": program, "is_module": is_module}
    answers = controller.ask("inspect", "info", lambda host: {**script, "name": label_of[host]})
    infos = [from_json(HostInfo, answer["info"]) for answer in answers]
    targets = _open_probes(controller, infos, interface)

    def others(host: AgentConnection) -> dict[str, object]:
        theirs = {label: asdict(target) for label, target in targets.items() if label != label_of[host]}
        return {"targets": theirs, "interface": interface}

    found = controller.ask("probe", "probed", others)
    for host in controller.hosts:
        host.send("close_probe")
    counts = {
        label: (ranks or slots.get(label) or info.gpus or 1) if info.ranks is None else info.ranks
        for label, info in zip(labels, infos, strict=True)
    }
    fault = next((answer["fault"] for answer in found if "fault" in answer), None) or mismatch(
        infos,
        {label: answer["reached"] for label, answer in zip(labels, found, strict=True) if "reached" in answer},
        program,
        {label: (counts[label], limit) for label in labels if (limit := slots.get(label)) is not None},
        own=digest(program, is_module=is_module),
        interface=interface,
    )
    if fault is not None:
        raise UsageError(fault)
    for warning in binding_warnings(infos, launcher):
        warn(warning)
    here = {interface.address for interface in addresses()}
    alone = all(host.address is None or host.address in here for host in controller.hosts)  # the store is for no other
    machines = [(info.host, targets[label].address) for label, info in zip(labels, infos, strict=True)]
    return [
        HostRanks(
            name=label,
            machine=info.host if all(name != info.host or place == own for name, place in machines) else label,
            ranks=counts[label],
            threads=threads_of(info, counts[label], infos),
            address="127.0.0.1" if alone else own,
            interface="lo" if alone else answer.get("interface") or "lo",
        )
        for label, info, (_, own), answer in zip(labels, infos, machines, found, strict=True)
    ]


def unique_names(names: Sequence[str]) -> list[str]:
    """Returns names of which none is there twice.

    >>> unique_names(["a", "b", "a"])
    ['a', 'b', 'a (2)']
    """
    return [
        name if name not in names[:number] else f"{name} ({names[: number + 1].count(name)})"
        for number, name in enumerate(names)
    ]


def _open_probes(controller: Controller, infos: Sequence[HostInfo], interface: str | None) -> dict[str, ProbeTarget]:
    """Lets every host open a probe server; returns where they are: on the requested network, where it has it."""
    answers = controller.ask("open_probe", "probe_open", lambda _: {"address": "0.0.0.0"})  # noqa: S104  (any way in)
    wanted = [None if interface is None else info.address_on(interface) for info in infos]
    return {
        info.name: ProbeTarget(address or _address(host, controller), answer["port"], answer["nonce"])
        for info, host, answer, address in zip(infos, controller.hosts, answers, wanted, strict=True)
    }


def threads_of(info: HostInfo, ranks: int, infos: Sequence[HostInfo]) -> int:
    """Returns how many threads each of a part's ranks gets, where several parts may share a machine and its cores."""
    sharing = [other for other in infos if other.place == info.place and set(other.cpus) & set(info.cpus)]
    return max(1, info.cores // max(ranks, sum(other.ranks or ranks for other in sharing)))


def binding_warnings(infos: Sequence[HostInfo], launcher: str | None) -> list[str]:
    machines: dict[tuple[str, str], list[HostInfo]] = {}
    for info in infos:
        machines.setdefault(info.place, []).append(info)
    each = machines.values()
    found = (binding_warning([info.cpus for info in here], here[0].unbound, launcher=launcher) for here in each)
    return [warning for warning in found if warning is not None]


def _address(host: AgentConnection, controller: Controller) -> str:
    """Returns where others reach a host: where this process does, and its own address where the others did."""
    if host.address is not None:
        return host.address
    return next((other.local_address for other in controller.hosts if other.local_address is not None), "127.0.0.1")


def ordered(
    hosts: Sequence[AgentConnection], names: Sequence[str], aliases: Mapping[str, set[str]]
) -> list[AgentConnection]:
    """Returns agents in the order of the list that their hosts are in, and calls them as it does.

    An agent knows its own host's name and addresses; the list has what ssh calls it. What cannot be told apart, such
    as several containers of one name, keeps the order of its coming.

    `aliases` says, by name, what else a host may be called.
    """
    left = list(hosts)
    placed: dict[str, AgentConnection] = {}
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


# --- whether they fit together --------------------------------------------------------------------


def mismatch(
    infos: Sequence[HostInfo],
    reached: Reached,
    program: str,
    slots: Mapping[str, tuple[int, int]],
    *,
    own: str | None = None,
    interface: str | None = None,
) -> str | None:
    """Returns why these hosts cannot run `program` together, and what to do; None where they can.

    `slots` says, by host, how many ranks are asked for and how many there is room for; `own` is the digest of the
    program's copy here, where the command was given and no rank need be.
    """
    return _unreached(reached, infos, interface) or _versions(infos) or _script(infos, program, own) or _room(slots)


def _unreached(reached: Reached, infos: Sequence[HostInfo], interface: str | None) -> str | None:
    for source, others in reached.items():
        for target, reason in others.items():
            if reason is not None:
                back = reached.get(target, {}).get(source)
                both = "; nor the other way round" if back is not None else ""
                both += _other_pairs(reached, source, target)
                where, fix = "", "open all ports between them, or name the network that joins them with --interface"
                if interface is not None:
                    address = next((info.address_on(interface) for info in infos if info.name == target), None)
                    where, fix = (
                        f" on its {interface}, {address}",
                        "name another network with --interface, or leave it out",
                    )
                return f"host {source} cannot reach host {target}{where} ({reason}){both}: {fix}"
    return None


def _other_pairs(reached: Reached, source: str, target: str) -> str:
    """Returns the other pairs that do not reach each other: one cable, or one host's firewall, is then plain to see."""
    pairs = {tuple(sorted((one, other))) for one, row in reached.items() for other, why in row.items() if why}
    rest = sorted(pairs - {tuple(sorted((source, target)))})
    more = f", and {len(rest) - MOST_PAIRS} more" if len(rest) > MOST_PAIRS else ""
    named = ", ".join(" - ".join(pair) for pair in rest[:MOST_PAIRS])
    return f"; nor do these reach each other: {named}{more}" if rest else ""


def _versions(infos: Sequence[HostInfo]) -> str | None:
    for what, values in (
        ("samestep", [host.samestep for host in infos]),
        ("torch", [(host.torch or "no torch").partition("+")[0] for host in infos]),
        ("python", [".".join(host.python.split(".")[:2]) for host in infos]),
    ):
        odd = _odd(infos, values)
        if odd:
            return f"the hosts have different versions of {what}: {odd}; install the same everywhere"
    return None


def _script(infos: Sequence[HostInfo], program: str, own: str | None) -> str | None:
    missing = [host for host in infos if host.digest is None]
    if missing and (own is not None or len(missing) < len(infos)):
        return f"there is no {program} in {missing[0].directory} on host {missing[0].name}: copy it there, or share it"
    odd = _odd(infos, [(host.digest or "")[:8] for host in infos])
    if odd is None and own is not None and own != infos[0].digest:
        there = "the hosts" if len(infos) > 1 else infos[0].name
        odd = f"here {own[:8]}, {there} {(infos[0].digest or '')[:8]}"
    return (
        f"{program} is not the same on all hosts (sha256 {odd}): copy one version to all, or share it" if odd else None
    )


def _room(slots: Mapping[str, tuple[int, int]]) -> str | None:
    for host, (ranks, there) in slots.items():
        if ranks > there:
            room = "1 slot" if there == 1 else f"{there} slots"
            return f"host {host} has {room} and {ranks} ranks are asked for: lower -n, or raise its slots"
    return None


def _odd(infos: Sequence[HostInfo], values: Sequence[str]) -> str | None:
    """Returns the hosts that differ from the most, or both where there are only two; None where all are equal."""
    counts = Counter(values)
    if len(counts) < 2:
        return None
    most = counts.most_common(1)[0][0]
    pairs = [(host.name, value) for host, value in zip(infos, values, strict=True)]
    if len(infos) > 2:
        others = [f"{name} {value}" for name, value in pairs if value != most]
        return f"{', '.join(others)}, the others {most}"
    return ", ".join(f"{name} {value}" for name, value in pairs)
