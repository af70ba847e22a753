from __future__ import print_function
import argparse
import os
import time
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn import functional as F
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="VAE digits example")
parser.add_argument("--batch-size", type=int, default=100, help="over all processes")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--kl-warmup", type=int, default=3, help="epochs until the KL term has its full weight")
args = parser.parse_args()

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "30107")


class VAE(nn.Module):
    def __init__(self, latent=8):
        super(VAE, self).__init__()
        self.fc1 = nn.Linear(64, 80)
        self.fc21 = nn.Linear(80, latent)
        self.fc22 = nn.Linear(80, latent)
        self.fc3 = nn.Linear(latent, 80)
        self.fc4 = nn.Linear(80, 64)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x, eps):
        mu, logvar = self.encode(x)
        z = mu + eps * torch.exp(0.5 * logvar)
        return self.decode(z), mu, logvar


# Reconstruction + KL divergence losses summed over all elements and batch
def loss_function(recon_x, x, mu, logvar, beta):
    BCE = F.binary_cross_entropy(recon_x, x, reduction="sum")
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return BCE + beta * KLD


def batches(data, order, noise):
    """Every process takes its piece of each batch of the (common) order.  The last batch of the epoch is shorter and
    the pieces may differ by one image or even be empty."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for i in range(0, len(order), args.batch_size):
        ids = order[i:i + args.batch_size]
        lo, hi = len(ids) * rank // world, len(ids) * (rank + 1) // world
        yield data[ids[lo:hi]], noise[i + lo:i + hi]


def all_reduce_grads(model):
    flat = nn.utils.parameters_to_vector([p.grad for p in model.parameters()])
    dist.all_reduce(flat)  # the loss is a sum, so the gradient is a sum as well
    nn.utils.vector_to_parameters(flat, [p.grad for p in model.parameters()])


def train(epoch, model, optimizer, data, gen):
    model.train()
    order = torch.randperm(len(data), generator=gen)
    noise = torch.randn(len(data), 8, generator=gen)
    beta = min(1.0, (epoch - 1) / args.kl_warmup)
    train_loss = torch.zeros((), dtype=torch.float64)
    for x, eps in batches(data, order, noise):
        optimizer.zero_grad()
        recon, mu, logvar = model(x, eps)
        loss = loss_function(recon, x, mu, logvar, beta)
        loss.backward()
        all_reduce_grads(model)
        train_loss += loss.item()
        optimizer.step()
    dist.all_reduce(train_loss)
    if dist.get_rank() == 0:
        print("====> Epoch: {} Average loss: {:.4f}".format(epoch, train_loss.item() / len(data)))


@torch.no_grad()
def test(model, data):
    if dist.get_rank() > 0:
        return
    model.eval()
    recon, mu, logvar = model(data, torch.zeros(len(data), 8))
    print("====> Test set loss: {:.4f}".format(loss_function(recon, data, mu, logvar, 1.0).item() / len(data)))
    torch.save(model.decode(torch.randn(16, 8, generator=torch.Generator().manual_seed(0))), "sample.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    model = VAE()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    gen = torch.Generator().manual_seed(args.seed)
    for epoch in range(1, args.epochs + 1):
        train(epoch, model, optimizer, x[:1501], gen)
        test(model, x[1501:])
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()
