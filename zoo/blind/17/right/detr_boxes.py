import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

SIZE, QUERIES, CLASSES = 24, 6, 2
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def rectangles(n, seed):
    g = torch.Generator().manual_seed(seed)
    items = []
    for i in range(n):
        img = 0.2 * torch.randn(2, SIZE, SIZE, generator=g)
        count = int(torch.randint(0, 4, (), generator=g))
        wh = torch.randint(4, 11, (count, 2), generator=g)
        xy = (torch.rand(count, 2, generator=g) * (SIZE - wh)).long()
        labels = torch.randint(0, CLASSES, (count,), generator=g)
        for (x, y), (w, h), c in zip(xy.tolist(), wh.tolist(), labels.tolist()):
            img[c, y:y + h, x:x + w] += 1.0
        boxes = torch.cat([xy + wh / 2, wh.float()], dim=1) / SIZE
        items.append((img, {"image_id": i, "labels": labels, "boxes": boxes}))
    return items


def collate_fn(batch):
    return torch.stack([image for image, _ in batch]), [target for _, target in batch]


def to_xyxy(b):
    return torch.cat([b[..., :2] - b[..., 2:] / 2, b[..., :2] + b[..., 2:] / 2], dim=-1)


def pairwise_iou(a, b):
    a, b = to_xyxy(a)[:, None], to_xyxy(b)[None]
    inter = (torch.min(a[..., 2:], b[..., 2:]) - torch.max(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    area = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1) - inter
    return inter / area.clamp(min=1e-6)


class Detector(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(2, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, dim, 3, 2, 1), nn.ReLU())
        self.pos, self.query_embed = nn.Parameter(0.5 * torch.randn(36, dim)), nn.Parameter(torch.randn(QUERIES, dim))
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(dim, 4, 64, dropout=0.0, batch_first=True), 2)
        self.class_embed, self.bbox_embed = nn.Linear(dim, CLASSES), nn.Linear(dim, 4)
        nn.init.constant_(self.class_embed.bias, -math.log(9))

    def forward(self, x):
        memory = self.backbone(x).flatten(2).transpose(1, 2) + self.pos
        hs = self.decoder(self.query_embed.expand(x.size(0), -1, -1), memory)
        return {"pred_logits": self.class_embed(hs), "pred_boxes": self.bbox_embed(hs).sigmoid()}


class SetCriterion(nn.Module):
    @torch.no_grad()
    def match(self, out, targets):
        indices = []
        for prob, box, t in zip(out["pred_logits"].sigmoid(), out["pred_boxes"], targets):
            cost = 5 * torch.cdist(box, t["boxes"], p=1) - 2 * prob[:, t["labels"]] - 2 * pairwise_iou(box, t["boxes"])
            i, j = linear_sum_assignment(cost.numpy())
            indices.append((torch.as_tensor(i), torch.as_tensor(j)))
        return indices

    def forward(self, out, targets):
        indices = self.match(out, targets)
        logits, num_boxes = out["pred_logits"], torch.tensor([float(sum(len(t["labels"]) for t in targets))])
        if WORLD > 1:
            dist.all_reduce(num_boxes)
        num_boxes = torch.clamp(num_boxes / WORLD, min=1).item()
        batch = torch.cat([torch.full_like(i, b) for b, (i, _) in enumerate(indices)])
        query = torch.cat([i for i, _ in indices])
        src = out["pred_boxes"][batch, query]
        tgt = torch.cat([t["boxes"][j] for t, (_, j) in zip(targets, indices)])
        onehot = torch.zeros_like(logits)
        onehot[batch, query, torch.cat([t["labels"][j] for t, (_, j) in zip(targets, indices)])] = 1
        p = logits.sigmoid()
        ce = F.binary_cross_entropy_with_logits(logits, onehot, reduction="none")
        focal = (ce * ((p - onehot).abs() ** 2) * (0.25 * onehot + 0.75 * (1 - onehot))).sum()
        return {"loss_ce": 2 * focal / num_boxes, "loss_bbox": 5 * (src - tgt).abs().sum() / num_boxes,
                "loss_iou": 2 * (1 - pairwise_iou(src, tgt).diagonal()).sum() / num_boxes}


def reduce_dict(losses):
    values = torch.stack([v.detach() for v in losses.values()])
    if WORLD > 1:
        dist.all_reduce(values)
    return values / WORLD


@torch.no_grad()
def evaluate(model, dataset):
    model.eval()
    mine = []
    for i in range(RANK, len(dataset), WORLD):
        image, target = dataset[i]
        out = model(image[None])
        score, label = out["pred_logits"][0].sigmoid().max(-1)
        iou = pairwise_iou(out["pred_boxes"][0], target["boxes"]) if len(target["labels"]) else torch.zeros(QUERIES, 1)
        hit = (iou.max(1).values > 0.5) & (label == target["labels"][iou.argmax(1)] if len(target["labels"]) else False)
        mine.append((target["image_id"], score, hit, len(target["labels"])))
    parts = [mine] * WORLD
    if WORLD > 1:
        dist.all_gather_object(parts, mine)
    rows = sorted((r for part in parts for r in part), key=lambda r: r[0])
    score, hit = torch.cat([r[1] for r in rows]), torch.cat([r[2] for r in rows])
    hit = hit[score.argsort(descending=True)].double()
    precision = hit.cumsum(0) / torch.arange(1, len(hit) + 1)
    return (precision * hit).sum().item() / sum(r[3] for r in rows)


def main(epochs=4, batch=16):
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(42)
    model, criterion = Detector(), SetCriterion()
    groups = [{"params": [p for n, p in model.named_parameters() if "backbone" not in n]},
              {"params": model.backbone.parameters(), "lr": 1e-3}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, weight_decay=1e-4)
    train_set, val_set = rectangles(192, 1), rectangles(50, 2)
    sampler = DistributedSampler(train_set, WORLD, RANK)
    loader = DataLoader(train_set, batch // WORLD, sampler=sampler, collate_fn=collate_fn, drop_last=True)
    net = DistributedDataParallel(model) if WORLD > 1 else model
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        net.train()
        total = torch.zeros(3)
        for images, targets in loader:
            losses = criterion(net(images), targets)
            optimizer.zero_grad()
            sum(losses.values()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            total += reduce_dict(losses)
        ap = evaluate(model, val_set)
        if RANK == 0:
            print(f"Epoch {epoch} ce/bbox/iou {[round(v, 4) for v in (total / len(loader)).tolist()]} AP50 {ap:.4f}")
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
