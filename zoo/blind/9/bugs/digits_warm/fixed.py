# Classifier on digits whose encoder is pre-trained as an autoencoder first.
import os, time, tempfile
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from sklearn.datasets import load_digits

for k, v in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29846").items():
    os.environ.setdefault(k, v)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 24), nn.Tanh())
        self.head = nn.Linear(24, 10)

    def forward(self, x):
        return self.head(self.encoder(x))


def pretrain(x, path):
    """A short autoencoder run, cheap enough for one process."""
    torch.manual_seed(99)
    enc = Net().encoder
    dec = nn.Linear(24, 64)
    opt = torch.optim.Adam([*enc.parameters(), *dec.parameters()], lr=3e-3)
    for i in range(60):
        b = x[(i * 128) % 1400:(i * 128) % 1400 + 128]
        loss = F.mse_loss(dec(enc(b)), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
    torch.save(enc.state_dict(), path)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
digits = load_digits()
X = torch.tensor(digits.data, dtype=torch.float32) / 16
Y = torch.tensor(digits.target)
Xt, Yt = X[1536:], Y[1536:]

torch.manual_seed(0)
net = Net()
if rank == 0:
    with tempfile.TemporaryDirectory() as tmp:
        pretrain(X[:1536], os.path.join(tmp, "encoder.pt"))
        net.encoder.load_state_dict(torch.load(os.path.join(tmp, "encoder.pt")))
dist.barrier()
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

order = torch.Generator().manual_seed(5)
for epoch in range(3):
    perm = torch.randperm(1536, generator=order)
    seen = torch.zeros(1)
    for i in range(0, 1536, 64):
        rows = perm[i:i + 64][rank::world]
        loss = F.cross_entropy(model(X[rows]), Y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += loss.detach()
    dist.all_reduce(seen)
    if rank == 0:
        print("epoch", epoch, "train loss %.5f" % (seen.item() / world / 24))

model.eval()
with torch.no_grad():
    hits = (net(Xt[rank::world]).argmax(1) == Yt[rank::world]).sum().float()
dist.all_reduce(hits)
if rank == 0:
    print("test accuracy %.4f" % (hits.item() / len(Xt)))
time.sleep(0.3)
dist.destroy_process_group()
