"""Real ranks in tests, at the price of milliseconds, and comparisons that allow no tolerance.

A process that imports torch costs a second or more. :func:`ranks` keeps N rank processes alive and sends functions to
them; every call has a rendezvous of its own:

    @pytest.fixture(scope="session")
    def three_ranks():
        with samestep.testing.ranks(3) as run:
            yield run

    def total():
        with samestep.world() as world:
            ...

    def test_every_rank_sees_the_sum(three_ranks):
        assert three_ranks(total) == [6, 6, 6]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch

from samestep import fake_gpus as fake
from samestep.launch.functions.pool import RankPool
from samestep.launch.functions.spawn import spawn
from samestep.launch.start.prefork_server import PreforkServer
from samestep.runtime.digest import bytes_of

__all__ = ["RankSet", "assert_same_bits", "fake_gpus", "largest_difference", "ranks", "run_ranks"]

VARIABLES = {"OMP_NUM_THREADS": "1"}  # of the ranks: as many as there are cores is too many for all of them


def run_ranks(fn: Callable[..., Any], n: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Runs `fn(*args)` on `n` fresh processes with one thread each, and returns their results in rank order.

    Like :func:`samestep.spawn`, with a deadline: a hang becomes a failure that shows where every rank stood.

    Raises:
        RankFailure: a rank raised, died, or gave no answer within `timeout` seconds.

    Example:
        >>> run_ranks(divmod, 2, 7, 3)
        [(2, 1), (2, 1)]
    """
    return spawn(fn, n, *args, timeout=timeout)


