"""The hosts of `--hosts` and `--hostfile`: pure text, no name is looked up.

An item is `[user@]name[:slots]`, such as a, b[3-9], c[01-03]x or user@d:4; names keep the zeros in front of a range's
first number. A host file has one item a line, or `node1 slots=4` (Open MPI), with comments and blank lines between.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from samestep.errors import UsageError

MOST_HOSTS = 65_536  # what Slurm allows in one cluster
DIGITS = 18  # of a number in a range; the longest job ids of batch systems have fewer
SHOWN = 40  # characters of a long text that an error repeats

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_PART = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_SLOTS = re.compile(r"slots\s*=\s*([^\s=]+)")
_BALANCED = re.compile(r"\A(?:[^\[\]]|\[[^\[\]]*\])+")  # up to the first bracket that is amiss
_COMMA = re.compile(r",(?![^\[]*\])")  # in no bracket


@dataclass(frozen=True)
class HostSlots:
    """One host, as ssh takes it (`user@` included), and how many ranks it has room for, if that was said."""

    name: str
    slots: int | None = None

    @property
    def machine(self) -> str:
        return self.name.rpartition("@")[2]


def parse_hosts(text: str) -> list[HostSlots]:
    """Returns the hosts of a list in its order.

    >>> [host.name for host in parse_hosts("a,b[8-10],c[01-02]x")]
    ['a', 'b8', 'b9', 'b10', 'c01x', 'c02x']
    >>> parse_hosts("user@d:4")
    [HostSlots(name='user@d', slots=4)]
    """
    if not text.strip():
        raise UsageError("the host list is empty; name at least one host")
    hosts: dict[str, HostSlots] = {}
    for number, item in enumerate(_COMMA.split(text), start=1):
        try:
            _add(hosts, _item(item.strip(), MOST_HOSTS - len(hosts)))
        except ValueError as fault:
            raise UsageError(f"the host list {_short(text)!r}, item {number}: {fault}") from None
    return list(hosts.values())


def parse_hostfile(text: str, name: str) -> list[HostSlots]:
    r"""Returns the hosts of a host file in its order.

    >>> parse_hostfile("node[1-2] slots=4\nnode3:2  # the small one\n", "hosts")[1:]
    [HostSlots(name='node2', slots=4), HostSlots(name='node3', slots=2)]
    """
    hosts: dict[str, HostSlots] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            if bare := line.partition("#")[0].strip():
                _add(hosts, _line(bare, MOST_HOSTS - len(hosts)))
        except ValueError as fault:
            raise UsageError(f"{name}:{number}: {fault}") from None
    if not hosts:
        raise UsageError(f"{name} names no host: write one a line, such as `node1 slots=4`")
    return list(hosts.values())


def _add(hosts: dict[str, HostSlots], more: Iterator[HostSlots]) -> None:
    for host in more:
        if host.machine.lower() in hosts:
            raise ValueError(f"{host.machine!r} is named twice; name it once, with :slots for several ranks on it")
        hosts[host.machine.lower()] = host


def _line(line: str, room: int) -> Iterator[HostSlots]:
    item, *words = line.split(maxsplit=1)
    if _COMMA.search(item):
        raise ValueError("one host, or one bracket range, a line; a comma belongs into --hosts")
    hosts = list(_item(item, room))
    if words:
        match = _SLOTS.fullmatch(words[0])
        if match is None:
            excerpt = _short(words[0])
            raise ValueError(f"{excerpt!r} after the host is not understood; write `{_short(item)} slots=4`")
        if hosts[0].slots is not None:
            raise ValueError(f"slots are given twice, as :{hosts[0].slots} and as {words[0]}; keep one")
        slots = _slot_count(match[1])
        hosts = [HostSlots(host.name, slots) for host in hosts]
    yield from hosts


def _item(item: str, room: int) -> Iterator[HostSlots]:
    if item.count(":") > 1 or re.match(r"\[[^\]]*:", item):
        raise ValueError(
            "IPv6 addresses are not taken here; give the host a name in ~/.ssh/config or /etc/hosts and use that"
        )
    user, at, rest = item.rpartition("@")
    if at and (not _NAME.fullmatch(user) or user.startswith("-")):
        raise ValueError(f"{user!r} is no user name")
    name, colon, number = rest.partition(":")
    slots = _slot_count(number) if colon else None
    for machine in _names(name, room):
        yield HostSlots(user + at + machine, slots)


def _slot_count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < 1:
        raise ValueError(f"the number of slots must be a whole number, 1 or more, and is {text!r}")
    return int(text)


def _names(name: str, room: int) -> Iterator[str]:
    """Yields every name that brackets stand for; the last group changes fastest."""
    if not name:
        raise ValueError("a host name is missing here")
    if name[0] in {"-", "."}:  # ssh would take `-o…` for an option
        raise ValueError(f"a host name cannot begin with {name[0]!r}")
    rest = _BALANCED.sub("", name)
    if rest.startswith("]"):
        raise ValueError("a bracket closes none")
    if re.match(r"\[[^\]]*\[", rest):
        raise ValueError("a bracket within a bracket; write a[1-3,7] for several numbers")
    if rest:
        raise ValueError("a bracket is never closed")
    choices: list[list[str]] = []
    count = 1
    for piece in re.split(r"(\[[^\]]*\])", name):
        if piece.startswith("["):
            ranges = [_range(part) for part in piece[1:-1].split(",")]
            count *= sum(len(numbers) for numbers, _ in ranges)
            _bound(count, room)  # before it is expanded: a typing error must not fill the memory
            choices.append([f"{number:0{width}d}" for numbers, width in ranges for number in numbers])
        else:
            if odd := _NAME.sub("", piece):
                allowed = "use letters, digits, dots, dashes and underscores"
                raise ValueError(f"{odd[0]!r} cannot stand in a host name; {allowed}")
            choices.append([piece])
    yield from map("".join, itertools.product(*choices))


def _range(part: str) -> tuple[range, int]:
    match = _PART.fullmatch(part.strip())
    if match is None:
        raise ValueError(f"{_short(part)!r} is no number and no range; write 7 or 3-9")
    low, high = match[1], match[2] or match[1]
    _bound(len(high) - DIGITS + MOST_HOSTS)  # python itself refuses to read very long numbers
    if int(low) > int(high):
        raise ValueError(f"the range {part} runs backwards; write {high}-{low}")
    if high.startswith("0") and len(high) > max(len(low), 1):
        raise ValueError(f"the range {part} pads only its end with zeros; write {low.zfill(len(high))}-{high}")
    return range(int(low), int(high) + 1), len(low) if low.startswith("0") else 1


def _bound(count: int, room: int = MOST_HOSTS) -> None:
    if count > room:
        raise ValueError(f"more than {MOST_HOSTS} hosts in all; look for a digit too many")


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"
