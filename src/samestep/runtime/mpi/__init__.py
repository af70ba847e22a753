"""MPI as a backend of torch.distributed, over mpi4py: PyTorch need not be built from source for it (docs/mpi.md)."""
