"""What keeps a saved state from fitting an object, in few lines: what differs alike is told once.

A model with one layer more, or under another name, differs in every tensor, and its optimizer once more in each. Told
tensor by tensor that is a page; here

    model: its names begin with "net." in the model, and do not in the checkpoint (24 tensors)
    model: 6 tensors in the model, not in the checkpoint: head.weight, head.bias, …
    optimizer: 24 of 24 parameters have another shape; parameter 0 of group 0 has shape [5] in the checkpoint, [4] here
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

__all__: list[str] = []

MOST = 4  # differences of a kind that are told one by one
_SHOWN = 3  # names of more


def of_modules(saved: Any, present: dict[str, Any]) -> Iterator[str]:
    """Yields what keeps the state of a module from fitting another, a line each."""
    if not isinstance(saved, Mapping) or not all(isinstance(key, str) for key in saved):
        yield f": the checkpoint holds a {type(saved).__name__} for a module"
        return
    gone, fresh = sorted(saved.keys() - present.keys()), sorted(present.keys() - saved.keys())
    if (renamed := _prefixes(gone, fresh)) is not None:
        yield _told_renamed(*renamed, len(gone))
    else:
        yield from _folded(gone, "in the checkpoint, not in the model")
        yield from _folded(fresh, "in the model, not in the checkpoint")
    forms = {key: (_form(saved[key]), _form(present[key])) for key in sorted(saved.keys() & present.keys())}
    changed = [
        f".{key}: {was} in the checkpoint, {now} in the model" for key, (was, now) in forms.items() if was != now
    ]
    yield from changed if len(changed) <= MOST else changed[:1]
    if len(changed) > MOST:
        yield f": {len(changed) - 1} more tensors have another shape or type"


def of_shapes(saved: Any, present: list[Any]) -> Iterator[str]:
    """Yields what keeps the state of an optimizer from fitting another, by the shapes of its parameters."""
    if not isinstance(saved, list) or not all(isinstance(group, list) for group in saved):
        yield "the checkpoint does not say which parameters it had"
        return
    was, now = [len(group) for group in saved], [len(group) for group in present]
    if was != now:
        yield f"groups of {was} parameters in the checkpoint, of {now} here"
        return
    changed = [
        f"parameter {j} of group {i} has shape {old_shape} in the checkpoint, {new_shape} here"
        for i, (old, new) in enumerate(zip(saved, present, strict=True))
        for j, (old_shape, new_shape) in enumerate(zip(old, new, strict=True))
        if old_shape != new_shape
    ]
    count = f"{len(changed)} of {sum(now)} parameters have another shape; " if len(changed) > 1 else ""
    yield from (f"{count}{line}" for line in changed[:1])


def _folded(keys: Sequence[str], where: str) -> Iterable[str]:
    if len(keys) <= MOST:
        return [f".{key}: {where}" for key in keys]
    rest = ", …" if len(keys) > _SHOWN else ""
    return [f": {len(keys)} tensors {where}: {', '.join(keys[:_SHOWN])}{rest}"]


def _told_renamed(was: str, now: str, count: int) -> str:
    if was and now:
        return f": the names of {count} tensors begin with {was!r} in the checkpoint, with {now!r} in the model"
    if now:
        return f": the names of {count} tensors begin with {now!r} in the model, and do not in the checkpoint"
    return f": the names of {count} tensors begin with {was!r} in the checkpoint, and do not in the model"


def _prefixes(gone: Sequence[str], fresh: Sequence[str]) -> tuple[str, str] | None:
    """Returns how the names in the checkpoint and in the model begin, where that alone is what differs.

    >>> names = ["0.bias", "0.weight", "2.bias", "2.weight", "4.bias"]
    >>> _prefixes(names, [f"net.{name}" for name in names])
    ('', 'net.')
    """
    if len(gone) <= MOST or len(gone) != len(fresh):
        return None
    there, wanted = _common(gone), set(fresh)
    for was in there:
        for now in _common(fresh):
            if {now + key.removeprefix(was) for key in gone} == wanted:
                return was, now
    return None


def _common(keys: Sequence[str]) -> list[str]:
    """What all keys begin with, up to a dot; the shortest first."""
    first, last = keys[0].split("."), keys[-1].split(".")  # sorted: what these two share, all share
    alike = 0
    while alike < min(len(first), len(last)) - 1 and first[alike] == last[alike]:
        alike += 1
    return ["".join(f"{piece}." for piece in first[:count]) for count in range(alike + 1)]


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__
