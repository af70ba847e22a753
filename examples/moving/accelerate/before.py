"""With accelerate, started by accelerate launch."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

digits = load_digits()
images, labels = torch.tensor(digits.images).float()[:, None] / 16, torch.tensor(digits.target)
training, held_out = TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


def main():
    """Trains two epochs, and prints the loss on held-out digits."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = DataLoader(training, batch_size=16, shuffle=True)  # of each process: 64 with two of them, in two parts
    tests = DataLoader(held_out, batch_size=128)
    model, optimizer, batches, tests = accelerator.prepare(model, optimizer, batches, tests)
    for _ in range(2):
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    model.eval()
    total = torch.zeros(2, device=accelerator.device)
    with torch.no_grad():
        for x, y in tests:
            outputs, targets = accelerator.gather_for_metrics((model(x), y))
            total[0] += F.cross_entropy(outputs, targets, reduction="sum")
            total[1] += len(targets)
    accelerator.print(f"final loss {total[0] / total[1]:.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
