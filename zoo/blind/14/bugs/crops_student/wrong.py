"""Distils a network that tells crops by their reflectances into a smaller one, in two jobs with a checkpoint between.

The first job stops after two epochs, the second goes on from its file with weights, moments and epoch. The teacher is
given; the student learns its soft answers together with the labels.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BANDS, CROPS = 12, 6


def mlp(width, seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(BANDS, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, CROPS))


def make_teacher():
    teacher = mlp(96, seed=1000).requires_grad_(False)
    teacher[0].weight.mul_(2)
    teacher[4].weight.mul_(12)
    return teacher


def fields(count, teacher, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, BANDS, generator=g)
    labels = teacher(x).argmax(1)
    wrong = torch.rand(count, generator=g) < 0.05
    return TensorDataset(x, torch.where(wrong, torch.randint(CROPS, (count,), generator=g), labels))


def distil_loss(logits, soft, labels, temperature=2.0, share=0.7):
    kl = F.kl_div(F.log_softmax(logits / temperature, 1), F.softmax(soft / temperature, 1), reduction="batchmean")
    return share * temperature ** 2 * kl + (1 - share) * F.cross_entropy(logits, labels)


def run_job(args, rank, world, epochs, student_seed):
    teacher = make_teacher()
    train, test = fields(640, teacher, seed=1), fields(200, teacher, seed=2)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, seed=9)
    loader = DataLoader(train, batch_size=args.batch // world, sampler=sampler)
    student = mlp(32, student_seed)
    optimizer = torch.optim.AdamW(student.parameters(), lr=args.lr, betas=(0.9, 0.99), weight_decay=0.02)

    start = [0]
    if rank == 0 and os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint)
        student.load_state_dict(state["student"])
        optimizer.load_state_dict(state["optimizer"])
        start = [state["epoch"]]
    dist.broadcast_object_list(start, src=0)
    model = DDP(student)

    for epoch in range(start[0], epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for x, labels in loader:
            loss = distil_loss(model(x), teacher(x), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            with torch.no_grad():
                x, labels = test[:]
                value = distil_loss(student(x), teacher(x), labels).item()
            print(f"epoch {epoch}: train {total.item() / world / len(loader):.4f} test {value:.4f}")
            torch.save({"student": student.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1},
                       args.checkpoint)
        dist.barrier()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--checkpoint", default="crops_student.pt")
    args = p.parse_args()

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29629")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    if rank == 0 and os.path.exists(args.checkpoint):
        os.remove(args.checkpoint)
    dist.barrier()

    run_job(args, rank, world, epochs=2, student_seed=3)
    run_job(args, rank, world, epochs=4, student_seed=4)

    if rank == 0:
        os.remove(args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
