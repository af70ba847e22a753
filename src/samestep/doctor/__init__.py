"""Floor 6: whether training would work here, and quickly: every line is ok, or says what to do.

    software    python, torch, MPI, Slurm, ssh; packages that contradict each other
    machine     cores, memory, /dev/shm, limits, the disk
    network     names, interfaces, ports
    gpus        what there is, and who uses it
    variables   what is set in the environment and will surprise
    trial       two ranks take a step of DistributedDataParallel over every backend
    between     hosts: latency, bandwidth, clocks, files that all share

PyTorch has `python -m torch.utils.collect_env`, which lists versions and judges nothing.
"""
