"""`samestep run --check`: the cheap part of verify during a real training, in letters that nobody waits for."""
