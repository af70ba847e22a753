"""`samestep run --check`: the cheap part of verify during a real training, from summaries that nobody waits for."""
