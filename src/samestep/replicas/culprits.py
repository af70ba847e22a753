"""Which ranks brought gradients that are not finite: what each has noted of its own, and what they tell each other.

After the reduction a NaN of one rank is in the gradients of all. So what a rank has brought is noted before it: a small
tensor, which DistributedDataParallel copies into its bucket, is kept until the optimizer steps [1]; where `.grad` is a
view of the bucket already (zero_grad(set_to_none=False)) its sum is kept [2], and of a large one only where the guard
is thorough [3]. To keep large ones too costs 0.6 ms of a 41 ms step with 5 M parameters, since the memory that is freed
at once is in the cache when backward asks for the next. Otherwise large averaged gradients are probed: the first row
and one column, since a matrix's gradient is the product of what came forward and what came back, so one bad number of
either spoils a row or a column. A second backward in one step adds to gradients that are averaged already: what is
noted there counts only where nothing was found before. On virtual ranks every slice is noted separately.

Only a rank that has found something asks, and all find the same, since averaged gradients are equal. One that finds
something alone would wait for ever: its gradients were changed after the average, and on it alone. So it waits for a
while, and then says just that. Synchronised BatchNorm spreads what is not finite to all ranks, in the forward of what
is behind it and in the backward of what is before it. There the rank is named whose backward met it first; where
several did, the one whose input was bad; and where no input is left to look at, that the rank is not known.
"""

from __future__ import annotations

import functools
import json
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store

from samestep.runtime.axis import Axis
from samestep.runtime.step_state import StepState
from samestep.runtime.store_messages import decode_message
from samestep.runtime.virtual import VirtualRanks

LARGE = 1 << 17  # elements from which on a glance costs less than a sum, and a tensor is not kept
Probe = Callable[[Tensor], Tensor]

HELD_MOST = 256 << 20  # bytes of gradients that are kept whole
SUMMED_MOST = 1 << 20  # elements of an output whose gradient is added up
INPUTS_MOST = 256  # tensors of a step that went into forwards


@dataclass(frozen=True)
class NonFiniteTensor:
    name: str  # the parameter's
    nans: int  # how many of its elements are NaN, -1 where only its sum is known
    infs: int  # likewise infinite
    size: int  # elements of it

    @property
    def is_large(self) -> bool:
        """Whether a probe does not see all of it."""
        return self.size > LARGE

    @property
    def state(self) -> str:
        kinds = [f"{number:,} {kind}" for number, kind in ((self.nans, "NaN"), (self.infs, "Inf")) if number > 0]
        return f"holds {' and '.join(kinds) or 'NaN or Inf'} among {self.size:,} elements"

    def __str__(self) -> str:
        return f"{self.name} {self.state}"


def examined(name: str, gradient: Tensor) -> NonFiniteTensor | None:
    """Returns what is not finite in a gradient, None where all is. Waits for the device."""
    values = values_of(gradient)
    if bool(torch.isfinite(values).all()):
        return None
    nans = int(torch.isnan(values).sum())
    return NonFiniteTensor(name, nans, int((~torch.isfinite(values)).sum()) - nans, gradient.numel())


