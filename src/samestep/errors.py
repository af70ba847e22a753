"""Everything samestep raises on purpose, and the exit code each ends a process with.

    SamestepError                     1
    ├── UsageError (a ValueError)     2   what the caller can fix before training starts
    │   ├── RankVariablesError        2   the launcher's variables are incomplete or contradictory
    │   ├── BackendError              2   a backend that is unknown, not built in, or cannot serve this device
    │   ├── DeviceError               2   a tensor, model or process on a device that it must not use
    │   ├── DataError                 2   a dataset or batch size that cannot be divided among the ranks
    │   └── ModelError                2   a model that cannot be replicated
    ├── RendezvousError               2   the ranks did not find each other
    ├── EmptyBatchError               1   the model cannot digest the empty batch of a rank without samples
    ├── StepError                     1   the calls of one training step do not fit together
    ├── NonFiniteError                1   a gradient is NaN or infinite; says of which rank and tensor
    ├── DriftError                    1   replicas are not alike any more; says of which rank and tensor
    ├── PeerError                     1   another rank failed, and this one was told
    ├── CheckpointError               1   a checkpoint cannot be written, or cannot be trusted
    └── RankFailure                   1   a rank of `spawn` or `run_ranks` failed; carries which, and why

    Preempted (a SystemExit)         75   asked to make room, every rank has saved and leaves

A class of its own lets the launcher tell a culprit from a victim, and lets a script catch what it can fix. A message is
a lower-case sentence that carries the rank, the numbers, the cause and the next step.
"""

from __future__ import annotations

__all__ = [
    "BackendError",
    "CheckpointError",
    "DataError",
    "DeviceError",
    "DriftError",
    "EmptyBatchError",
    "ModelError",
    "NonFiniteError",
    "PeerError",
    "Preempted",
    "RankFailure",
    "RankVariablesError",
    "RendezvousError",
    "SamestepError",
    "StepError",
    "UsageError",
]


class SamestepError(Exception):
    """Anything samestep raises on purpose.

    Attributes:
        exit_code: what a process ends with that does not catch it.
        secondary: it only reports the failure of another rank, which the launcher blames instead.
    """

    exit_code = 1
    secondary = False


class UsageError(SamestepError, ValueError):
    """An argument, option or environment that the caller can fix before training starts."""

    exit_code = 2


class RankVariablesError(UsageError):
    """RANK, WORLD_SIZE and their like are half set, malformed or contradict each other."""


class BackendError(UsageError):
    """The backend asked for is unknown, not built into this torch, or cannot serve this device."""


class DeviceError(UsageError):
    """A model, tensor or process stands on a device that it must not use."""


class DataError(UsageError):
    """A dataset, a sample or a batch size cannot be divided among the ranks as asked."""


class ModelError(UsageError):
    """A model cannot be replicated as it is."""


class RendezvousError(SamestepError):
    """The ranks did not find each other in time; says who waited where, how long, and for whom."""

    exit_code = 2
    secondary = True  # a rank that died on its way here is the cause, the ranks that waited for it are not


class EmptyBatchError(SamestepError):
    """The model refused the empty batch of a rank that has no samples in this micro-batch."""


class StepError(SamestepError):
    """The calls of one training step do not fit together."""


class NonFiniteError(SamestepError):
    """A gradient is NaN or infinite; raised on every rank before the optimizer has changed a parameter.

    On a rank that only received it from others, `secondary` is true.

    Attributes:
        ranks: those that it came from, as far as can be told; empty where they are not known.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...] = (), mine: int = 0) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.secondary = bool(ranks) and mine not in ranks

    def with_message(self, message: str) -> NonFiniteError:
        """Returns the same error with another message."""
        other = NonFiniteError(message, ranks=self.ranks)
        other.secondary = self.secondary
        return other


class DriftError(SamestepError):
    """The replicas are not alike any more; raised on every rank after the same step, with the same sentence.

    On a rank that is as it should be, `secondary` is true.

    Attributes:
        ranks: those that differ from most; empty where nobody can tell who is right.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...] = (), mine: int = 0) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.secondary = bool(ranks) and mine not in ranks


class PeerError(SamestepError):
    """Another rank failed, and told this one before it waited in vain."""

    secondary = True


class CheckpointError(SamestepError):
    """A checkpoint cannot be written, or what was read is not what was saved."""


class RankFailure(SamestepError):  # noqa: N818  (it reports a failure elsewhere; the name says so)
    """A rank started by :func:`samestep.spawn` or :func:`samestep.testing.run_ranks` failed.

    Attributes:
        rank: the culprit, or None where nobody could be named.
        reason: what happened to it, with the rank's own traceback where there was one.
        exit_code: the culprit's own exit status, 128 + signal if a signal ended it.
    """

    def __init__(self, rank: int | None, reason: str, exit_code: int = 1) -> None:
        super().__init__(reason if rank is None else f"rank {rank} {reason}")
        self.rank = rank
        self.reason = reason
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[type[RankFailure], tuple[int | None, str, int]]:
        return (type(self), (self.rank, self.reason, self.exit_code))


class Preempted(SystemExit):
    """Asked to make room, all ranks have saved the same step and leave with exit code 75 (EX_TEMPFAIL: start again).

    Attributes:
        step: how many steps the checkpoint holds.
        path: where it lies.
    """

    exit_code = 75

    def __init__(self, step: int, path: str) -> None:
        super().__init__(self.exit_code)
        self.step = step
        self.path = path
