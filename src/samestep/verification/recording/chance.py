"""Random numbers that a script draws while it trains: kept on the ranks, and handed out again when it runs alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

from samestep.runtime.digest import digest
from samestep.verification.journal import TraceWriter

# draws that make an order of samples
ORDERING = {"torch.randperm", "torch.multinomial", "numpy.random.permutation", "numpy.random.choice", "random.sample"}
_MOST = 1 << 22  # numbers of one draw that are kept
MOST_BEFORE = 256  # draws of a window that are kept though nothing of it has been seen yet, where no loader is used


class Draws:
    """The draws of one process, told apart by window, line and their number there."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()
        self._window = -1
        self._count = {True: 0, False: 0}  # of the window at hand, with gradients and without

    def place(self, window: int, where: str) -> str:
        """Returns what a draw is called: the same on every rank, and alone."""
        import torch

        if window != self._window:
            self._window = window
            self._seen.clear()
            self._count = {True: 0, False: 0}
        self._seen[where] += 1
        self._count[torch.is_grad_enabled()] += 1
        return f"{window}|{where}|{self._seen[where]}"

    @property
    def count(self) -> int:
        """How many there have been in the window at hand, of those like the last: with gradients, or without."""
        import torch

        return self._count[torch.is_grad_enabled()]


def keep(journal: TraceWriter, place: str, name: str, value: Any, *, within: bool) -> None:
    """Writes a draw down; `within` says that the samples of its window were there."""
    import torch

    tensor = as_tensor(value)
    about = {"place": place, "name": name, "within": within, "trains": torch.is_grad_enabled()}
    if tensor is None or tensor.numel() > _MOST:
        journal.write("draw", **about, shape=None, digest=None, kept=None)
        return
    kept = journal.keep(tensor.detach().cpu())
    shape = list(tensor.shape)
    digested = digest(torch.as_tensor(tensor))
    about |= {"whole": are_whole(tensor), "is_one_number": _is_one_number(tensor)}
    journal.write("draw", **about, shape=shape, digest=digested, kept=kept)


def begins_parameters(name: str) -> bool:
    """Whether a draw is one of those that begin parameters, too: in place, or by a library."""
    return name.endswith("_") or ":" in name


def note_order(journal: TraceWriter, where: str, name: str, value: Any, key: str) -> None:
    """Writes down that an order of samples was drawn while the loader of a key loads, and what tells it from others."""
    import torch

    tensor = as_tensor(value)
    if tensor is not None and tensor.numel() > 1:
        journal.write("order", key=key, where=where, name=name, digest=digest(torch.as_tensor(tensor)))


def _is_one_number(tensor: Any) -> bool:
    """Whether a draw has come to one number everywhere: noise of a probability, or a scale, of 0 or 1."""
    return bool(tensor.numel()) and bool((tensor == tensor.flatten()[0]).all())


def are_whole(tensor: Any) -> bool:
    return tensor.dim() > 0 and not tensor.is_floating_point() and not tensor.is_complex()


def as_tensor(value: Any) -> Any:
    """Returns numbers as a tensor, None where they are none."""
    import torch

    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def joined_draws(name: str, own: Any, parts: list[Any], *, strided: bool = False) -> Any | None:
    """Returns the `parts` that ranks have drawn, as one process, which drew `own`, would have; None where it cannot be.

    They are `strided` where the ranks take turns along dim 0, as samples[rank::world_size] cuts.
    """
    import torch

    from samestep.verification.numerics import in_turns

    mine = as_tensor(own)
    if mine is None or any(part.dtype != mine.dtype for part in parts):
        return None
    if all(torch.equal(part, parts[0]) for part in parts) and parts[0].shape == mine.shape:
        whole = parts[0]
    elif parts[0].dim() and sum(len(part) for part in parts) == (len(mine) if mine.dim() else -1):
        if name == "torch.randperm" or all(map(_is_permutation, parts)):  # of positions in each rank's part
            starts = [sum(len(part) for part in parts[:i]) for i in range(len(parts))]
            parts = [part + start for part, start in zip(parts, starts, strict=True)]
        whole = in_turns(parts) if strided else torch.cat(parts)
    else:
        return None
    return _in_the_form_of(own, whole) if whole.shape == mine.shape else None


def _is_permutation(part: Any) -> bool:
    import torch

    is_whole = part.dim() == 1 and len(part) > 1 and not part.is_floating_point() and not part.is_complex()
    return is_whole and bool(part.sort().values.equal(torch.arange(len(part), dtype=part.dtype)))


def _in_the_form_of(own: Any, whole: Any) -> Any:
    import torch

    if isinstance(own, torch.Tensor):
        return whole.to(own.device).requires_grad_(own.requires_grad)
    if hasattr(own, "dtype") and hasattr(own, "shape"):
        return whole.numpy().astype(own.dtype).reshape(own.shape)[()]  # a number stays one, which can be a key
    return type(own)(whole.item()) if whole.dim() == 0 else type(own)(whole.tolist())