def values_of(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout == torch.strided else gradient._values()  # noqa: SLF001


def summed(gradient: Tensor) -> Tensor:
    """Returns the sum of a gradient, which is finite only if every element is: one pass, the cheapest there is.

    float16, whose sums overflow at 65504, is added in float32.
    """
    values = values_of(gradient)
    return values.sum(dtype=torch.float32) if values.dtype == torch.float16 else values.sum()


def probe_row_and_column(gradient: Tensor, *, with_column: bool = True) -> Tensor:
    """Returns the sum of a gradient or, of a large matrix or kernel, of its first row and one column.

    A convolution's column is that of its kernel's centre, which no padding cuts off.
    """
    if gradient.numel() <= LARGE or gradient.dim() < 2 or gradient.layout != torch.strided:
        return summed(gradient)
    row = summed(gradient[0])
    if not with_column:
        return row
    column = gradient[:, 0]
    for size in gradient.shape[2:]:
        column = column[:, size // 2]
    return row + summed(column)


def choose_probe(name: str, names: Collection[str], *, thorough: bool) -> Probe:
    if thorough:
        return summed
    has_bias = name.endswith("weight") and f"{name.removesuffix('weight')}bias" in names
    return functools.partial(probe_row_and_column, with_column=not has_bias)


@dataclass
class _Noted:
    gradient: Tensor  # the gradient, or its sum
    size: int
    whole: bool
    accumulated: bool  # it was added to a gradient that is averaged already
    slice: int | None = None  # the virtual rank that it came with

    def bad(self, name: str) -> NonFiniteTensor | None:
        if self.whole:
            return examined(name, self.gradient)
        return None if bool(torch.isfinite(self.gradient)) else NonFiniteTensor(name, -1, -1, self.size)


class LocalGradientLog:
    """What this rank's backwards have brought to the step under way."""

    def __init__(
        self, module: nn.Module, state: StepState, *, thorough: bool, virtual: VirtualRanks | None = None
    ) -> None:
        self._state = state
        self.is_thorough = thorough
        self._virtual = virtual
        self._step = state.steps
        self._noted: dict[str, list[_Noted]] = {}  # in the order in which the backward reached them
        self._averaged: dict[str, int] = {}  # where the views into the buckets lie
        self._output_gradients: list[Tensor] = []
        self._inputs: deque[weakref.ref[Tensor]] = deque(maxlen=INPUTS_MOST)
        self._watched: dict[str, weakref.ref[Tensor]] = {}
        self._whole = False
        self.watch(module)

    def watch(self, module: nn.Module) -> None:
        """Watches the parameters that want a gradient now; more than once does no harm."""
        trained = [(name, tensor) for name, tensor in module.named_parameters() if tensor.requires_grad]
        kept = sum(tensor.nbytes for _, tensor in trained if tensor.numel() <= LARGE)
        self._whole = self._virtual is None and kept <= HELD_MOST
        for name, tensor in trained:
            if tensor.numel() > LARGE and not self.is_thorough:
                continue
            known = self._watched.get(name)
            if known is None or known() is not tensor:
                self._watched[name] = weakref.ref(tensor)
                watch: Any = tensor.register_post_accumulate_grad_hook
                watch(functools.partial(self._note, name))

    def _note(self, name: str, parameter: Tensor) -> None:
        """Runs when a backward has come to a parameter, and before its gradient is averaged."""
        gradient, virtual = parameter.grad, self._virtual
        if gradient is None or (virtual is None and not self._state.step_ends):
            return
        self._begin()
        dense = gradient.layout == torch.strided
        accumulated = dense and virtual is None and gradient.data_ptr() == self._averaged.get(name)
        if self._whole and dense and not accumulated and gradient.numel() <= LARGE:  # [1]
            self._noted.pop(name, None)
            self._noted[name] = [_Noted(gradient, gradient.numel(), whole=True, accumulated=False)]
        else:  # [2], [3]
            place = None if virtual is None or virtual.current is None else virtual.first + virtual.current
            noted = _Noted(summed(gradient), gradient.numel(), whole=False, accumulated=accumulated, slice=place)
            self._noted.setdefault(name, []).append(noted)

    def begin_backward(self) -> None:
        """A backward comes after which the optimizer has not stepped: its gradients will be added to averaged ones."""
        for name in self._noted if self._virtual is None else ():
            parameter = self._watched[name]()
            if parameter is not None:
                self._find_view(name, parameter.grad)

    def _find_view(self, name: str, gradient: Tensor | None) -> None:
        if gradient is not None and gradient.layout == torch.strided:
            self._averaged[name] = gradient.data_ptr()

    def note_inputs(self, tensors: Iterable[Tensor]) -> None:
        """Notes what goes into a forward, for as long as somebody else holds it."""
        self._begin()
        real = (tensor for tensor in tensors if tensor.is_floating_point() and tensor.itemsize > 1)
        self._inputs.extend(map(weakref.ref, real))

    def _bad_input(self) -> str | None:
        """How the first input of the step is that is not finite; None where all that are left are."""
        left = (tensor for reference in self._inputs if (tensor := reference()) is not None)
        return next((bad.state for tensor in left if (bad := examined("", tensor.detach())) is not None), None)

    def note_output_gradient(self, gradient: Tensor) -> None:
        if gradient.numel() <= SUMMED_MOST:
            self._begin()
            self._output_gradients.append(summed(gradient))

    def _begin(self) -> None:
        """Forgets a step after which no optimizer stepped: a GradScaler met an overflow, say."""
        if self._state.steps != self._step:
            self.clear()
            self._step = self._state.steps

    def mark_finite(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """The gradients of these parameters are finite: what was kept of them goes."""
        self._output_gradients.clear()
        self._inputs.clear()
        for name, parameter in named:
            self._noted.pop(name, None)
            self._find_view(name, parameter.grad)

    def clear(self) -> None:
        self._noted.clear()
        self._output_gradients.clear()
        self._inputs.clear()

    def findings(self) -> dict[str, Any]:
        """Returns the first in the order of the backward, of the bad tensors that are likeliest this rank's own.

        An "uncertainty" of 0 says that it is this rank's for sure, n that it was found when the n-th backward of the
        step added to averaged gradients; "order" says how many tensors the backward had come to before it, and
        "arrived" whether what the loss gave back was not finite already, None where it was not noted.
        """
        found = []
        for order, (name, all_noted) in enumerate(self._noted.items()):
            for number, noted in enumerate(all_noted, start=1):
                if (bad := noted.bad(name)) is not None:
                    found.append((number if noted.accumulated else 0, order, f"{name[:_MAX_NAME]} {bad.state}"))
                    break
        if not found:
            return {"bad": None}
        uncertainty, order, text = min(found)
        given_back = [bool(torch.isfinite(total)) for total in self._output_gradients]
        return {
            "bad": text,
            "uncertainty": uncertainty,
            "order": order,
            "arrived": not all(given_back) if given_back else None,
            "slices": self.bad_slices(),
            "input": self._bad_input(),
        }

    def bad_slices(self) -> list[int]:
        pairs = [(name, noted) for name, all_noted in self._noted.items() for noted in all_noted]
        return sorted({noted.slice for name, noted in pairs if noted.slice is not None and noted.bad(name) is not None})


# --- between the ranks ------------------------------------------------------------------------

TIMEOUT_S = 30.0  # for the other ranks to come to their optimizer's step, too
_MAX_NAME = 400  # characters of a name in it

FINDINGS = (
    {"bad": None},
    {"bad": str, "uncertainty": int, "order": int, "arrived": bool | None, "slices": list[int], "input": str | None},
)
_SINCE = {
    True: ": what its loss gave back was not finite, either",
    False: ": its loss gave back finite numbers",
    None: "",
}


@dataclass(frozen=True)
class Culprits:
    text: str  # a sentence
    ranks: tuple[int, ...]  # those that brought them; empty where they are not known


def find_culprits(
    bad: Sequence[NonFiniteTensor], local: LocalGradientLog | None, axis: Axis, subject: str, *, spreads: bool = False
) -> Culprits:
    """Returns the ranks that brought these averaged gradients, in the order of a backward. Collective.

    `subject` says of which model, and for the how many-th time; `spreads` that it has synchronised BatchNorm.
    """
    here = axis.ranks[axis.rank]
    if local is None or axis.control is None:
        slices = "" if local is None else _in_slices(local.bad_slices())
        return Culprits(f"the gradient of {bad[0]}{slices}{_and_more(bad)}", (here,))
    try:
        findings = _exchange(axis, subject, local.findings())
    except RuntimeError:  # the store's, for a rank that is silent or gone
        text = (
            f"the gradient of {bad[0]}{_and_more(bad)} on rank {here}, and within {TIMEOUT_S:g} s no other rank found "
            "the same: it was changed on this rank alone, after it was averaged"
        )
        return Culprits(text, (here,))
    seen = local.is_thorough or not bad[0].is_large
    return _decide(bad, dict(zip(axis.ranks, findings, strict=True)), seen=seen, spreads=spreads)


def _decide(
    bad: Sequence[NonFiniteTensor], findings: dict[int, dict[str, Any]], *, seen: bool, spreads: bool
) -> Culprits:
    own = {rank: one for rank, one in findings.items() if one["bad"] is not None}
    if not own:
        why = (
            "those of each rank were finite, so it was changed after they were averaged"
            if seen
            else "its rank is not known: of large tensors, nonfinite='stop' tells it"
        )
        return Culprits(f"the gradient of {bad[0]}{_and_more(bad)} on all ranks; {why}", ())
    sure = min(one["uncertainty"] for one in own.values())
    ranks = tuple(rank for rank, one in own.items() if one["uncertainty"] == sure)
    spread = ""
    if spreads and len(ranks) > 1:
        ranks, spread = _before_batchnorm(ranks, findings)
    first = own[ranks[0]]
    others = " (and rank " + "'s, rank ".join(map(str, ranks[1:])) + "'s)" if len(ranks) > 1 else ""
    what = f"{first['bad']}{_in_slices(first['slices'])}{_SINCE[first['arrived']]}"
    count = f"{len(bad)} tensor{'s' if len(bad) > 1 else ''}"
    return Culprits(
        f"rank {ranks[0]}'s{others} gradient of {what}. {spread}Averaged, {count} had it on all ranks", ranks
    )


def _before_batchnorm(ranks: tuple[int, ...], findings: dict[int, dict[str, Any]]) -> tuple[tuple[int, ...], str]:
    """Returns where among `ranks` it began before synchronised BatchNorm spread it, as far as can be told."""
    earliest = min(findings[rank]["order"] for rank in ranks)
    first = tuple(rank for rank in ranks if findings[rank]["order"] == earliest)
    if len(first) == 1:  # the others have it from a layer below: their backwards came to it later
        return first, "Synchronised BatchNorm carried it to the other ranks. "
    if inputs := [rank for rank in first if findings[rank]["input"] is not None]:
        said = f"Its input {findings[inputs[0]]['input']}, which synchronised BatchNorm carried to the other ranks. "
        return tuple(inputs), said
    return first, "Synchronised BatchNorm carries it from one rank to all, so where it began is not known. "


def _in_slices(slices: Sequence[int]) -> str:
    """Says which virtual ranks' samples it came with, where there are any."""
    if not slices:
        return ""
    return f", in the slice{'s' if len(slices) > 1 else ''} of virtual rank {', '.join(map(str, slices))}"


def _and_more(bad: Sequence[NonFiniteTensor]) -> str:
    return f", and {len(bad) - 1} more tensors are like it" if len(bad) > 1 else ""


def _exchange(axis: Axis, subject: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns every rank's findings.

    Through the store on which the ranks met, and not through a group: where one is alone with its finding, the others
    go on, and their next collective would take its message for an answer.
    """
    store = _get_default_store()
    names = [f"samestep/nonfinite/{axis.ranks[0]}/{subject}/{rank}" for rank in axis.ranks]
    store.set(names[axis.rank], json.dumps(mine))
    store.wait(names, timedelta(seconds=TIMEOUT_S))
    return [decode_message(store.get(name), *FINDINGS, of="what a rank found in its gradients") for name in names]
