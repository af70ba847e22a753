"""Self-distillation with a momentum teacher and a centred output, on synthetic views."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class DistillationLoss(nn.Module):
    def __init__(self, dim, momentum=0.9):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("centre", torch.zeros(1, dim))

    def forward(self, student, teacher):
        target = F.softmax((teacher - self.centre) / 0.1, dim=-1)
        loss = -(target * F.log_softmax(student / 0.2, dim=-1)).sum(-1).mean()
        self.update_centre(teacher)
        return loss

    @torch.no_grad()
    def update_centre(self, teacher):
        batch_centre = teacher.mean(0, keepdim=True)
        self.centre.mul_(self.momentum).add_(batch_centre, alpha=1 - self.momentum)


@torch.no_grad()
def update_teacher(teacher, student, decay=0.98):
    for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
        old.mul_(decay).add_(new, alpha=1 - decay)


def views(n=256):
    g = torch.Generator().manual_seed(17)
    x = torch.randn(n, 1, 16, generator=g) + torch.linspace(-2, 2, n)[:, None, None]
    pair = x + 0.3 * torch.randn(n, 2, 16, generator=g)
    return TensorDataset(pair[:, 0], pair[:, 1])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    student = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 12))
    teacher = copy.deepcopy(student).requires_grad_(False)
    model = DDP(student)
    criterion = DistillationLoss(12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dataset = views()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for one, two in loader:
            loss = criterion(model(one), teacher(two))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            update_teacher(teacher, student)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
