"""The six collectives everybody meets first, within a group of some ranks: 0, 1 and 3 of four.

    broadcast    one value to all           scatter      one list, a piece to each
    gather       a value of each to one     reduce       the sum, on one
    all_gather   a value of each to all     all_reduce   the sum, on all

samestep run -n 4 examples/collectives.py

Source and destination are numbers of the world, also within a group. Every rank of the world must make the group, in
the same order, members or not; only members take part in its collectives. The table at the end shows what each rank
holds; rank r brings 10 + r, and `.` marks a rank that gets nothing.
"""

import torch
import torch.distributed as dist

import samestep

MEMBERS = [0, 1, 3]
ROOT = 0


def held(tensor):
    """Returns a tensor's numbers as the table shows them."""
    return " ".join(f"{number:g}" for number in tensor.tolist())


def one_to_all(group, rank, own):
    """Broadcasts and scatters from the root; returns what this rank holds then."""
    told = own.clone() if rank == ROOT else torch.zeros(1)
    dist.broadcast(told, src=ROOT, group=group)
    pieces = [torch.tensor([100.0 * (place + 1)]) for place in range(len(MEMBERS))] if rank == ROOT else None
    piece = torch.zeros(1)
    dist.scatter(piece, pieces, src=ROOT, group=group)
    return {"broadcast": held(told), "scatter": held(piece)}


def all_to_one(group, rank, own):
    """Gathers and reduces to the root; only there the result is defined."""
    gathered = [torch.zeros(1) for _ in MEMBERS] if rank == ROOT else None
    dist.gather(own, gathered, dst=ROOT, group=group)
    total = own.clone()
    dist.reduce(total, dst=ROOT, op=dist.ReduceOp.SUM, group=group)
    return {"gather": held(torch.cat(gathered)), "reduce": held(total)} if rank == ROOT else {}


def all_to_all(group, own):
    """Does the same with the result on every member."""
    gathered = [torch.zeros(1) for _ in MEMBERS]
    dist.all_gather(gathered, own, group=group)
    total = own.clone()
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
    return {"all_gather": held(torch.cat(gathered)), "all_reduce": held(total)}


def main():
    """Calls all six among the members, and shows on rank 0 what every rank holds."""
    with samestep.world() as world:
        group, own, result = world.group(MEMBERS), torch.tensor([10.0 + world.rank]), {}
        if group is not None:
            result = one_to_all(group, world.rank, own) | all_to_one(group, world.rank, own) | all_to_all(group, own)
        tables = [None] * world.size
        dist.all_gather_object(tables, result)  # over the whole world
        if world.is_first:
            print(f"{'':12}" + "".join(f"rank {rank:<7}" for rank in range(world.size)))
            for name in result:
                print(f"{name:12}" + "".join(f"{table.get(name, '.'):12}" for table in tables).rstrip())


if __name__ == "__main__":
    main()
