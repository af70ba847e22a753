"""Replicas: the same model on every rank of the data axis, kept the same."""
