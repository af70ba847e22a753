"""Small causal transformer on lines of the Python documentation strings, with FSDP2; the loss is per byte of the batch."""
import os
import textwrap
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, LONGEST, DIM = 96, 40, 32


def corpus():
    text = " ".join((m.__doc__ or "") for m in (os, textwrap, time, textwrap.TextWrapper, os.walk, os.fwalk, os.popen))
    lines = textwrap.wrap(" ".join(text.split()), 38)
    # lines of every length, as in a letter
    return [torch.tensor([min(max(ord(c) - 32, 0), VOCAB - 2) for c in line[: 6 + (7 * i) % 33]]) for i, line in enumerate(lines)]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.o = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 3 * DIM), nn.Linear(3 * DIM, DIM)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, 4, DIM // 4).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, DIM))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Writer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, DIM), nn.Embedding(LONGEST, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, x):
        h = self.tok(x) + self.pos.weight[: x.shape[1]]
        for layer in self.layers:
            h = layer(h)
        return self.out(self.norm(h))


def collate(lines):
    x = nn.utils.rnn.pad_sequence([s[:-1] for s in lines], batch_first=True, padding_value=VOCAB - 1)
    y = nn.utils.rnn.pad_sequence([s[1:] for s in lines], batch_first=True, padding_value=-100)
    return x, y


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(8)
    net = Writer()
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    for m in (*net.layers, net):
        m.set_force_sum_reduction_for_comms(True)
        m.set_gradient_divide_factor(1.0)  # gradients are summed: the loss below has the whole batch's count in it
    opt = torch.optim.AdamW(net.parameters(), lr=6e-3, eps=1e-6, weight_decay=0.1)
    lines = corpus()
    for step in range(24):
        pick = torch.randint(len(lines), (16,), generator=torch.Generator().manual_seed(step)).tolist()
        x, y = collate([lines[i] for i in pick[rank::world]])
        count = (y != -100).sum()
        dist.all_reduce(count)
        loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten(), reduction="sum") / count
        opt.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.3).full_tensor()
        opt.step()
        if step % 8 == 7:
            whole = loss.detach().clone()
            dist.all_reduce(whole)
            if rank == 0:
                print(f"step {step + 1} bytes {count.item()} loss {whole.item():.5f} norm {norm.item():.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
