"""The ring all-reduce, written out with isend and irecv, beside dist.all_reduce.

Four ranks; each tensor is cut into four chunks a b c d. In each step every rank sends one chunk to its right.

    scatter-reduce   rank 0    rank 1    rank 2    rank 3       step 1: rank r sends its chunk r, and adds
    step 1           a ──▶     b ──▶     c ──▶     d ──▶        what comes in to its own
    step 2           d ──▶     a ──▶     b ──▶     c ──▶        step s: what was added last goes on
    step 3           c ──▶     d ──▶     a ──▶     b ──▶
    now whole        b         c         d         a            chunk r + 1 on rank r
    all-gather       the same three steps, with copies instead of sums

samestep run -n 4 examples/ring_all_reduce.py
samestep run --mpi -n 3 examples/ring_all_reduce.py --backend mpi

Every rank sends 2 (N - 1) chunks of 1/N: less than twice the tensor, whatever N, the least that is possible; Horovod
made it known in training. samestep has it as a plan, beside trees, butterflies and hierarchies: docs/all-reduce.md.
"""

import argparse

import torch
import torch.distributed as dist

import samestep


def pass_on(chunks, out, into, rank, size, add):
    """Sends chunk `out` to the right and takes chunk `into` from the left; returns the bytes sent."""
    incoming = torch.empty_like(chunks[into])
    sending = dist.isend(chunks[out], dst=(rank + 1) % size)
    dist.irecv(incoming, src=(rank - 1) % size).wait()
    sending.wait()
    chunks[into].add_(incoming) if add else chunks[into].copy_(incoming)
    return chunks[out].nbytes


def ring_all_reduce(tensor, rank, size):
    """Replaces a tensor by its sum over all ranks; returns the bytes that this rank has sent."""
    chunks, sent = tensor.tensor_split(size), 0  # views: what is added to a chunk is added to the tensor
    for step in range(size - 1):
        sent += pass_on(chunks, (rank - step) % size, (rank - step - 1) % size, rank, size, add=True)
    for step in range(size - 1):
        sent += pass_on(chunks, (rank + 1 - step) % size, (rank - step) % size, rank, size, add=False)
    return sent


def main():
    """Adds up a tensor of a million numbers both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="gloo", choices=("gloo", "mpi"))
    with samestep.world(backend=parser.parse_args().backend) as world:
        draw = torch.Generator().manual_seed(world.rank)
        mine = torch.randint(-1000, 1000, (1_000_003,), generator=draw).double()  # whole numbers add up exactly
        theirs = mine.clone()
        sent = ring_all_reduce(mine, world.rank, world.size)
        dist.all_reduce(theirs)
        print(f"rank {world.rank}: equal {torch.equal(mine, theirs)}, sent {sent / mine.nbytes:.3f} times the tensor")


if __name__ == "__main__":
    main()
