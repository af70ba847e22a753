"""MLP on tabular data with a confusion matrix kept on the device."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CLASSES, FEATURES = 6, 24
TRAIN, VAL = 1440, 480
BATCH, VAL_BATCH = 96, 60
EPOCHS = 4


def make_table(n, generator, centres, mixing):
    """Rows become noisier towards the end, as the later sensors are older."""
    y = torch.randint(0, CLASSES, (n,), generator=generator)
    spread = torch.linspace(0.4, 2.6, n).unsqueeze(1)
    x = centres[y] + spread * torch.randn(n, FEATURES, generator=generator)
    return torch.tanh(x @ mixing), y


class Tabular(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, width), nn.SiLU(), nn.LayerNorm(width),
            nn.Linear(width, width), nn.SiLU(), nn.LayerNorm(width),
            nn.Linear(width, CLASSES),
        )

    def forward(self, x):
        return self.layers(x)


@torch.no_grad()
def evaluate(net, x, y, rank, world):
    net.eval()
    mine = torch.arange(len(x), device=x.device)[rank::world]
    confusion = torch.zeros(CLASSES, CLASSES, dtype=torch.long, device=x.device)
    for idx in mine.split(VAL_BATCH // world):
        predicted = net(x[idx]).argmax(dim=1)
        pairs = y[idx] * CLASSES + predicted
        confusion += torch.bincount(pairs, minlength=CLASSES ** 2).view(CLASSES, CLASSES)
        if world > 1:
            dist.all_reduce(confusion)
    net.train()
    confusion = confusion.double()
    recall = confusion.diagonal() / confusion.sum(dim=1).clamp(min=1)
    return {
        "accuracy": (confusion.trace() / confusion.sum()).item(),
        "balanced": recall.mean().item(),
        "worst": recall.min().item(),
    }


def main():
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    if world > 1:
        dist.init_process_group("nccl" if torch.cuda.device_count() >= world else "gloo")

    g = torch.Generator().manual_seed(8)
    centres = 1.2 * torch.randn(CLASSES, FEATURES, generator=g)
    mixing = torch.randn(FEATURES, FEATURES, generator=g) / FEATURES ** 0.5
    x, y = (t.to(device) for t in make_table(TRAIN, g, centres, mixing))
    val_x, val_y = (t.to(device) for t in make_table(VAL, g, centres, mixing))

    torch.manual_seed(0)
    net = Tabular().to(device)
    model = DDP(net, device_ids=[device.index]) if world > 1 else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, foreach=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * TRAIN // BATCH)

    best, best_state = -1.0, None
    for epoch in range(EPOCHS):
        order = torch.randperm(TRAIN, generator=torch.Generator().manual_seed(100 + epoch))
        losses = torch.zeros((), device=device)
        for start in range(0, TRAIN, BATCH):
            idx = order[start:start + BATCH][rank::world].to(device, non_blocking=True)
            loss = F.cross_entropy(model(x[idx]), y[idx], label_smoothing=0.05)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            losses += loss.detach()
        if world > 1:
            dist.all_reduce(losses)
        scores = evaluate(net, val_x, val_y, rank, world)
        if scores["balanced"] > best:
            best = scores["balanced"]
            best_state = {k: v.clone() for k, v in net.state_dict().items()}
        if rank == 0:
            shown = " ".join(f"{k} {v:.4f}" for k, v in scores.items())
            print(f"epoch {epoch} loss {losses.item() / (TRAIN // BATCH) / world:.4f} {shown}")

    net.load_state_dict(best_state)
    if rank == 0:
        print(f"best balanced accuracy {best:.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
