"""What GPUs there are, how they are joined, and who uses them: as `nvidia-smi` tells it.

Tests have nvidia-smi's answers as texts: none was run on a machine with GPUs yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from samestep.doctor.finding import Finding, Level, as_root, ok
from samestep.doctor.software import cuda_of_torch, said_by, with_driver
from samestep.launch.resources import DRIVER
from samestep.text import format_bytes

FIELDS = "index,name,memory.total,memory.used,driver_version,compute_mode,uuid"
CAPABILITY = ",compute_cap"  # which a driver that is older than torch needs does not know
USERS = "gpu_uuid,pid,process_name,used_memory"
USED = 0.1  # of a GPU's memory
MIB = 1 << 20
CLOSED: dict[str, tuple[Level, str, str]] = {
    "Prohibited": ("error", "is in compute mode Prohibited", "no process can use it"),
    "Exclusive_Process": ("note", "is open to one process alone", "a second one on it ends with 'busy'"),
}


@dataclass(frozen=True)
class Card:
    index: int
    name: str
    total: int
    used: int
    driver: str
    mode: str
    uuid: str = ""
    capability: str = ""


@dataclass(frozen=True)
class User:
    uuid: str
    pid: int
    name: str
    memory: str

    def __str__(self) -> str:
        return f"{self.pid} {self.name} ({self.memory})"


def check() -> Iterator[Finding]:
    code, said = _query(FIELDS + CAPABILITY)
    if code > 0 and "compute_cap" in said:
        code, said = _query(FIELDS)
    if code != 0:
        yield _none(said)
        return
    cards = read_cards(said)
    users = read_users(said_by(["nvidia-smi", f"--query-compute-apps={USERS}", "--format=csv,noheader"])[1])
    yield from judge(cards, users)
    yield from with_driver(cuda_of_torch(), cards[0].driver, {card.name: card.capability for card in cards})
    if len(cards) > 1:
        yield from topology(said_by(["nvidia-smi", "topo", "-m"])[1], len(cards))


def _query(fields: str) -> tuple[int, str]:
    return said_by(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"])


def _none(said: str) -> Finding:
    if DRIVER.is_dir() and any(DRIVER.iterdir()):
        effect = "torch finds no GPU, or fails at the first call"
        text = f"the driver knows some, and nvidia-smi fails: {said.splitlines()[0] if said else 'no answer'}"
        fix = as_root("modprobe nvidia && nvidia-smi") + "  # after a driver's update: reboot; docker run --gpus all"
        return Finding("GPUs", "error", text, effect, fix)
    return ok("GPUs", "none; training on the CPU")


def read_cards(text: str) -> list[Card]:
    """Reads nvidia-smi's table.

    >>> read_cards("0, NVIDIA H100 80GB HBM3, 81559, 4, 550.54.15, Default")[0].name
    'NVIDIA H100 80GB HBM3'
    """
    cards = []
    for line in text.splitlines():
        index, name, total, used, *more = (word.strip() for word in line.split(","))
        numbers = [int(word) * MIB if word.isdecimal() else 0 for word in (total, used)]
        cards.append(Card(int(index), name, numbers[0], numbers[1], *more))
    return cards


def read_users(text: str) -> list[User]:
    """Reads who uses them; what is in another form says that nobody does, or that it is not told.

    >>> read_users("GPU-1f, 4242, python, 70000 MiB")
    [User(uuid='GPU-1f', pid=4242, name='python', memory='70000 MiB')]
    """
    users = []
    for line in text.splitlines():
        uuid, _, rest = line.partition(", ")
        pid, _, rest = rest.partition(", ")
        name, _, memory = rest.rpartition(", ")
        if pid.isdecimal():
            users.append(User(uuid, int(pid), name, memory))
    return users


def judge(cards: list[Card], users: list[User]) -> Iterator[Finding]:
    """Yields a line for each kind of GPU, who uses them, and one for each in use, or open to one process alone."""
    names = sorted({card.name for card in cards})
    driver = cards[0].driver if cards else "?"
    kinds = ", ".join(f"{sum(card.name == name for card in cards)} x {name}" for name in names)
    if len(names) > 1:
        effect = "the slowest sets the pace of every step"
        most = max(names, key=lambda name: sum(card.name == name for card in cards))
        same = ",".join(str(card.index) for card in cards if card.name == most)
        yield Finding("GPUs", "note", f"{kinds}, driver {driver}", effect, f"export CUDA_VISIBLE_DEVICES={same}")
    else:
        memory = format_bytes(cards[0].total) if cards else "?"
        yield ok("GPUs", f"{kinds} of {memory}, driver {driver}")
    for card in cards:
        theirs = [user for user in users if user.uuid == card.uuid]
        if card.total and card.used > USED * card.total:
            yield _in_use(card, theirs, cards)
        elif theirs:
            yield ok("GPU users", f"GPU {card.index}: {'; '.join(map(str, theirs))}")
        if card.mode in CLOSED:
            level, text, effect = CLOSED[card.mode]
            fix = as_root(f"nvidia-smi -i {card.index} -c 0")
            yield Finding("GPUs", level, f"GPU {card.index} {text}", effect, fix)


def _in_use(card: Card, users: list[User], cards: list[Card]) -> Finding:
    by = f"; {'; '.join(map(str, users))}" if users else "; by whom is not told here"
    others = ",".join(str(other.index) for other in cards if other.used <= USED * other.total)
    effect = "less memory, and slower: out of memory in mid-training"
    if others:
        fix = f"export CUDA_VISIBLE_DEVICES={others}"
    elif users:
        fix = f"kill {' '.join(str(user.pid) for user in users)}  # if they are yours, and no longer wanted"
    else:
        fix = "nvidia-smi  # who holds it; in a container ask outside it"
    return Finding("GPUs", "warning", f"GPU {card.index} holds {format_bytes(card.used)} already{by}", effect, fix)


def topology(text: str, cards: int) -> Iterator[Finding]:
    """Yields how the GPUs are joined, at worst: NVLink, PCIe, or through the processors."""
    rows = [line.split() for line in text.splitlines() if line.startswith("GPU")]
    ways = {way for row in rows for way in row[1 : cards + 1] if way != "X"}
    if not ways:
        return
    worst = next((way for way in ("SYS", "NODE", "PHB", "PXB", "PIX") if way in ways), "NVLink")
    words = {
        "SYS": "some only across sockets",
        "NODE": "some only across the host's bridges",
        "PHB": "some only through the processor",
        "PXB": "over PCIe switches",
        "PIX": "over one PCIe switch",
    }
    yield ok("GPU links", words.get(worst, "NVLink") + f" ({', '.join(sorted(ways))}: nvidia-smi topo -m)")
