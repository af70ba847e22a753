"""`samestep.spawn`: one function on N processes, results in rank order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from samestep.errors import RankFailure
from samestep.launch.functions.calls import with_source
from samestep.launch.functions.forwarder import open_forwarder
from samestep.launch.functions.pool import RankPool

__all__ = ["spawn"]


def spawn(
    fn: Callable[..., Any], n: int, *args: Any, timeout: float | None = None, progress: bool | None = None
) -> list[Any]:
    """Runs `fn(*args)` on `n` fresh processes of this machine and returns their results in rank order.

    Each process sees torchrun's variables, so `fn` joins its peers by :func:`samestep.world` or by
    `torch.distributed.init_process_group()`. torch.multiprocessing.spawn leaves rank, port and results to the
    caller, passes the rank as an argument, and reports whichever process it saw fail first, often a victim.

    In a script, no `if __name__ == "__main__"` is needed.

    **In a notebook** the function may be defined in a cell; every rank is a fresh process that gets it together with
    the globals it uses, so the kernel itself needs no process group and may have used its GPU. What the ranks print
    shows in the cell as whole lines, `[rank 1] …`, once where several say the same; a tqdm bar is drawn in place. A
    call that lasts longer than a second says how many ranks have returned, and which optimizer step they are at. An
    exception names the rank and the line of the cell. Interrupting the kernel ends all ranks and raises
    KeyboardInterrupt.

        def train(epochs):
            with samestep.world() as world:
                ...
                return accuracy

        samestep.spawn(train, 4, 10)[0]

        train  0 of 4 ranks returned  12 s  step 118 (rank 3) to 120 (rank 0)
        [rank 0] epoch 1: loss 0.1034

    On a terminal it is the same, and the status goes when the call ends; with `progress=False`, and in files and pipes,
    the ranks write straight to this process's own standard output and error.

    Args:
        fn: what every rank runs. Its results travel by pickle: return plain values or CPU tensors.
        n: how many ranks, 1 or more.
        *args: arguments of `fn`, the same on every rank.
        timeout: seconds after which the ranks' stacks are dumped and the call fails; None waits for ever.
        progress: whether to say how far the ranks are. None: in a notebook and on a terminal. True: also where nobody
            looks, as a plain line on standard error every half minute.

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
    forwarder = open_forwarder(getattr(fn, "__name__", "spawn"), n, progress)
    try:
        with RankPool(n, forwarder=forwarder) as pool:
            return pool.call(with_source(fn), args, timeout=timeout, module_of=fn)
    except (RankFailure, KeyboardInterrupt) as error:  # the caller's own line is what matters, not where we waited
        raise error.with_traceback(None) from None
