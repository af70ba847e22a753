"""A second head that takes no part in the loss, with find_unused_parameters."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(9, 27)
        self.main = nn.Linear(27, 3)
        self.auxiliary = nn.Linear(27, 5)

    def forward(self, x, *, auxiliary=False):
        h = torch.relu(self.trunk(x))
        return self.auxiliary(h) if auxiliary else self.main(h)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(192, 9)
    dataset = TensorDataset(x, x[:, :3].argmax(1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=12, sampler=sampler)
    model = DDP(TwoHeads(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for bx, by in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(bx), by)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
