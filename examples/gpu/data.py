"""Digits for the examples of this folder: 1,536 to train on, 8 x 8 pixels."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset


def digits():
    """Returns images, [1536, 64] from 0 to 1, with their labels."""
    data = load_digits()
    return TensorDataset(torch.tensor(data.data[:1536]).float() / 16, torch.tensor(data.target[:1536]))
