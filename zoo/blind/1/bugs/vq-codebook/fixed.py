import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class EMAQuantizer(nn.Module):
    def __init__(self, codes=24, dim=8, decay=0.8):
        super().__init__()
        self.codes, self.decay = codes, decay
        book = torch.randn(codes, dim) * 0.3
        self.register_buffer("codebook", book)
        self.register_buffer("usage", torch.ones(codes))
        self.register_buffer("sums", book.clone())

    @torch.no_grad()
    def update(self, flat, idx):
        onehot = F.one_hot(idx, self.codes).to(flat.dtype)
        counts = onehot.sum(0)
        sums = onehot.T @ flat
        dist.all_reduce(counts)
        dist.all_reduce(sums)
        self.usage.mul_(self.decay).add_(counts, alpha=1 - self.decay)
        self.sums.mul_(self.decay).add_(sums, alpha=1 - self.decay)
        n = self.usage.sum()
        smoothed = (self.usage + 1e-2) / (n + self.codes * 1e-2) * n
        self.codebook.copy_(self.sums / smoothed.unsqueeze(1))

    def forward(self, z):
        flat = z.reshape(-1, z.size(-1))
        idx = torch.cdist(flat.detach(), self.codebook).argmin(1)
        q = self.codebook[idx].view_as(z)
        commit = F.mse_loss(z, q.detach())
        q = z + (q - z).detach()
        if self.training:
            self.update(flat.detach(), idx)
        return q, commit, idx


class VQAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 8))
        self.vq = EMAQuantizer()
        self.dec = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 16))

    def forward(self, patches):
        q, commit, idx = self.vq(self.enc(patches))
        return self.dec(q), commit, idx


def patchify(images):
    p = images.unfold(1, 4, 4).unfold(2, 4, 4)
    return p.reshape(len(images), 4, 16)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    images = torch.tensor(load_digits().images, dtype=torch.float32)[:960] / 16
    data = TensorDataset(patchify(images))
    sampler = DistributedSampler(data, shuffle=True, seed=1)
    loader = DataLoader(data, batch_size=64 // world, sampler=sampler)
    model = DDP(VQAutoencoder())
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (patches,) in loader:
            recon, commit, idx = model(patches)
            loss = F.mse_loss(recon, patches) + 0.25 * commit
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            used = idx.unique().numel()
            print(f"epoch {epoch} loss {loss.item():.4f} commitment {commit.item():.4f} codes in last batch {used}")
    if rank == 0:
        torch.save(model.module.state_dict(), "vqae.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
