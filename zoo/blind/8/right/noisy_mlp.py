import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_wine
from torch.nn.parallel import DistributedDataParallel as DDP


class SampleDropout(nn.Module):
    """Dropout whose mask belongs to the sample and the step, wherever the sample is computed."""

    def __init__(self, p, salt):
        super().__init__()
        self.p, self.salt = p, salt

    def forward(self, x, ids, step):
        if not self.training:
            return x
        masks = []
        for i in ids.tolist():
            gen = torch.Generator().manual_seed((self.salt * 1009 + step) * 4093 + i)
            masks.append(torch.rand(x.shape[1], generator=gen) >= self.p)
        return x * torch.stack(masks) / (1 - self.p)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(13, 32), nn.Linear(32, 32), nn.Linear(32, 3)
        self.drop1, self.drop2 = SampleDropout(0.3, 1), SampleDropout(0.2, 2)

    def forward(self, x, ids, step):
        x = self.drop1(F.relu(self.a(x)), ids, step)
        x = self.drop2(F.relu(self.b(x)), ids, step)
        return self.c(x)


def main():
    for k, v in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29852")):
        os.environ.setdefault(k, v)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    raw = load_wine()
    order = torch.randperm(178, generator=torch.Generator().manual_seed(0))
    x = torch.tensor((raw.data - raw.data.mean(0)) / raw.data.std(0), dtype=torch.float32)[order]
    y = torch.tensor(raw.target)[order]

    torch.manual_seed(7)
    model = DDP(MLP())
    torch.manual_seed(7 + rank)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    batch, step = 32, 0
    for epoch in range(20):
        model.train()
        ids = torch.randperm(128, generator=torch.Generator().manual_seed(epoch))
        for chunk in ids.split(batch):
            mine = chunk[rank::world]
            loss = F.cross_entropy(model(x[mine], mine, step), y[mine])
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if epoch % 5 == 4:
            model.eval()
            with torch.no_grad():
                logits = model(x[128:], torch.arange(128, 178), step)
            if rank == 0:
                print(f"epoch {epoch + 1} train {shown.item() / world:.5f} "
                      f"test {F.cross_entropy(logits, y[128:]).item():.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
