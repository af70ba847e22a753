"""A small variational autoencoder with hand-written gradient averaging."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(64, 32)
        self.mean = nn.Linear(32, 4)
        self.log_variance = nn.Linear(32, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 64))

    def forward(self, x):
        h = F.relu(self.encoder(x))
        mean, log_variance = self.mean(h), self.log_variance(h)
        z = mean + 0.1 * (log_variance / 2).exp()
        return self.decoder(z), mean, log_variance


def loss_function(x, output):
    decoded, mean, log_variance = output
    kl = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).mean()
    return F.mse_loss(decoded, x) + 0.01 * kl


def reduce_gradients(model):
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    offset = 0
    for p in model.parameters():
        p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
        offset += p.numel()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(10 + dist.get_rank())
    model = VAE()
    dataset = TensorDataset(torch.tensor(load_digits().data[:512], dtype=torch.float32) / 16)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            loss = loss_function(x, model(x))
            optimizer.zero_grad()
            loss.backward()
            reduce_gradients(model)
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
