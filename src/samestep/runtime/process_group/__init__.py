"""The process group `samestep` of torch.distributed."""
