"""Hello between two ranks, by send and receive over MPI.

samestep run --mpi -n 2 examples/mpi_hello.py
mpiexec -n 2 samestep run examples/mpi_hello.py         the same
"""

import torch
import torch.distributed as dist


def main():
    """Sends a tensor from rank 0 to rank 1."""
    dist.init_process_group("mpi")
    rank, size = dist.get_rank(), dist.get_world_size()
    print(f"hello from rank {rank} of {size}")
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        dist.send(tensor, dst=1)
    elif rank == 1:
        dist.recv(tensor, src=0)
    print(f"rank {rank} has {tensor.item():g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
