"""A run in a terminal, while it goes on: ranks, phases, findings, output."""
