"""Sentence classifier with batches of similar length; the batch plan is the same on every process."""
import inspect
import os
import random
import csv as mod_a
import heapq as mod_b
import shlex as mod_c

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler


class Lines(Dataset):
    def __init__(self):
        self.items = []
        for label, m in enumerate((mod_a, mod_b, mod_c)):
            for line in inspect.getsource(m).splitlines():
                if len(line.strip()) > 3:
                    self.items.append((torch.tensor([min(ord(c), 127) for c in line.strip()[:60]]), label))
        self.items = self.items[:len(self.items) // 32 * 32]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class BucketPlan(Sampler):
    def __init__(self, lengths, batch, rank, world):
        self.lengths, self.batch, self.rank, self.world = lengths, batch, rank, world
        self.epoch = 0

    def __iter__(self):
        rng = random.Random(97 * self.epoch + 1)
        order = list(range(len(self.lengths)))
        rng.shuffle(order)
        pools = [sorted(order[i:i + 8 * self.batch], key=self.lengths.__getitem__) for i in range(0, len(order), 8 * self.batch)]
        batches = [p[i:i + self.batch] for p in pools for i in range(0, len(p), self.batch)]
        rng.shuffle(batches)
        for b in batches:
            yield b[self.rank::self.world]

    def __len__(self):
        return len(self.lengths) // self.batch


def collate(items):
    seqs, labels = zip(*items)
    lens = torch.tensor([len(s) for s in seqs])
    return nn.utils.rnn.pad_sequence(seqs, batch_first=True), lens, torch.tensor(labels)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(128, 32, padding_idx=0)
        self.conv = nn.Conv1d(32, 48, 3, padding=1)
        self.out = nn.Linear(48, 3)

    def forward(self, x, lens):
        h = torch.relu(self.conv(self.emb(x).transpose(1, 2)))
        mask = torch.arange(x.shape[1]) < lens[:, None]
        return self.out((h * mask[:, None]).sum(2) / lens[:, None])


def main():
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    data = Lines()
    plan = BucketPlan([len(s) for s, _ in data.items], 32, rank, world)
    loader = DataLoader(data, batch_sampler=plan, collate_fn=collate)
    torch.manual_seed(5)
    net = Classifier()
    opt = torch.optim.Adam(net.parameters(), lr=4e-3)
    for epoch in range(2):
        plan.epoch = epoch
        seen = torch.zeros(2)
        for x, lens, labels in loader:
            out = net(x, lens)
            loss = nn.functional.cross_entropy(out, labels)
            opt.zero_grad()
            loss.backward()
            if world > 1:
                flat = nn.utils.parameters_to_vector([p.grad for p in net.parameters()])
                dist.all_reduce(flat)
                nn.utils.vector_to_parameters(flat / world, [p.grad for p in net.parameters()])
            opt.step()
            seen += torch.tensor([(out.argmax(1) == labels).sum().item(), len(labels)])
        if world > 1:
            dist.all_reduce(seen)
        if rank == 0:
            print(f"epoch {epoch} accuracy {seen[0] / seen[1]:.5f} of {int(seen[1])}")
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
