"""FSDP2 (fully_shard) regressor with row-weighted loss and an average kept on the shards.

FSDP takes the mean over the processes, hence the factor `world` in front of a loss that is
divided by the weight of the global batch. Dropout masks are drawn per row number."""
import os, time
import torch, torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_friedman1
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class RowDropout(nn.Module):
    """The mask of a row depends on (step, row), so it does not matter where the row is computed."""
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x, step, rows):
        if not self.training:
            return x
        keep = torch.stack([torch.rand(x.shape[1], generator=torch.Generator().manual_seed(step * 10_007 + r))
                            for r in rows.tolist()]) >= self.p
        return x * keep / (1 - self.p)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(10, 50)          # 50 and 30 rows: shards of unequal size over 4
        self.b = nn.Linear(50, 30)
        self.c = nn.Linear(30, 1)
        self.drop = RowDropout(0.15)

    def forward(self, x, step, rows):
        x = self.drop(torch.relu(self.a(x)), step, rows)
        return self.c(torch.relu(self.b(x)))


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="0")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    x, y = make_friedman1(900, noise=0.5, random_state=3)
    x = torch.tensor(x, dtype=torch.float32)
    y = torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)
    weight = 0.2 + x[:, 3]                               # rich quarry faces count more

    torch.manual_seed(rank)                              # only the per-process log sample uses this
    lucky = torch.randint(0, 700, (1,)).item()
    torch.manual_seed(1234)
    model = Net()
    for layer in (model.a, model.b, model.c):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    average = {n: p.detach().clone() for n, p in model.named_parameters()}

    gen = torch.Generator().manual_seed(77)
    for step in range(40):
        batch = torch.randperm(700, generator=gen)[:70]
        mine = batch.tensor_split(world)[rank]           # 18, 18, 17, 17
        err = model(x[mine], step, mine)[:, 0] - y[mine]
        loss = (weight[mine] * err.square()).sum() / weight[batch].sum()
        opt.zero_grad()
        (world * loss).backward()
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.8)
        opt.step()
        with torch.no_grad():
            for n, p in model.named_parameters():
                average[n].lerp_(p, 0.1)
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        if step % 10 == 9 and rank == 0:
            print(f"step {step + 1} loss {whole.item():.5f} norm {total.full_tensor().item():.4f} "
                  f"(row {lucky} watched here)", flush=True)

    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(average[n])
    model.eval()
    with torch.no_grad():
        hold = torch.arange(700, 900).tensor_split(world)[rank]
        err = (model(x[hold], 0, hold)[:, 0] - y[hold]).square().sum()
        dist.all_reduce(err)
    if rank == 0:
        print(f"held-out mse of the average {err.item() / 200:.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
