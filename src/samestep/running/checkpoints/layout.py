"""Which tensors lie in which file of a checkpoint, as its manifest says. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from samestep.running.checkpoints.grid import file_of, shape_of
from samestep.running.checkpoints.manifest import PAYLOAD, Manifest

__all__: list[str] = []


@dataclass
class Payload:
    """What one file holds.

    Attributes:
        name: of the file.
        manifest: of the checkpoint.
        held: name of a tensor -> which of its cells lies here; None where it lies here whole.
    """

    name: str
    manifest: Manifest
    held: dict[str, int | None] = field(default_factory=dict)

    def entry(self, name: str) -> dict[str, Any]:
        """Returns dtype and shape of what lies here of a tensor."""
        number, entry = self.held[name], self.manifest.tensors[name]
        return entry if number is None else {**entry, "shape": shape_of(self.manifest.parts[name], number)}

    def places(self) -> Iterator[tuple[str, list[int]]]:
        """Yields each tensor with [first byte, byte after the last, CRC-32]; nothing in schema 1."""
        if self.manifest.places:
            for name, number in self.held.items():
                place: Any = self.manifest.places[name]
                yield name, place if number is None else place[number]


def payloads(manifest: Manifest) -> dict[str, Payload]:
    """Returns the files with tensors, by name; the first one is always there."""
    found = {PAYLOAD: Payload(PAYLOAD, manifest)}
    for name in manifest.tensors:
        if name not in manifest.parts:
            found[PAYLOAD].held[name] = None
            continue
        for number, rank in enumerate(manifest.parts[name]["ranks"]):
            file = file_of(rank)
            found.setdefault(file, Payload(file, manifest)).held[name] = number
    return found
