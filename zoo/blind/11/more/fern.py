# MoCo v1 with a dictionary queue that is the same on all processes
import os, time
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
from sklearn.datasets import load_digits


@torch.no_grad()
def concat_all_gather(tensor):
    """
    Performs all_gather operation on the provided tensors.
    *** Warning ***: torch.distributed.all_gather has no gradient.
    """
    tensors_gather = [torch.ones_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors_gather, tensor, async_op=False)
    return torch.cat(tensors_gather, dim=0)


class MoCo(nn.Module):
    def __init__(self, base_encoder, dim=24, K=512, m=0.98, T=0.1):
        super().__init__()
        self.K, self.m, self.T = K, m, T
        self.encoder_q, self.encoder_k = base_encoder(dim), base_encoder(dim)
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            param_k.data.copy_(param_q.data)
            param_k.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(dim, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self):
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            param_k.data = param_k.data * self.m + param_q.data * (1.0 - self.m)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys):
        keys = concat_all_gather(keys)
        batch_size = keys.shape[0]
        ptr = int(self.queue_ptr)
        assert self.K % batch_size == 0  # for simplicity
        self.queue[:, ptr:ptr + batch_size] = keys.T
        self.queue_ptr[0] = (ptr + batch_size) % self.K

    def forward(self, im_q, im_k):
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum_update_key_encoder()
            k = F.normalize(self.encoder_k(im_k), dim=1)
        l_pos = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        logits = torch.cat([l_pos, l_neg], dim=1) / self.T
        labels = torch.zeros(logits.shape[0], dtype=torch.long)
        self._dequeue_and_enqueue(k)
        return logits, labels


def encoder(dim):
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, dim))


def view(x, ids, seed):
    """brightness, noise and erased pixels; numbers are drawn for the full data set and indexed, so they belong to the image"""
    g = torch.Generator().manual_seed(seed)
    gain = 0.6 + 0.8 * torch.rand(len(x), 1, generator=g)
    noise = 0.1 * torch.randn(x.shape, generator=g)
    mask = (torch.rand(x.shape, generator=g) > 0.15).float()
    return (x[ids] * gain[ids] + noise[ids]) * mask[ids]


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "30106")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(MoCo(encoder))
    crit = nn.CrossEntropyLoss()
    opt = torch.optim.SGD(model.parameters(), 0.06, momentum=0.9, weight_decay=1e-4)
    x = torch.tensor(load_digits().data[:1280], dtype=torch.float32) / 16
    B = 64
    for epoch in range(5):
        if epoch in (3, 4):
            opt.param_groups[0]["lr"] *= 0.1
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        hits, seen, run = 0.0, 0, 0.0
        for step in range(len(x) // B):
            ids = order[step * B:(step + 1) * B].chunk(world)[rank]
            out, target = model(view(x, ids, 2 * epoch), view(x, ids, 2 * epoch + 1))
            loss = crit(out, target)
            opt.zero_grad()
            loss.backward()
            opt.step()
            hits += (out.argmax(1) == 0).sum().item()
            run += loss.item() * len(ids)
            seen += len(ids)
        t = torch.tensor([hits, run, seen], dtype=torch.float64)
        dist.all_reduce(t)
        if rank == 0:
            print(f"epoch {epoch}: contrastive acc {t[0] / t[2]:.4f} loss {t[1] / t[2]:.5f} ptr {int(model.module.queue_ptr)}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
