import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.fsdp import fully_shard


class Mixer(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.token = nn.Linear(tokens, tokens, bias=False)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        x = x + self.token(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.fc2(F.gelu(self.fc1(self.n2(x))))


class DigitMixer(nn.Module):
    def __init__(self, dim=32, depth=2):
        super().__init__()
        self.patch = nn.Linear(4, dim)
        self.layers = nn.ModuleList(Mixer(16, dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10)

    def forward(self, img):
        p = img.unfold(1, 2, 2).unfold(2, 2, 2).reshape(len(img), 16, 4)
        x = self.patch(p)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


@torch.no_grad()
def init_weights(model):
    for m in model.modules():
        if isinstance(m, nn.Linear):
            nn.init.trunc_normal_(m.weight, std=0.15)
            if m.bias is not None:
                nn.init.zeros_(m.bias)
        elif isinstance(m, nn.LayerNorm):
            nn.init.ones_(m.weight)
            nn.init.zeros_(m.bias)


def build(seed):
    with torch.device("meta"):
        model = DigitMixer()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    init_weights(model)
    return model


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--global-batch", type=int, default=64)
    ap.add_argument("--seed", type=int, default=123)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(args.seed)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05, eps=1e-6)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    for step in range(args.steps):
        lo = step * args.global_batch % 1536
        rows = torch.arange(lo, lo + args.global_batch).chunk(world)[rank]
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        if step % 6 == 0:
            gnorm = norm.full_tensor().item() if hasattr(norm, "full_tensor") else norm.item()
            if rank == 0:
                print(f"step {step} loss {loss.item():.4f} grad norm {gnorm:.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
