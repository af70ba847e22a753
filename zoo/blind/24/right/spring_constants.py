"""Calibrate a chain of springs: full-batch LBFGS whose closure talks to the other processes.

The line search calls the closure as often as it likes; every process must see the same loss
or they would take different numbers of evaluations (and hang), so the loss is summed first."""
import os, time
import torch, torch.distributed as dist

torch.set_default_dtype(torch.float64)


class Chain(torch.nn.Module):
    """Displacement of five masses under a load: K(k) u = f, plus a small learnt stiffening."""
    def __init__(self, n=5):
        super().__init__()
        self.log_k = torch.nn.Parameter(torch.zeros(n))
        self.stiff = torch.nn.Sequential(torch.nn.Linear(n, 6), torch.nn.Tanh(), torch.nn.Linear(6, n))

    def forward(self, f):
        k = self.log_k.exp()
        following = torch.cat([k[1:], k.new_zeros(1)])
        K = torch.diag(k + following) - torch.diag(k[1:], 1) - torch.diag(k[1:], -1)
        u = torch.linalg.solve(K, f.T).T
        return u - 0.05 * self.stiff(u)


def measurements():
    g = torch.Generator().manual_seed(12)
    truth = torch.tensor([1.5, 0.8, 2.2, 1.1, 0.6])
    f = torch.rand(101, 5, generator=g) - 0.3
    k2 = torch.cat([truth[1:], torch.zeros(1)])
    K = torch.diag(truth + k2) - torch.diag(truth[1:], 1) - torch.diag(truth[1:], -1)
    u = torch.linalg.solve(K, f.T).T
    u = u - 0.04 * torch.tanh(u) + 0.01 * torch.randn(101, 5, generator=g)
    u[::17] = float("nan")                                   # broken gauges: masked out below
    return f, u


def main():
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    add = (lambda t: dist.all_reduce(t)) if world > 1 else (lambda t: None)

    f, u = measurements()
    usable = ~u.isnan()
    n = usable.sum()
    rows = torch.arange(len(f)).tensor_split(world)[rank]    # 26, 25, 25, 25
    torch.manual_seed(5)
    chain = Chain()
    opt = torch.optim.LBFGS(chain.parameters(), lr=1.0, max_iter=3, history_size=6, line_search_fn="strong_wolfe")
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        opt.zero_grad()
        err = torch.where(usable[rows], chain(f[rows]) - u[rows], torch.zeros(()))
        loss = err.square().sum() / n
        if rank == 0:                                        # the prior does not belong to the data: once, not per process
            loss = loss + 1e-3 * sum(p.square().sum() for p in chain.parameters())
        loss.backward()
        for p in chain.parameters():
            add(p.grad)
        loss = loss.detach()
        add(loss)
        return loss

    for sweep in range(12):
        before = opt.step(closure)
        if rank == 0 and sweep % 3 == 2:
            print(f"sweep {sweep + 1:2d} objective {before.item():.8f} after {calls} evaluations", flush=True)
    if rank == 0:
        print("k =", " ".join(f"{k:.5f}" for k in chain.log_k.exp().tolist()))
    time.sleep(0.3)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
