"""What GPUs there are, how they are joined, and who uses them: as `nvidia-smi` tells it.

Tests have nvidia-smi's answers as texts: none was run on a machine with GPUs yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from samestep.doctor.line import Line, fine
from samestep.doctor.software import said_by
from samestep.launch.devices import DRIVER
from samestep.reporting.words import size

__all__: list[str] = []

FIELDS = "index,name,memory.total,memory.used,driver_version,compute_mode"
USED = 0.1  # of a GPU's memory
MIB = 1 << 20


@dataclass(frozen=True)
class Card:
    """One GPU."""

    index: int
    name: str
    total: int
    used: int
    driver: str
    mode: str


def look() -> Iterator[Line]:
    """Yields what there is."""
    code, said = said_by(["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"])
    if code != 0:
        yield _none(said)
        return
    cards = read_cards(said)
    users = said_by(["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"])[1]
    yield from judge(cards, users.splitlines())
    if len(cards) > 1:
        yield from topology(said_by(["nvidia-smi", "topo", "-m"])[1], len(cards))


def _none(said: str) -> Line:
    if DRIVER.is_dir() and any(DRIVER.iterdir()):
        effect = "torch finds no GPU, or fails at the first call"
        text = f"the driver knows some, and nvidia-smi fails: {said.splitlines()[0] if said else 'no answer'}"
        return Line("GPUs", "error", text, effect, "reboot after a driver's update; docker run --gpus all")
    return fine("GPUs", "none; training on the CPU")


def read_cards(text: str) -> list[Card]:
    """Reads nvidia-smi's table.

    >>> read_cards("0, NVIDIA H100 80GB HBM3, 81559, 4, 550.54.15, Default")[0].name
    'NVIDIA H100 80GB HBM3'
    """
    cards = []
    for line in text.splitlines():
        index, name, total, used, driver, mode = (word.strip() for word in line.split(","))
        numbers = [int(word) * MIB if word.isdecimal() else 0 for word in (total, used)]
        cards.append(Card(int(index), name, numbers[0], numbers[1], driver, mode))
    return cards


def judge(cards: list[Card], users: list[str]) -> Iterator[Line]:
    """Yields a line for each kind of GPU, and one for each that is in use, or open to one process alone."""
    names = sorted({card.name for card in cards})
    driver = cards[0].driver if cards else "?"
    kinds = ", ".join(f"{sum(card.name == name for card in cards)} x {name}" for name in names)
    if len(names) > 1:
        effect = "the slowest sets the pace of every step"
        yield Line("GPUs", "note", f"{kinds}, driver {driver}", effect, "choose those alike: CUDA_VISIBLE_DEVICES")
    else:
        memory = size(cards[0].total) if cards else "?"
        yield fine("GPUs", f"{kinds} of {memory}, driver {driver}")
    for card in cards:
        if card.total and card.used > USED * card.total:
            by = f"; {'; '.join(users)}" if users else ""
            others = ",".join(str(other.index) for other in cards if other.used <= USED * other.total)
            effect = "less memory, and slower: out of memory in mid-training"
            text = f"GPU {card.index} holds {size(card.used)} already{by}"
            yield Line("GPUs", "warning", text, effect, f"export CUDA_VISIBLE_DEVICES={others}" if others else "")
        if card.mode == "Prohibited":
            effect = "no process can use it"
            yield Line("GPUs", "error", f"GPU {card.index} is closed", effect, f"nvidia-smi -i {card.index} -c 0")


def topology(text: str, cards: int) -> Iterator[Line]:
    """Yields how the GPUs are joined, at worst: NVLink, PCIe, or through the processors."""
    rows = [line.split() for line in text.splitlines() if line.startswith("GPU")]
    ways = {way for row in rows for way in row[1 : cards + 1] if way != "X"}
    if not ways:
        return
    worst = next((way for way in ("SYS", "NODE", "PHB", "PXB", "PIX") if way in ways), "NVLink")
    told = {
        "SYS": "some only across sockets",
        "NODE": "some only across the host's bridges",
        "PHB": "some only through the processor",
        "PXB": "over PCIe switches",
        "PIX": "over one PCIe switch",
    }
    yield fine("GPU links", told.get(worst, "NVLink") + f" ({', '.join(sorted(ways))}: nvidia-smi topo -m)")
