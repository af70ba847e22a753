"""MPI as a backend of torch.distributed, over mpi4py: no PyTorch has to be built from source for it.

library     finds and starts MPI; says in one line what is missing
datatypes   PyTorch's types and operations in MPI's words
waiting     until MPI is done: blocking in it, or looking from time to time
calls       the collectives of one communicator, on tensors
messages    point to point
staging     tensors that MPI cannot read where they lie
group       the process group
ending      nobody leaves while others wait for him, and nobody waits for the dead
naming      makes `init_process_group("mpi")` mean it
"""
