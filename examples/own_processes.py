"""Own process control: a script that starts its ranks itself, with torch and nothing else.

    parent ── holds the store ── starts ──┬─▶ rank 0 ─┐
                                          └─▶ rank 1 ─┴─▶ meet at the store, init_process_group

python examples/own_processes.py                       # env://, the four variables
python examples/own_processes.py --init-method file    # file://, a path that all ranks see

The usual way to a port is to take a fixed one, which fails when two trainings share a machine, or to look for a free
one and release it, which another process may take meanwhile. Here the parent binds port 0, keeps it, and serves the
store; TORCHELASTIC_USE_AGENT_STORE tells rank 0 to join it rather than to open one. Started so, a rank that dies leaves
the others waiting: the parent looks at every exit code and ends the rest. `samestep run` and `samestep.spawn` do all
that and say whose fault it was: spawn.py.
"""

import argparse
import multiprocessing
import os
import tempfile
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

RANKS = 2


def rank_of(rank, init_method, variables):
    """Is one rank: joins, adds up, leaves."""
    os.environ.update(variables)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=RANKS)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    expected = RANKS * (RANKS + 1) / 2
    os.write(1, f"rank {rank} of {RANKS}: the sum is {total.item():g} of {expected:g}\n".encode())  # one whole line
    dist.destroy_process_group()


def run(init_method, variables):
    """Starts the ranks and waits; returns 0 if all went well, and ends the others at the first that did not."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=rank_of, args=(rank, init_method, variables)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    waiting = {rank.sentinel: rank for rank in ranks}
    while waiting:
        for sentinel in wait(list(waiting)):
            (rank := waiting.pop(sentinel)).join()
            if rank.exitcode:
                for other in waiting.values():
                    other.terminate()
    return max(abs(rank.exitcode) for rank in ranks)


def main():
    """Chooses how the ranks meet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--init-method", default="env", choices=("env", "file"))
    if parser.parse_args().init_method == "file":
        with tempfile.TemporaryDirectory() as folder:
            return run(f"file://{folder}/meeting", {})
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return run("env://", address)


if __name__ == "__main__":
    raise SystemExit(main())
