"""Whether the hosts of a run fit together, judged before any rank starts: in one line, not by a hang.

reach      every host reaches every other              else: which pair, and how
versions   the same samestep, torch and python         else: who has which
script     there, and the same, everywhere, also here  else: where it differs
room       as many slots as ranks were asked for       else: where not
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from samestep.launch.facts import Facts

__all__: list[str] = []

MOST_PAIRS = 8  # that are named beside the first

Reached = Mapping[str, Mapping[str, str | None]]  # from whom, to whom: why not, or None


def objection(
    facts: Sequence[Facts],
    reached: Reached,
    program: str,
    slots: Mapping[str, tuple[int, int]],
    *,
    own: str | None = None,
    interface: str | None = None,
) -> str | None:
    """Returns why these hosts cannot run `program` together, and what to do; None where they can.

    Args:
        facts: of every host.
        reached: what the probes between them have found.
        program: the script or module.
        slots: by host, how many ranks are asked for and how many there is room for.
        own: the digest of the program's copy here, where the command was given and no rank need be.
        interface: the network that was asked for.
    """
    return _unreached(reached, facts, interface) or _versions(facts) or _script(facts, program, own) or _room(slots)


def _unreached(reached: Reached, facts: Sequence[Facts], interface: str | None) -> str | None:
    for source, others in reached.items():
        for target, reason in others.items():
            if reason is not None:
                back = reached.get(target, {}).get(source)
                both = "; nor the other way round" if back is not None else ""
                both += _others(reached, source, target)
                if interface is not None:
                    address = next((fact.address_on(interface) for fact in facts if fact.name == target), None)
                    return (
                        f"host {source} cannot reach host {target} on its {interface}, {address} ({reason}){both}: "
                        "name another network with --interface, or leave it out"
                    )
                return (
                    f"host {source} cannot reach host {target} ({reason}){both}: open all ports between them, or name "
                    "the network that joins them with --interface"
                )
    return None


def _others(reached: Reached, source: str, target: str) -> str:
    """Returns the other pairs that do not reach each other: one cable, or one host's firewall, is then plain to see."""
    pairs = {tuple(sorted((one, other))) for one, row in reached.items() for other, why in row.items() if why}
    rest = sorted(pairs - {tuple(sorted((source, target)))})
    more = f", and {len(rest) - MOST_PAIRS} more" if len(rest) > MOST_PAIRS else ""
    named = ", ".join(" - ".join(pair) for pair in rest[:MOST_PAIRS])
    return f"; nor do these reach each other: {named}{more}" if rest else ""


def _versions(facts: Sequence[Facts]) -> str | None:
    for what, values in (
        ("samestep", [host.samestep for host in facts]),
        ("torch", [(host.torch or "no torch").partition("+")[0] for host in facts]),
        ("python", [".".join(host.python.split(".")[:2]) for host in facts]),
    ):
        odd = _odd(facts, values)
        if odd:
            return f"the hosts have different versions of {what}: {odd}; install the same everywhere"
    return None


def _script(facts: Sequence[Facts], program: str, own: str | None) -> str | None:
    missing = [host for host in facts if host.digest is None]
    if missing and (own is not None or len(missing) < len(facts)):
        return f"there is no {program} in {missing[0].directory} on host {missing[0].name}: copy it there, or share it"
    odd = _odd(facts, [(host.digest or "")[:8] for host in facts])
    if odd is None and own is not None and own != facts[0].digest:
        there = "the hosts" if len(facts) > 1 else facts[0].name
        odd = f"here {own[:8]}, {there} {(facts[0].digest or '')[:8]}"
    return (
        f"{program} is not the same on all hosts (sha256 {odd}): copy one version to all, or share it" if odd else None
    )


def _room(slots: Mapping[str, tuple[int, int]]) -> str | None:
    for host, (asked, there) in slots.items():
        if asked > there:
            room = "1 slot" if there == 1 else f"{there} slots"
            return f"host {host} has {room} and {asked} ranks are asked for: lower -n, or raise its slots"
    return None


def _odd(facts: Sequence[Facts], values: Sequence[str]) -> str | None:
    """Returns who differs from the most, or both where there are only two; None where all are alike."""
    counts = Counter(values)
    if len(counts) < 2:
        return None
    usual = counts.most_common(1)[0][0]
    told = [(host.name, value) for host, value in zip(facts, values, strict=True)]
    if len(facts) > 2:
        others = [f"{name} {value}" for name, value in told if value != usual]
        return f"{', '.join(others)}, the others {usual}"
    return ", ".join(f"{name} {value}" for name, value in told)
