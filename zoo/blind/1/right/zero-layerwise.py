# Bag-of-tokens classifier: sharded Adam states, layer-wise learning rates, a frozen embedding, an endless loader, F1 by gather.
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.metrics import f1_score
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS = int(os.environ.get("STEPS", 36))
BATCH = int(os.environ.get("BATCH", 16))
EVAL_EVERY = 12
VOCAB, LENGTH, CLASSES = 200, 12, 5


def make_data(n, seed):
    rng = np.random.default_rng(seed)
    label = rng.integers(0, CLASSES, n)
    centre = label * (VOCAB // CLASSES) + VOCAB // (2 * CLASSES)
    tokens = (centre[:, None] + rng.normal(0, 20, (n, LENGTH)).round().astype(int)) % VOCAB
    return TensorDataset(torch.from_numpy(tokens), torch.from_numpy(label))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.body = nn.ModuleList([nn.Linear(32, 64), nn.Linear(64, 64)])
        self.head = nn.Linear(64, CLASSES)

    def forward(self, tokens):
        h = self.embed(tokens).mean(1)
        for layer in self.body:
            h = nn.functional.silu(layer(h))
        return self.head(h)


def forever(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def param_groups(model, lr, decay):
    parts = [model.head, *reversed(list(model.body))]
    return [{"params": list(m.parameters()), "lr": lr * decay ** k} for k, m in enumerate(parts)]


@torch.no_grad()
def macro_f1(net, data, rank, world):
    sampler = DistributedSampler(data, shuffle=False)
    pred = torch.cat([net(t).argmax(1) for t, _ in DataLoader(data, 50, sampler=sampler)])
    bucket = [torch.empty_like(pred) for _ in range(world)]
    dist.all_gather(bucket, pred)
    # the sampler deals samples out like cards: undo that, cut the padding at the end
    pred = torch.stack(bucket, 1).flatten()[:len(data)]
    return f1_score(data.tensors[1].numpy(), pred.numpy(), average="macro")


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)

    train, test = make_data(512, 0), make_data(251, 1)
    model = Classifier()
    model.embed.weight.requires_grad_(False)
    ddp = DDP(model)
    sampler = DistributedSampler(train)
    batches = forever(DataLoader(train, BATCH, sampler=sampler), sampler)
    groups = param_groups(model, 1e-2, 0.7)
    opt = ZeroRedundancyOptimizer(groups, optimizer_class=torch.optim.Adam, lr=1e-2)
    sched = torch.optim.lr_scheduler.LinearLR(opt, start_factor=1.0, end_factor=0.1, total_iters=STEPS)

    for step in range(1, STEPS + 1):
        tokens, label = next(batches)
        opt.zero_grad()
        loss = nn.functional.cross_entropy(ddp(tokens), label)
        loss.backward()
        opt.step()
        sched.step()
        if step % EVAL_EVERY == 0:
            model.eval()
            f1 = macro_f1(model, test, rank, world)
            model.train()
            held = sum(t.numel() for s in opt.optim.state.values() for t in s.values() if t.ndim)
            print(f"[{rank}] step {step} loss {loss.item():.4f} macro-F1 {f1:.4f} state numbers held here {held}", flush=True)

    opt.consolidate_state_dict(to=0)
    if rank == 0:
        os.makedirs("runs", exist_ok=True)
        torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "step": STEPS}, "runs/zero.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
