"""Point to point: blocking, non-blocking, and a shift around a ring that cannot deadlock.

    1  send / recv                rank 0 ──▶ rank 1           each call returns when its buffer may be used again
    2  isend / irecv              rank 0 ──▶ rank 1           returns at once; wait() before the buffer is touched
    3  batch_isend_irecv          0 ──▶ 1 ──▶ … ──▶ 0         all at once: nobody has to receive first

samestep run -n 3 examples/send_recv.py
samestep run --mpi -n 2 examples/send_recv.py --backend mpi

If every rank of a ring called send before recv, all might wait for a receiver: whether they do depends on the size of
the message and on the backend. The batch of 3 leaves the order to the backend.
"""

import argparse

import torch
import torch.distributed as dist

import samestep


def blocking(rank):
    """Sends 42 from rank 0 to rank 1; returns what this rank holds then."""
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 42
        dist.send(tensor, dst=1)
    elif rank == 1:
        dist.recv(tensor, src=0)
    return tensor.item()


def non_blocking(rank):
    """Does the same with work between the call and the wait."""
    tensor, request = torch.zeros(1), None
    if rank == 0:
        tensor += 43
        request = dist.isend(tensor, dst=1)
    elif rank == 1:
        request = dist.irecv(tensor, src=0)
    elsewhere = sum(range(1000))  # anything that touches neither end of the message
    if request is not None:
        request.wait()
    return tensor.item() if elsewhere else None


def around(rank, size):
    """Passes each rank's number to the next; returns the one that came in."""
    outgoing, incoming = torch.tensor([float(rank)]), torch.zeros(1)
    right, left = (rank + 1) % size, (rank - 1) % size
    shift = [dist.P2POp(dist.isend, outgoing, right), dist.P2POp(dist.irecv, incoming, left)]
    for request in dist.batch_isend_irecv(shift):
        request.wait()
    return incoming.item()


def main():
    """Sends all three ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="gloo", choices=("gloo", "mpi"))
    with samestep.world(backend=parser.parse_args().backend) as world:
        sent, later, passed = blocking(world.rank), non_blocking(world.rank), around(world.rank, world.size)
        left = (world.rank - 1) % world.size
        print(f"rank {world.rank}: send {sent:g}, isend {later:g}, from the left {passed:g} (rank {left})")


if __name__ == "__main__":
    main()
