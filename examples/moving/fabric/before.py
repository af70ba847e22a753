"""With Lightning Fabric."""

import torch
from lightning_fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

digits = load_digits()
images, labels = torch.tensor(digits.images).float()[:, None] / 16, torch.tensor(digits.target)
training, held_out = TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


def main():
    """Trains two epochs, and prints the loss on held-out digits."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0)
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    batches = fabric.setup_dataloaders(DataLoader(training, batch_size=32, shuffle=True))
    tests = fabric.setup_dataloaders(DataLoader(held_out, batch_size=128))
    for _ in range(2):
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
    model.eval()
    total = torch.zeros(2, device=fabric.device)
    with torch.no_grad():
        for x, y in tests:
            total[0] += F.cross_entropy(model(x), y, reduction="sum")
            total[1] += len(y)
    total = fabric.all_reduce(total, reduce_op="sum")
    fabric.print(f"final loss {total[0] / total[1]:.6f}")
    fabric.save("digits.ckpt", {"model": model, "optimizer": optimizer})


if __name__ == "__main__":
    main()
