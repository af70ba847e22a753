import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_classification
from sklearn.metrics import accuracy_score, f1_score
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def load():
    x, y = make_classification(n_samples=1400, n_features=20, n_informative=10, n_classes=6, n_clusters_per_class=1,
                               weights=[0.6, 0.2, 0.1, 0.06, 0.02, 0.02], class_sep=0.9, random_state=12)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    return TensorDataset(x[:1024], y[:1024]), TensorDataset(x[1024:], y[1024:])


class TabularNet(nn.Module):
    def __init__(self, features=20, classes=6, width=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(features, width), nn.LayerNorm(width), nn.ReLU(),
                                 nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, x):
        return self.net(x)


def predict(model, subset):
    preds, targets = [], []
    model.eval()
    with torch.no_grad():
        for x, y in DataLoader(subset, batch_size=64):
            preds += model(x).argmax(1).tolist()
            targets += y.tolist()
    model.train()
    return preds, targets


def evaluate(model, test_set, rank, world):
    mine = Subset(test_set, list(range(rank, len(test_set), world)))
    preds, targets = predict(model.module, mine)
    metrics = torch.tensor([accuracy_score(targets, preds),
                            f1_score(targets, preds, average="macro", labels=range(6), zero_division=0)])
    dist.all_reduce(metrics)
    metrics /= world
    return dict(accuracy=metrics[0].item(), macro_f1=metrics[1].item())


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    train_set, test_set = load()
    sampler = DistributedSampler(train_set, shuffle=True)
    loader = DataLoader(train_set, batch_size=64 // world, sampler=sampler)
    model = DDP(TabularNet())
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        result = evaluate(model, test_set, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: " + ", ".join(f"{k}={v:.4f}" for k, v in result.items()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
