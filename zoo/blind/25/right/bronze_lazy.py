"""Wine classifier: every layer has one owner that updates it; other workers fetch it when they need it.

After a step only the owner's copy of a layer is fresh.  A forward pre-hook fetches the layer from
its owner just before it is used, so that the traffic is spread over the forward pass.
"""
import logging
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_wine
from torch import nn

log = logging.getLogger("wine")


def connect():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_rank(), dist.get_world_size()


class OwnedLayers:
    """Owner of layer k is worker k % world; it alone has an optimizer for it."""

    def __init__(self, net, rank, world, lr):
        self.layers = [m for m in net.modules() if isinstance(m, (nn.Linear, nn.LayerNorm))]
        self.owner = {m: k % world for k, m in enumerate(self.layers)}
        self.rank = rank
        self.stale = set()
        mine = [p for m in self.layers if self.owner[m] == rank for p in m.parameters()]
        self.opt = torch.optim.SGD(mine, lr=lr, momentum=0.9, nesterov=True) if mine else None
        for m in self.layers:
            m.register_forward_pre_hook(self._fetch)

    def _fetch(self, module, _args):
        if module in self.stale:
            for p in module.parameters():
                dist.broadcast(p.data, src=self.owner[module])
            self.stale.discard(module)

    def fetch_all(self):
        for m in self.layers:
            self._fetch(m, None)

    def step(self):
        pending = []
        for m in reversed(self.layers):
            for p in m.parameters():
                pending.append(dist.reduce(p.grad, dst=self.owner[m], async_op=True))
        for work in pending:
            work.wait()
        if self.opt is not None:
            self.opt.step()
        for m in self.layers:
            m.zero_grad()
        self.stale = set(self.layers)


def run():
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    rank, world = connect()
    if rank:
        log.setLevel(logging.WARNING)
    data = load_wine()
    x = torch.tensor(data.data, dtype=torch.float32)
    y = torch.tensor(data.target)
    perm = torch.randperm(len(x), generator=torch.Generator().manual_seed(2))
    x, y = x[perm], y[perm]
    x = (x - x[:128].mean(0)) / x[:128].std(0)
    xt, yt, xv, yv = x[:128], y[:128], x[128:], y[128:]

    torch.manual_seed(9)
    net = nn.Sequential(nn.Linear(13, 32), nn.LayerNorm(32), nn.Tanh(),
                        nn.Linear(32, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 3))
    owned = OwnedLayers(net, rank, world, lr=0.05)
    gen = torch.Generator().manual_seed(77)
    batch = 32
    for epoch in range(8):
        order = torch.randperm(len(xt), generator=gen)
        total = torch.zeros(())
        for start in range(0, len(xt), batch):
            rows = order[start:start + batch].chunk(world)[rank]
            loss = nn.functional.cross_entropy(net(xt[rows]), yt[rows], reduction="sum") / batch
            loss.backward()
            owned.step()
            total += loss.detach()
        dist.all_reduce(total)
        if epoch % 2 == 1:
            log.info("epoch %d loss %.5f", epoch + 1, total.item() / (len(xt) / batch))

    owned.fetch_all()
    with torch.no_grad():
        vl = nn.functional.cross_entropy(net(xv[rank::world]), yv[rank::world], reduction="sum")
        ok = (net(xv[rank::world]).argmax(1) == yv[rank::world]).sum()
    pair = torch.stack([vl, ok.float()])
    dist.all_reduce(pair)
    log.info("validation loss %.5f accuracy %.4f", pair[0].item() / len(xv), pair[1].item() / len(xv))
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
