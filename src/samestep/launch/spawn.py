"""`samestep.spawn`: one function on N processes, results in rank order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from samestep.launch.pool import RankPool

__all__ = ["spawn"]


def spawn(fn: Callable[..., Any], n: int, *args: Any, timeout: float | None = None) -> list[Any]:
    """Runs `fn(*args)` on `n` fresh processes of this machine and returns their results in rank order.

    Each process sees torchrun's variables, so `fn` joins its peers by :func:`samestep.world` or by
    `torch.distributed.init_process_group()`. torch.multiprocessing.spawn leaves rank, port and results to the
    caller, passes the rank as an argument, and reports whichever process it saw fail first, often a victim.

    In a script, no `if __name__ == "__main__"` is needed, and a notebook's functions work.

    Args:
        fn: what every rank runs. Its results travel by pickle: return plain values or CPU tensors.
        n: how many ranks, 1 or more.
        *args: arguments of `fn`, the same on every rank.
        timeout: seconds after which the ranks' stacks are dumped and the call fails; None waits for ever.

    Returns:
        `[what rank 0 returned, what rank 1 returned, …]`.

    Raises:
        RankFailure: a rank raised, died or was silent too long; names the culprit, with its own traceback. The
            others are stopped. So they are on KeyboardInterrupt.

    Example:
        >>> import samestep
        >>> samestep.spawn(divmod, 2, 7, 3)
        [(2, 1), (2, 1)]
    """
    with RankPool(n) as pool:
        return pool.call(fn, args, timeout=timeout)
