"""Streams gauge readings from CSV files and predicts the level an hour ahead."""
import argparse
import csv
import os
import tempfile
import time
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

FIELDS = 7


def write_station_files(folder, files=3, rows=320):
    """Two gauges report in turn, each in units of its own."""
    rng = np.random.default_rng(2)
    coef = rng.normal(size=FIELDS)
    for f in range(files):
        with open(os.path.join(folder, f"gauge_{f}.csv"), "w", newline="") as fh:
            out = csv.writer(fh)
            for i in range(rows):
                z = rng.normal(size=FIELDS)
                y = np.tanh(z @ coef) + 0.05 * rng.normal()
                x = z * 3 + 10 if i % 2 else z * 1.5 + 4
                out.writerow([f"{v:.6f}" for v in (*x, y)])


def read(folder):
    for name in sorted(os.listdir(folder)):
        with open(os.path.join(folder, name), newline="") as fh:
            for row in csv.reader(fh):
                yield np.array(row, dtype=np.float64)


class Gauges(IterableDataset):
    def __init__(self, folder, rank, world):
        self.folder, self.rank, self.world = folder, rank, world
        self.scaler = StandardScaler()
        chunk = []
        for row in read(folder):
            chunk.append(row[:FIELDS])
            if len(chunk) == 80:
                self.scaler.partial_fit(np.stack(chunk))
                chunk = []

    def rows(self):
        return islice(read(self.folder), self.rank, None, self.world)

    def __iter__(self):
        for row in self.rows():
            x = self.scaler.transform(row[None, :FIELDS])[0]
            yield x.astype(np.float32), np.float32(row[FIELDS])


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--passes", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=80)
    args = ap.parse_args()

    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    with tempfile.TemporaryDirectory() as folder:
        write_station_files(folder)
        stream = Gauges(folder, rank, world)
        loader = DataLoader(stream, batch_size=args.batch_size // world)
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(FIELDS, 32), nn.Tanh(), nn.Linear(32, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for n in range(args.passes):
            seen, total = 0, 0.0
            for x, y in loader:
                loss = nn.functional.mse_loss(model(x).squeeze(1), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item() * len(y)
                seen += len(y)
            stats = torch.tensor([total, seen], dtype=torch.float64)
            dist.all_reduce(stats)
            if rank == 0:
                print(f"pass {n}: {int(stats[1])} readings, mse {stats[0] / stats[1]:.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
