"""Tram load classifier that is interrupted on purpose and goes on in the same file.

First life: 17 steps, rank 0 writes a checkpoint in the middle of an epoch. Second life: everything is
built anew (each process with its own junk weights), loaded, the used batches are skipped."""
import os, shutil, tempfile, time
import torch
import torch.distributed as dist
import torch.nn as nn, torch.nn.functional as F
from sklearn.datasets import make_classification


class AllSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        t = t.clone()
        dist.all_reduce(t)
        return t

    @staticmethod
    def backward(ctx, grad):                     # every process used the sum, so their gradients add up
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class BatchNormEverywhere(nn.Module):
    """Batch norm whose statistics are those of the global batch (gradients flow through the sums)."""
    def __init__(self, n, momentum=0.1):
        super().__init__()
        self.weight, self.bias, self.momentum = nn.Parameter(torch.ones(n)), nn.Parameter(torch.zeros(n)), momentum
        self.register_buffer("mean", torch.zeros(n))
        self.register_buffer("var", torch.ones(n))

    def forward(self, x):
        if self.training:
            count = torch.tensor(float(len(x)))
            dist.all_reduce(count)
            mean = AllSum.apply(x.sum(0)) / count
            var = AllSum.apply((x - mean).square().sum(0)) / count
            with torch.no_grad():
                self.mean.lerp_(mean, self.momentum)
                self.var.lerp_(var * count / (count - 1), self.momentum)
        else:
            mean, var = self.mean, self.var
        return (x - mean) * torch.rsqrt(var + 1e-5) * self.weight + self.bias


def build():
    model = nn.Sequential(nn.Linear(14, 32, bias=False), BatchNormEverywhere(32), nn.ReLU(), nn.Linear(32, 4))
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 0.03, total_steps=40)
    return model, opt, sched


def ride(model, opt, sched, data, start, end, rank, world, losses):
    """Global steps start..end-1; an epoch has ten batches of 66 rows (the last one 46)."""
    x, y = data
    for step in range(start, end):
        epoch, position = divmod(step, 10)
        order = torch.randperm(640, generator=torch.Generator().manual_seed(epoch))
        batch = order.split(66)[position]
        mine = batch[rank::world]
        loss = F.cross_entropy(model(x[mine]), y[mine], reduction="sum", label_smoothing=0.05) / len(batch)
        opt.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        opt.step()
        sched.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        losses.append(shown.item())


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = make_classification(840, 14, n_informative=9, n_classes=4, random_state=2)
    data = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    folder = [tempfile.mkdtemp(prefix="tram_") if rank == 0 else None]
    dist.broadcast_object_list(folder)
    path = os.path.join(folder[0], "half_way.pt")

    torch.manual_seed(9)
    model, opt, sched = build()
    losses = []
    ride(model, opt, sched, data, 0, 17, rank, world, losses)
    if rank == 0:
        torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(), "step": 17}, path)
        print(f"interrupted at step 17, loss {losses[-1]:.5f}")
    dist.barrier()
    del model, opt, sched

    torch.manual_seed(1000 + rank)              # nothing below depends on it: the weights are loaded
    model, opt, sched = build()
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["opt"])
    sched.load_state_dict(saved["sched"])
    ride(model, opt, sched, data, saved["step"], 40, rank, world, losses)
    dist.barrier()

    model.eval()
    with torch.no_grad():
        hold = torch.arange(640, 840)[rank::world]
        right = (model(data[0][hold]).argmax(1) == data[1][hold]).sum()
    dist.all_reduce(right)
    if rank == 0:
        shutil.rmtree(folder[0])
        print("losses", " ".join(f"{v:.5f}" for v in losses[4::5]))
        print(f"accuracy {right.item() / 200:.4f}, last lr {sched.get_last_lr()[0]:.2e}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
