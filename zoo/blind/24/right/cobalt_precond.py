"""A small Shampoo whose matrices have owners.

Parameter k belongs to rank k % world: gradients are *reduced* to the owner, only
the owner keeps the statistics and steps, then it broadcasts the new value."""
import os, time
import torch, torch.distributed as dist
from torch import nn
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score

torch.set_default_dtype(torch.float64)


class OwnedShampoo(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, beta=0.9, eps=1e-2):
        super().__init__(params, dict(lr=lr, beta=beta, eps=eps))

    @staticmethod
    def inv_root(m, order):
        lam, q = torch.linalg.eigh(m)
        return q @ torch.diag(lam.clamp_min(1e-12) ** (-1.0 / order)) @ q.T

    @torch.no_grad()
    def step(self):
        rank, world = dist.get_rank(), dist.get_world_size()
        everything = [(g, p) for g in self.param_groups for p in g["params"]]
        for k, (group, p) in enumerate(everything):
            dist.reduce(p.grad, dst=k % world)
        for k, (group, p) in enumerate(everything):
            if k % world == rank:
                self._update(group, p)
        for k, (group, p) in enumerate(everything):
            dist.broadcast(p.data, src=k % world)

    def _update(self, group, p):
        s, g = self.state[p], p.grad
        if not s:
            s["mom"] = torch.zeros_like(p)
            if p.dim() == 2:
                s["L"] = group["eps"] * torch.eye(p.shape[0])
                s["R"] = group["eps"] * torch.eye(p.shape[1])
        if p.dim() == 2:
            s["L"] += g @ g.T
            s["R"] += g.T @ g
            g = self.inv_root(s["L"], 4) @ g @ self.inv_root(s["R"], 4)
        s["mom"].mul_(group["beta"]).add_(g)
        p.sub_(group["lr"] * s["mom"])


def main():
    if "RANK" not in os.environ:
        os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"})
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    data = load_breast_cancer()
    x = torch.tensor(data.data)
    x = (x - x[:400].mean(0)) / x[:400].std(0)
    y = torch.tensor(data.target).double()

    torch.manual_seed(21)
    model = nn.Sequential(nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))
    opt = OwnedShampoo(model.parameters(), lr=0.05)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.95)

    B = 50                                   # 50 rows do not divide evenly by 4: slices of 13, 13, 12, 12
    for step in range(24):
        start = (step * B) % 400
        rows = torch.arange(start, start + B).tensor_split(world)[rank]
        loss = nn.functional.binary_cross_entropy_with_logits(model(x[rows])[:, 0], y[rows], reduction="sum") / B
        opt.zero_grad()
        loss.backward()
        shown = loss.detach().clone()
        opt.step()
        sched.step()
        dist.reduce(shown, dst=0)
        if rank == 0 and step % 6 == 5:
            print(f"{step + 1:3d} loss {shown:.6f} lr {sched.get_last_lr()[0]:.5f}")
    if rank == 0:
        with torch.no_grad():
            p = torch.sigmoid(model(x[400:])[:, 0])
        print(f"held-out AUC {roc_auc_score(y[400:].numpy(), p.numpy()):.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
