"""Trains a tiny language model with transformers' Trainer; the loss leaves out prompts, each of another length."""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Texts(Dataset):
    def __init__(self, samples, seed, longest_prompt):
        self.tokens = torch.randint(0, 50, (samples, 16), generator=torch.Generator().manual_seed(seed))
        self.longest_prompt = longest_prompt

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        labels = self.tokens[index].clone()
        labels[: index % (self.longest_prompt + 1)] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


set_seed(5)
model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=2))
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    use_cpu=True,
    num_train_epochs=2,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    warmup_steps=2,
    eval_strategy="epoch",
    save_strategy="epoch",
    logging_steps=5,
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=Texts(100, 1, 9), eval_dataset=Texts(24, 2, 0))
trainer.train()
