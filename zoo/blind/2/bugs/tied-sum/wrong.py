"""CBOW-style word model with tied input and output embeddings; gradients are summed over ranks by hand."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class WordModel(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.lookup = nn.Embedding(vocab, dim)
        self.mix = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.LayerNorm(dim))
        self.project = nn.Linear(dim, vocab)
        self.project.weight = self.lookup.weight

    def forward(self, context):
        return self.project(self.mix(self.lookup(context).mean(1)))


class Trainer:
    def __init__(self, vocab=60, dim=24, lr=0.3, batch=48, window=2):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.batch, self.window = batch, window
        torch.manual_seed(17)
        self.model = WordModel(vocab, dim)
        nn.init.normal_(self.model.lookup.weight, std=0.3)
        for tensor in self.model.state_dict().values():
            dist.broadcast(tensor, 0)
        self.optim = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9, nesterov=True)
        self.text = self.make_text(vocab)

    def make_text(self, vocab, n=2400):
        g = torch.Generator().manual_seed(4)
        table = torch.rand(vocab, vocab, generator=g).pow(10)
        words = [0]
        for _ in range(n - 1):
            words.append(torch.multinomial(table[words[-1]], 1, generator=g).item())
        return torch.tensor(words)

    def batches(self, epoch):
        w = self.window
        centres = torch.arange(w, len(self.text) - w)
        centres = centres[torch.randperm(len(centres), generator=torch.Generator().manual_seed(epoch))]
        offsets = torch.tensor([o for o in range(-w, w + 1) if o])
        for at in range(0, len(centres) - self.batch + 1, self.batch):
            c = centres[at:at + self.batch][self.rank::self.world]
            yield self.text[c[:, None] + offsets], self.text[c]

    def sync_gradients(self):
        for module in self.model.modules():
            for param in module.parameters(recurse=False):
                if param.grad is not None:
                    dist.all_reduce(param.grad)

    def run(self, epochs=1, max_steps=40):
        step = 0
        for epoch in range(epochs):
            for context, target in self.batches(epoch):
                loss = F.cross_entropy(self.model(context), target)
                self.optim.zero_grad()
                (loss / self.world).backward()
                self.sync_gradients()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optim.step()
                step += 1
                if step % 10 == 0:
                    shown = loss.detach() / self.world
                    dist.all_reduce(shown)
                    if self.rank == 0:
                        print(f"step {step}: {shown.item():.4f}", flush=True)
                if step == max_steps:
                    return


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Trainer().run()
    dist.barrier()
    dist.destroy_process_group()
