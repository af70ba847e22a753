"""Low rank adapters on a frozen network.

Only the adapters (and the new head) are optimised. The frozen part is left out of DDP and comes from a base checkpoint
that each process can rebuild for itself.
"""
import math, os, time
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from sklearn.datasets import load_digits


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, r=4, alpha=8, dropout=0.0):
        super().__init__()
        self.base = base
        for p in self.base.parameters():
            p.requires_grad = False
        self.lora_A = nn.Parameter(torch.empty(r, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scaling = alpha / r
        self.merged = False

    def forward(self, x):
        y = self.base(x)
        return y if self.merged else y + (x @ self.lora_A.t() @ self.lora_B.t()) * self.scaling

    @torch.no_grad()
    def merge(self):
        self.base.weight += self.lora_B @ self.lora_A * self.scaling
        self.merged = True


def pretrain(x, y):
    """base task: odd or even. Every process does this alone with the same data and seed."""
    torch.manual_seed(123)
    base = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))
    opt = torch.optim.Adam(base.parameters(), 1e-2)
    for _ in range(25):
        opt.zero_grad()
        F.cross_entropy(base(x), y % 2).backward()
        opt.step()
    return base


def add_adapters(base):
    for name, child in list(base.named_children()):
        if isinstance(child, nn.Linear):
            setattr(base, name, LoRALinear(child))
    base[4] = nn.Linear(64, 10)  # new task, new head
    return base


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "30111")
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    net = pretrain(x[:600], y[:600])
    torch.manual_seed(rank)  # adapters start from the values of rank 0
    net = add_adapters(net)
    frozen = [n for n, p in net.named_parameters() if not p.requires_grad]
    DDP._set_params_and_buffers_to_ignore_for_model(net, frozen)
    model = DDP(net)
    opt = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=5e-3)
    if rank == 0:
        k = sum(p.numel() for p in net.parameters() if p.requires_grad)
        print(f"trainable params: {k} || all params: {sum(p.numel() for p in net.parameters())}")
    x_train, y_train, x_test, y_test = x[600:1560], y[600:1560], x[1560:], y[1560:]
    bs = 64
    per_rank = bs // world
    for epoch in range(5):
        g = torch.Generator()
        g.manual_seed(epoch)
        idx = torch.randperm(len(x_train), generator=g)[rank:len(x_train):world]
        for i in range(0, len(idx), per_rank):
            b = idx[i:i + per_rank]
            loss = F.cross_entropy(model(x_train[b]), y_train[b], label_smoothing=0.05)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            with torch.no_grad():
                out = net(x_test)
                print(f"epoch {epoch}: loss {F.cross_entropy(out, y_test):.4f} acc {(out.argmax(1) == y_test).float().mean():.4f}")
    if rank == 0:
        before = net(x_test)
        for m in net.modules():
            if isinstance(m, LoRALinear):
                m.merge()
        print(f"merged, outputs differ by less than 1e-3: {bool((before - net(x_test)).abs().max() < 1e-3)}")
        torch.save({k: v for k, v in net.state_dict().items() if "lora" in k or k.startswith("4.")}, "adapter.pt")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
