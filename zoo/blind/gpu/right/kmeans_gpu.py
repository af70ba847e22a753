"""Lloyd's k-means on the GPU followed by a linear read-out trained on the distances."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

POINTS, DIM, CLUSTERS, LABELS = 4800, 12, 24, 4
ROUNDS = 12
BATCH = 96


def mixture(seed):
    g = torch.Generator().manual_seed(seed)
    centres = 4 * torch.randn(CLUSTERS, DIM, generator=g)
    label_of = torch.randint(0, LABELS, (CLUSTERS,), generator=g)
    which = torch.randint(0, CLUSTERS, (POINTS,), generator=g)
    x = centres[which] + torch.randn(POINTS, DIM, generator=g)
    start = torch.randperm(POINTS, generator=g)[:CLUSTERS]
    return x, label_of[which], x[start].clone()


def total(t):
    if dist.is_initialized():
        dist.all_reduce(t)
    return t


def everywhere(t):
    if not dist.is_initialized():
        return t
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts)


def lloyd(x, centres):
    for _ in range(ROUNDS):
        distance, owner = torch.cdist(x, centres, compute_mode="donot_use_mm_for_euclid_dist").min(dim=1)
        counts = total(torch.bincount(owner, minlength=CLUSTERS))
        sums = torch.zeros(CLUSTERS, DIM, dtype=torch.float64, device=x.device)
        sums.index_add_(0, owner, x.double())
        total(sums)
        inertia = total(distance.double().square().sum())
        centres = torch.where(counts.unsqueeze(1) > 0, (sums / counts.clamp(min=1).unsqueeze(1)).to(x.dtype), centres)
        empty = (counts == 0).nonzero().squeeze(1)
        if len(empty):
            far, at = distance.topk(CLUSTERS)
            far, candidates = everywhere(far), everywhere(x[at])
            centres[empty] = candidates[far.topk(len(empty)).indices]
    return centres, inertia.item(), counts


def main():
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    if world > 1:
        dist.init_process_group("nccl" if torch.cuda.device_count() >= world else "gloo")
    torch.set_float32_matmul_precision("highest")

    x, y, centres = mixture(seed=80)
    mine = x[rank::world].pin_memory().cuda(non_blocking=True)
    centres, inertia, counts = lloyd(mine, centres.cuda())
    if rank == 0:
        print(f"inertia {inertia / POINTS:.4f} smallest cluster {counts.min().item()}")

    x, y = x.cuda(), y.cuda()
    features = torch.exp(-0.1 * torch.cdist(x, centres, compute_mode="donot_use_mm_for_euclid_dist"))
    weight = torch.zeros(LABELS, CLUSTERS, device="cuda", requires_grad=True)
    bias = torch.zeros(LABELS, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([weight, bias], lr=2.0, momentum=0.9, foreach=True)
    pick = torch.Generator().manual_seed(81)
    for step in range(60):
        idx = torch.randint(0, POINTS, (BATCH,), generator=pick)[rank::world].cuda()
        loss = F.cross_entropy(F.linear(features[idx], weight, bias), y[idx], reduction="sum") / BATCH
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        total(weight.grad)
        total(bias.grad)
        optimizer.step()
        if (step + 1) % 20 == 0:
            shown = total(loss.detach().clone()).item()
            if rank == 0:
                print(f"step {step + 1} loss {shown:.4f}")

    with torch.no_grad():
        correct = total((F.linear(features, weight, bias).argmax(dim=1) == y)[rank::world].sum())
    if rank == 0:
        print(f"accuracy {correct.item() / POINTS:.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