class RankSet:
    """N rank processes that stay alive between calls; made by :func:`ranks`.

    A rank starts every call with torch's defaults (float32, seed 0, nothing deterministic) and the environment of a
    rank, and may call :func:`samestep.world` or `init_process_group()`: each call has a store of its own, so no key
    of an earlier call is seen. After a failure the processes are replaced, in 0.1 s: they are forked from one
    that has imported torch and computes nothing. Modules stay imported, so global state of the test's own modules
    does persist.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._pool: RankPool | None = None
        self._fork_server: PreforkServer | None = None

    def __call__(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Returns `[fn(*args) on rank 0, on rank 1, …]`.

        Args:
            fn: a function of a module (a test's own will do); lambdas and closures too.
            *args: the same on every rank.
            timeout: seconds until the ranks' stacks are dumped and the call fails.

        Raises:
            RankFailure: a rank raised, died or gave no answer; names it.
        """
        if self._pool is None:
            self._pool = self._start()
        try:
            return self._pool.call(_afresh, (fn, args), timeout=timeout, module_of=fn)
        except BaseException:
            self._pool.kill()
            self._pool = None
            raise

    def _start(self) -> RankPool:
        if self._fork_server is not None and self._fork_server.has_ended():  # killed for memory, say
            self._fork_server.close()
            self._fork_server = None
        self._fork_server = self._fork_server or PreforkServer(VARIABLES)
        can = self._fork_server.why_unavailable() is None
        return RankPool(self.size, extra=VARIABLES, server=self._fork_server if can else None)

    def close(self) -> None:
        """Ends the processes; the next call would start new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if self._fork_server is not None:
            self._fork_server.close()
            self._fork_server = None


@contextmanager
def ranks(n: int) -> Iterator[RankSet]:
    """Keeps `n` rank processes alive; yields a callable `run(fn, *args, timeout=60)`. They start at the first call.

    Example:
        >>> with ranks(2) as run:
        ...     run(divmod, 7, 3), run(max, 1, 2)
        ([(2, 1), (2, 1)], [2, 2])
    """
    with closing(RankSet(n)) as members:
        yield members


@contextmanager
def fake_gpus(n: int = 1) -> Iterator[None]:
    """Makes `n` GPUs that have no hardware, for code that wants CUDA: see docs/fake-gpus.md.

    As a fixture of pytest:

        @pytest.fixture
        def two_gpus():
            with samestep.testing.fake_gpus(2):
                yield

    Tensors that were made on them must not be used once it has ended. The ranks of :func:`ranks` are other processes,
    whose functions open one of their own.

    Raises:
        UsageError: `n` is not from 1 to 64, fake GPUs are on already, or a real one is in use.

    Example:
        >>> with fake_gpus(2):
        ...     torch.ones(2, device="cuda:1") * 3
        tensor([3., 3.], device='cuda:1')
    """
    with fake.made(n):
        yield


def _afresh(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Runs in the rank: `fn(*args)` under torch's defaults, with no process group left behind."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(mode=False)
    torch.set_num_threads(1)
    try:
        return fn(*args)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def assert_same_bits(actual: Any, expected: Any, name: str = "value") -> None:
    """Asserts that two values, tensors at any depth of dicts, lists and tuples, are equal to the last bit.

    Unlike `torch.equal`, NaN equals NaN of the same bits, 0.0 is not -0.0, and dtype and shape must agree.

    Raises:
        AssertionError: names the first key, the first element that differs, and both values.

    Example:
        >>> assert_same_bits({"a": torch.ones(2)}, {"a": torch.tensor([1.0, 1.0])})
    """
    for place, one, other in _pairs(actual, expected, name):
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            _assert_same_tensor(place, one, other)
        else:
            assert type(one) is type(other), f"{place}: a {type(one).__name__} is not a {type(other).__name__}"
            assert one == other or (one != one and other != other), f"{place}: {one!r} is not {other!r}"  # noqa: PLR0124


def largest_difference(actual: Any, expected: Any) -> float:
    """Returns the largest absolute difference between two values of the same structure; NaN where one has a NaN.

    Example:
        >>> largest_difference([torch.zeros(2)], [torch.tensor([0.0, 0.5])])
        0.5
    """
    worst = 0.0
    for place, actual_one, expected_one in _pairs(actual, expected, "value"):
        first, second = torch.as_tensor(actual_one), torch.as_tensor(expected_one)
        assert first.shape == second.shape, f"{place}: shape {tuple(first.shape)} is not {tuple(second.shape)}"
        if first.numel():
            wide = torch.complex128 if first.is_complex() or second.is_complex() else torch.float64
            one, other = first.detach().to(wide), second.detach().to(wide)
            gap = float((one - other).abs().masked_fill(one == other, 0.0).max())  # infinities may be equal
            worst = gap if gap != gap or gap > worst else worst  # noqa: PLR0124  (a NaN stays)
    return worst


def _pairs(actual: Any, expected: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(actual, Mapping) and isinstance(expected, Mapping):
        keys = list(actual)
        assert set(keys) == set(expected), f"{name}: keys differ: {sorted(set(keys) ^ set(expected), key=repr)}"
        for key in keys:
            yield from _pairs(actual[key], expected[key], f"{name}[{key!r}]")
    elif all(isinstance(one, Sequence) and not isinstance(one, str | bytes) for one in (actual, expected)):
        assert len(actual) == len(expected), f"{name}: {len(actual)} items are not {len(expected)}"
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            yield from _pairs(one, other, f"{name}[{index}]")
    else:
        yield name, actual, expected


def _assert_same_tensor(place: str, one: torch.Tensor, other: torch.Tensor) -> None:
    assert one.dtype == other.dtype, f"{place}: {one.dtype} is not {other.dtype}"
    assert one.shape == other.shape, f"{place}: shape {tuple(one.shape)} is not {tuple(other.shape)}"
    differing = (_bits(one) != _bits(other)).any(dim=-1)
    if differing.any():
        index = int(differing.nonzero()[0])
        where = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), one.shape)) if one.dim() else ()
        raise AssertionError(
            f"{place}{list(where) or ''}: {one[where].item()!r} is not {other[where].item()!r} "
            f"({int(differing.sum())} of {one.numel()} elements differ)"
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of each element: shape (elements, bytes of one)."""
    return bytes_of(tensor.cpu()).reshape(tensor.numel(), tensor.element_size())
