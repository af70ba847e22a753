"""Hello world of process groups: who am I, how many are we, and one sum over all of us.

    rank 0   brings 1 ─┐                     ┌─▶ 3
                       ├──▶  all_reduce  ──▶─┤
    rank 1   brings 2 ─┘                     └─▶ 3        n (n + 1) / 2 with n ranks

samestep run -n 2 examples/hello_process_group.py
torchrun --standalone --nproc-per-node 2 examples/hello_process_group.py
mpiexec -n 2 python examples/hello_process_group.py
python examples/hello_process_group.py                 # nobody has started it: a world of one

`samestep.world()` finds out who has started the process (samestep run, torchrun, srun, mpiexec), picks the backend that
suits the device (nccl for CUDA, else gloo), joins the others, and destroys the process group on every way out.
"""

import torch
import torch.distributed as dist

import samestep


def main():
    """Adds up one number from each rank."""
    with samestep.world() as world:
        number = torch.tensor([world.rank + 1.0], device=world.device)
        if world.size > 1:  # alone there is no group, and the sum is the number
            dist.all_reduce(number)
        expected = world.size * (world.size + 1) / 2
        print(f"rank {world.rank} of {world.size} on {world.device}: the sum is {number.item():g} of {expected:g}")


if __name__ == "__main__":
    main()
