"""Before a step the ranks of a replica make sure that they are about to take the same one.

    rank 0, first stage    8 samples of shape [6] in 4 micro-batches      takes the inputs
    rank 1, last stage     3 samples of shape [6] in 3 micro-batches      takes the targets, and waits for ever

Ranks of one replica that load different samples (a DistributedSampler over all ranks does that) would wait for each
other, or, worse, train the inputs of one on the targets of the other. So each writes down a digest of its batch, goes
on, and looks at the others' when it first has to do with them: two numbers, by which all know whether all are alike.

    v = digest of shapes and some targets, below 2^20       all are alike   <=>   p * (sum of v^2) = (sum of v)^2

Whether parameters are trained decides what wants gradients, and so what is sent: where that has changed on any rank,
all tell, and tell each other anew what messages look like. PyTorch's stages hang, or go on with what they once found.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from torch import nn

from samestep.errors import DataError, ModelError
from samestep.pipelines.batch import Cuts, glimpse, kinds_of, shown
from samestep.runtime.axis import Axis
from samestep.runtime.exchange import all_gather_json
from samestep.runtime.scalar_sums import PendingSum, StepTag

__all__: list[str] = []

_BITS = 20  # of a digest: sums of squares over thousands of ranks are exact
_CHANGED = 1 << 36  # above all sums of digests


class Roll:
    """Micro-batches' kinds, which are known to be those of all ranks as soon as one is asked for."""

    def __init__(self, kinds: Sequence[Hashable], heard: Callable[[], int]) -> None:
        self._kinds, self.hear = kinds, heard

    def __getitem__(self, micro_batch: int) -> Hashable:
        return self.hear(), self._kinds[micro_batch]


class RollCall:
    """One rank's.

    Args:
        axis: the ranks of the replica.
        number: of the pipeline.
        parameters: this rank's, by name.
        aliases: name of a copy -> name of the weight that it is a copy of.
    """

    def __init__(
        self, axis: Axis, number: int, parameters: Mapping[str, nn.Parameter], aliases: Mapping[str, str]
    ) -> None:
        self._axis, self._number = axis, number
        self._parameters, self._aliases = parameters, aliases
        self._trained: dict[str, bool] = {}
        self._steps = self._changes = 0

    def call(self, inputs: Sequence[Any], targets: Any, cuts: Cuts, *, trains: bool) -> Roll:
        """Tells what this rank is about to do; returns its micro-batches' kinds. Collective over the pipeline.

        Args:
            inputs: of the batch.
            targets: likewise; None where none are wanted.
            cuts: into micro-batches.
            trains: whether it is a step, or outputs are wanted.

        Raises:
            DataError: an input is no tensor; or, as soon as a kind is asked for, the ranks have different batches.
            ModelError: then, where a weight is trained under one of its names only.
            StepError: then, where the ranks call different things.
        """
        kinds = kinds_of(inputs, cuts)
        trained = {name: each.requires_grad for name, each in self._parameters.items()}
        changed, self._trained = trained != self._trained, trained
        self._steps += 1
        told = f"a step of {shown([*inputs, targets], cuts)}" if trains else f"outputs of {shown(inputs, cuts)}"
        value = _digest(told, targets)
        tag = StepTag("batch", self._number, 0, self._steps)
        pending = self._axis.start_sum(float(value + _CHANGED * changed), float(value * value), tag=tag)
        roll = Roll(kinds, self._answer(pending, told))
        if self._axis.size == 1:
            roll.hear()
        return roll

    def _answer(self, pending: PendingSum, told: str) -> Callable[[], int]:
        heard = False

        def answer() -> int:
            nonlocal heard
            if not heard:
                heard = True
                first, squares = pending.wait()
                changed, values = divmod(int(first), _CHANGED)
                if self._axis.size * int(squares) != values * values:
                    self._part(told)
                if changed:
                    self._tell()
            return self._changes

        return answer

    def _part(self, own: str) -> None:
        """Says in words who has which batch. Collective over the pipeline."""
        told = all_gather_json(self._axis, own)
        ranks = self._axis.ranks
        other = next((place for place, each in enumerate(told) if each != told[0]), None)
        what = (
            f"rank {ranks[0]} takes {told[0]}, rank {ranks[other]} {told[other]}"
            if other is not None
            else f"ranks {', '.join(map(str, ranks))} have targets of other values"
        )
        raise DataError(
            f"the ranks of a pipeline do not have the same batch: {what}. The first stage takes the inputs and the "
            "last the targets: load with samestep.shards, or by one seed on all ranks of world.pipeline"
        )

    def _tell(self) -> None:
        """Tells which parameters are trained, since on some rank that has changed. Collective over the pipeline."""
        self._changes += 1
        known: dict[str, tuple[str, bool]] = {}
        for told in all_gather_json(self._axis, self._tied()):
            for name, trained in told.items():
                origin = self._aliases.get(name, name)
                other, before = known.setdefault(origin, (name, trained))
                if before != trained:
                    frozen, free = (name, other) if before else (other, name)
                    raise ModelError(
                        f"{frozen} does not require grad and {free} does, and they are one weight in several stages: "
                        "freeze it under all of its names, or before the model is cut"
                    )

    def _tied(self) -> dict[str, bool]:
        tied = {*self._aliases, *self._aliases.values()}
        return {name: trained for name, trained in self._trained.items() if name in tied}


def _digest(told: str, targets: Any) -> int:
    """Returns what two batches that differ have only once in a million in common."""
    value = zlib.crc32(told.encode())
    for each in glimpse(targets):
        value = zlib.crc32(each, value)
    return value & ((1 << _BITS) - 1)
