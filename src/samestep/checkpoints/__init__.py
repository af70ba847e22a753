"""Checkpoints: atomic, with a SHA-256 of every tensor, for any number of ranks; no pickle is written or read."""
