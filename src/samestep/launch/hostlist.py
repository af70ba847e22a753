"""Which hosts take part, as a user writes them down: pure text, no name is looked up.

    a,b[3-9],c[01-03]x,user@d:4          --hosts, and Slurm's node lists (without user and slots)

    list   item , item , …
    item   [user@] name [:slots]
    name   letters, digits, `.`, `_`, `-` and any number of bracket groups
    group  [ part , part , … ]           part: 7, 01, 3-9, 01-12; zeros in front of the first number are kept

    node1 slots=4    # Open MPI          --hostfile: one item a line, comments and blank lines between
    node2:4          # MPICH

torchrun takes no hosts at all. pdsh, ClusterShell and Slurm each expand such lists, but none of them is sure to be
installed where they are read. A name goes to ssh as it is, so one that ssh would take for an option is refused;
a range is counted before it is expanded, so that a typing error cannot fill the memory.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from samestep.errors import UsageError

__all__: list[str] = []

MOST_HOSTS = 65_536  # what Slurm allows in one cluster
DIGITS = 18  # of a number in a range; the longest job ids of batch systems have fewer
SHOWN = 40  # characters of a long list that an error repeats

_LETTERS = re.compile(r"[A-Za-z0-9_.-]+")
_PART = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_SLOTS = re.compile(r"slots\s*=\s*([^\s=]+)")


@dataclass(frozen=True)
class HostSlots:
    """One host, as ssh takes it (`user@` included), and how many ranks it has room for, if that was said."""

    name: str
    slots: int | None = None

    @property
    def machine(self) -> str:
        """The name without the user."""
        return self.name.rpartition("@")[2]


class _Fault(Exception):  # noqa: N818  (it never leaves this file)
    """What is wrong, and at which character of the text, counted from 0."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(reason)
        self.position = position
        self.reason = reason


def parse_hosts(text: str) -> list[HostSlots]:
    """Returns the hosts of a list in its order.

    >>> [host.name for host in parse_hosts("a,b[8-10],c[01-02]x")]
    ['a', 'b8', 'b9', 'b10', 'c01x', 'c02x']
    >>> parse_hosts("user@d:4")
    [HostSlots(name='user@d', slots=4)]

    Raises:
        UsageError: the list is malformed, too long or names a host twice; says where.
    """
    if not text.strip():
        raise UsageError("the host list is empty; name at least one host")
    try:
        return _unique(list(_hosts(text)))
    except _Fault as fault:
        raise UsageError(f"the host list {_where(text, fault.position)}: {fault.reason}") from None


def parse_hostfile(text: str, name: str) -> list[HostSlots]:
    r"""Returns the hosts of a host file in its order.

    >>> parse_hostfile("node[1-2] slots=4\nnode3:2  # the small one\n", "hosts")[1:]
    [HostSlots(name='node2', slots=4), HostSlots(name='node3', slots=2)]

    Args:
        text: what the file holds.
        name: what errors call it.

    Raises:
        UsageError: a line is malformed or names a host again; says which.
    """
    hosts: list[tuple[int, HostSlots]] = []
    number = 0
    try:
        for number, line in enumerate(text.splitlines(), start=1):
            hosts += [(number, host) for host in _line(line.partition("#")[0].strip())]
            _bound(len(hosts), 0)
        unique = _unique(hosts)
    except _Fault as fault:
        line_number = fault.position if isinstance(fault, _Twice) else number
        raise UsageError(f"{name}:{line_number}: {fault.reason}") from None
    if not unique:
        raise UsageError(f"{name} names no host: write one a line, such as `node1 slots=4`")
    return unique


class _Twice(_Fault):
    """A host that was named before; `position` is that of the second time."""


def _unique(hosts: list[tuple[int, HostSlots]]) -> list[HostSlots]:
    seen: set[str] = set()
    for position, host in hosts:
        if host.machine.lower() in seen:
            reason = f"{host.machine!r} is named twice; name it once, with :slots for several ranks on it"
            raise _Twice(position, reason)
        seen.add(host.machine.lower())
    return [host for _, host in hosts]


def _hosts(text: str) -> Iterator[tuple[int, HostSlots]]:
    """Yields each host with the place of its item in `text`."""
    count = 0
    for position, item in _items(text):
        for host in _item(position, item, room=MOST_HOSTS - count):
            count += 1
            yield position, host


def _items(text: str) -> Iterator[tuple[int, str]]:
    """Yields what stands between the commas that are in no bracket, and where it begins."""
    begin, opened = 0, -1
    for position, character in enumerate(text + ","):
        if character == "[":
            if opened >= 0:
                raise _Fault(position, "a bracket within a bracket; write a[1-3,7] for several numbers")
            opened = position
        elif character == "]":
            if opened < 0:
                raise _Fault(position, "this bracket closes none")
            opened = -1
        elif character == "," and opened < 0:
            yield _stripped(begin, text[begin:position])
            begin = position + 1
    if opened >= 0:
        raise _Fault(opened, "this bracket is never closed")


