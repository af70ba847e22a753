"""A small DETR: set prediction of boxes with Hungarian matching and losses after each decoder layer."""
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment

SIZE, QUERIES, CLASSES, BATCH, STEPS = 16, 6, 2, 16, 26


def picture(number):
    """Bright (class 0) and dark (class 1) boxes, none to four of them."""
    rng = np.random.default_rng(number)
    image, boxes, labels = rng.normal(0, 0.1, (SIZE, SIZE)), [], []
    for _ in range(rng.integers(0, 5)):
        (y, x), (h, w), label = rng.integers(0, 11, 2), rng.integers(3, 6, 2), rng.integers(CLASSES)
        image[y:y + h, x:x + w] = 1 - 2 * label
        boxes.append([(x + w / 2) / SIZE, (y + h / 2) / SIZE, w / SIZE, h / SIZE])
        labels.append(label)
    return image, torch.tensor(boxes, dtype=torch.float32).view(-1, 4), torch.tensor(labels, dtype=torch.long)


class DETR(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, width, 3, 2, 1))
        self.place = nn.Parameter(torch.randn(16, width) * 0.5)
        self.encoder = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(width, 4, 64, dropout=0.0, batch_first=True) for _ in range(2))
        self.query = nn.Parameter(torch.randn(QUERIES, width))
        self.label, self.box = nn.Linear(width, CLASSES + 1), nn.Linear(width, 4)

    def forward(self, x):
        memory = self.encoder(self.backbone(x).flatten(2).transpose(1, 2) + self.place)
        q, out = self.query.expand(len(x), -1, -1), []
        for layer in self.decoder:
            q = layer(q, memory)
            out.append((self.label(q), self.box(q).sigmoid()))
        return out


class SetCriterion(nn.Module):
    def __init__(self, eos=0.2):
        super().__init__()
        self.register_buffer("weight", torch.tensor([1.0] * CLASSES + [eos]))

    @torch.no_grad()
    def match(self, logits, boxes, targets):
        result = []
        for p, b, (tb, tl) in zip(logits.softmax(-1), boxes, targets):
            cost = 5 * torch.cdist(b, tb, p=1) - p[:, tl]
            result.append([torch.as_tensor(i) for i in linear_sum_assignment(cost.numpy())])
        return result

    def forward(self, outputs, targets):
        total = 0.0
        num_boxes = torch.tensor([float(sum(len(tl) for _, tl in targets))])
        if dist.is_initialized():
            dist.all_reduce(num_boxes)
        world = dist.get_world_size() if dist.is_initialized() else 1
        num_boxes = (num_boxes / world).clamp(min=1 / world)
        for logits, boxes in outputs:
            classes = torch.full(logits.shape[:2], CLASSES)
            box_sum = boxes.sum() * 0
            for k, ((i, j), (tb, tl)) in enumerate(zip(self.match(logits, boxes, targets), targets)):
                classes[k, i] = tl[j]
                box_sum = box_sum + F.l1_loss(boxes[k, i], tb[j], reduction="sum")
            norm = self.weight[classes].sum()
            if dist.is_initialized():
                dist.all_reduce(norm)
            ce = F.cross_entropy(logits.flatten(0, 1), classes.flatten(), self.weight, reduction="sum")
            total = total + ce / (norm / world) + 5 * box_sum / num_boxes
        return total


def main():
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(31)
    net, criterion = DETR(), SetCriterion()
    model = nn.parallel.DistributedDataParallel(net) if world > 1 else net
    groups = [{"params": [p for n, p in net.named_parameters() if not n.startswith("backbone")]},
              {"params": net.backbone.parameters(), "lr": 5e-4}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, weight_decay=1e-4, eps=1e-5)
    pictures = [picture(i) for i in range(208)]
    order = np.random.default_rng(0)
    for step in range(STEPS):
        if step % 13 == 0:
            deck = order.permutation(len(pictures))
        batch = deck[step % 13 * BATCH: (step % 13 + 1) * BATCH][rank * BATCH // world: (rank + 1) * BATCH // world]
        images = torch.tensor(np.stack([pictures[i][0] for i in batch])[:, None], dtype=torch.float32)
        loss = criterion(model(images), [pictures[i][1:] for i in batch])
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        shown = loss.detach().clone()
        if world > 1:
            dist.reduce(shown, 0)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {shown.item() / world:.4f} norm {norm.item():.3f}", flush=True)
    if world > 1:
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
