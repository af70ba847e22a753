"""Floor 4: a model over several devices: where it is cut, and what each stage does when.

layers    what each layer of a model costs, and what devices and links can do
balance   the cuts of which none is better, by an exact dynamic programme
"""

from __future__ import annotations

__all__: list[str] = []