def _stripped(position: int, item: str) -> tuple[int, str]:
    bare = item.strip()
    if not bare:
        raise _Fault(position, "a host name is missing here")
    return position + item.index(bare), bare


def _item(position: int, item: str, room: int = MOST_HOSTS) -> Iterator[HostSlots]:
    if item.count(":") > 1 or re.match(r"\[[^\]]*:", item):
        reason = "IPv6 addresses are not taken here; give the host a name in ~/.ssh/config or /etc/hosts and use that"
        raise _Fault(position, reason)
    user, at, rest = item.rpartition("@")
    if at and (not _LETTERS.fullmatch(user) or user.startswith("-")):
        raise _Fault(position, f"{user!r} is no user name")
    name, colon, number = rest.partition(":")
    start = position + len(user) + len(at)
    slots = _slot_count(start + len(name) + 1, number) if colon else None
    for machine in _names(start, name, room):
        yield HostSlots(user + at + machine, slots)


def _slot_count(position: int, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < 1:
        raise _Fault(position, f"the number of slots must be a whole number, 1 or more, and is {text!r}")
    return int(text)


def _names(position: int, name: str, room: int) -> Iterator[str]:
    """Yields every name that brackets stand for; the last group changes fastest."""
    if name[:1] in {"", "-", "."}:  # ssh would take `-o…` for an option
        raise _Fault(position, f"a host name cannot begin with {name[0]!r}" if name else "a host name is missing here")
    choices: list[list[str]] = []
    count = 1
    for piece in re.split(r"(\[[^\]]*\])", name):
        if piece.startswith("["):
            ranges = list(_ranges(position + 1, piece[1:-1]))
            count *= sum(len(numbers) for numbers, _ in ranges)
            _bound(count, position, room)
            choices.append([f"{number:0{width}d}" for numbers, width in ranges for number in numbers])
        else:
            choices.append([_literal(position, piece)])
        position += len(piece)
    yield from map("".join, itertools.product(*choices))


def _literal(position: int, piece: str) -> str:
    for offset, character in enumerate(piece):
        if not _LETTERS.fullmatch(character):
            reason = f"{character!r} cannot stand in a host name; use letters, digits, dots, dashes and underscores"
            raise _Fault(position + offset, reason)
    return piece


def _ranges(position: int, group: str) -> Iterator[tuple[range, int]]:
    """Yields the numbers of each part of a bracket group, and how many digits each has at least."""
    for part in group.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise _Fault(position, f"{_excerpt(part)} is no number and no range; write 7 or 3-9")
        low, high = match[1], match[2] or match[1]
        _bound(len(high) - DIGITS + MOST_HOSTS, position)  # python itself refuses to read very long numbers
        if int(low) > int(high):
            raise _Fault(position, f"the range {part} runs backwards; write {high}-{low}")
        if high.startswith("0") and len(high) > max(len(low), 1):
            raise _Fault(
                position, f"the range {part} pads only its end with zeros; write {low.zfill(len(high))}-{high}"
            )
        yield range(int(low), int(high) + 1), len(low) if low.startswith("0") else 1
        position += len(part) + 1


def _bound(count: int, position: int, room: int = MOST_HOSTS) -> None:
    if count > room:
        raise _Fault(position, f"more than {MOST_HOSTS} hosts in all; look for a digit too many")


def _line(line: str) -> list[HostSlots]:
    """Returns the hosts of one line of a host file; none for a blank one."""
    if not line:
        return []
    item, *words = line.split(maxsplit=1)
    if len(list(_items(item))) > 1:
        raise _Fault(0, "one host, or one bracket range, a line; a comma belongs into --hosts")
    hosts = list(_item(0, item))
    if not words:
        return hosts
    match = _SLOTS.fullmatch(words[0])
    if match is None:
        raise _Fault(0, f"{_excerpt(words[0])} after the host is not understood; write `{_short(item)} slots=4`")
    if hosts[0].slots is not None:
        raise _Fault(0, f"slots are given twice, as :{hosts[0].slots} and as {words[0]}; keep one")
    return [HostSlots(host.name, _slot_count(0, match[1])) for host in hosts]


def _where(text: str, position: int) -> str:
    """Returns the list, or what of it stands around a place, and the place."""
    begin = max(0, position - SHOWN // 2)
    piece = text[begin : begin + SHOWN]
    shown = ("…" if begin else "") + piece + ("…" if begin + SHOWN < len(text) else "")
    return f"{shown!r}, character {position + 1}"


def _excerpt(text: str) -> str:
    return repr(_short(text))


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"
