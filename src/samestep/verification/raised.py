"""What `samestep verify --explain NAME` says of an error that samestep raises: how it comes about, what fixes it.

No torch here. Links are written for docs/codes.md, which has the same texts.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__: list[str] = []


@dataclass(frozen=True)
class Kind:
    """What is said of an error beyond its docstring.

    Attributes:
        cause: when it is raised.
        remedy: what fixes it.
    """

    cause: str
    remedy: str


KINDS = {
    "UsageError": Kind(
        "An option, an argument or a variable that cannot be. It is raised before training starts, and a command "
        "says it in one line, with exit code 2.",
        "What the line says: it has the value that was given and one that can be.",
    ),
    "RankVariablesError": Kind(
        "RANK without WORLD_SIZE or MASTER_ADDR, a number that is none, or a rank beyond the size: often left over in "
        "the shell, or a script started by `python` that expects a launcher.",
        "Start it with `samestep run`, or unset or complete the variables. `samestep doctor` lists those that are set.",
    ),
    "BackendError": Kind(
        "`nccl` for tensors on the CPU, a backend that this torch was built without, `mpi` without mpi4py or without "
        "an mpiexec that started the ranks.",
        "Leave the backend out, and samestep chooses; for MPI `samestep run --mpi`, or `mpiexec -n N samestep run`.",
    ),
    "DeviceError": Kind(
        "More ranks on a host than it has GPUs, two ranks on one GPU (NCCL would deadlock), a device that this process "
        "does not see, a tensor elsewhere than it must be.",
        "One rank for each GPU, or `device='cpu'`; look at CUDA_VISIBLE_DEVICES and LOCAL_RANK.",
    ),
    "DataError": Kind(
        "An empty dataset, a batch size that is no whole number above 0, ranks whose datasets differ in length or "
        "content, a sample that cannot be loaded, a loader's worker that died, an evaluation's output without a row "
        "for each sample.",
        "The message names the sample, its file and the line. `shards(…, on_bad_sample='skip')` leaves bad ones out; a "
        "worker that was killed for memory wants fewer workers or smaller batches.",
    ),
    "ModelError": Kind(
        "A model that cannot be replicated (`nn.DataParallel`, wrapped already, without trainable parameters) or cut "
        "into stages (BatchNorm, a forward that decides by the values of a tensor).",
        "The message says what to write, or names the line; [pipelines](pipelines.md#what-can-be-cut) has each case.",
    ),
    "RendezvousError": Kind(
        "A rank that never came, an address where nobody listens, a rank that is there twice, a file of a dead run, "
        "hosts with unlike versions of samestep or torch, another SAMESTEP_TOKEN.",
        "It says who waited where, how long, and for whom. `samestep doctor --hosts a,b` tries every pair of hosts. It "
        "counts as a consequence: where a rank died on its way here, that rank is blamed.",
    ),
    "EmptyBatchError": Kind(
        "A step has fewer samples than ranks, so a rank's batch is empty (dim 0 is 0), and the model cannot take it: "
        "mostly `x.view(x.size(0), -1)`.",
        "`x.flatten(1)`; or `drop_last=True`, or a batch size of which the last step leaves no rank without samples.",
    ),
    "StepError": Kind(
        "`optimizer.step()` or `commit()` in mid-step, a loss that is reduced already, a loop that outlives its world, "
        "ranks that passed mismatched tensors to one sum.",
        "What the message says to write; mostly `step`, `zero_grad` and `commit` under `if batches.step_ends:`, and "
        "`reduction='none'` for the loss.",
    ),
    "NonFiniteError": Kind(
        "A gradient is NaN or infinite. It is raised on every rank before the optimizer has changed a parameter, and "
        "names the rank that brought it, the tensor, and whether its loss or its model made it.",
        "Look at that rank's batch and that module; a smaller learning rate, or clipping. `replicate(…, "
        "nonfinite='skip')` leaves such steps out, on all ranks alike ([the step](step.md#nan-and-inf)).",
    ),
    "DriftError": Kind(
        "Replicas that must be equal are not, and `replicate(…, guard=…)` has seen it: a line that one rank alone "
        "runs, or a machine that computes wrongly. Named are the ranks, the tensors, and since when.",
        "Fix the line; if it comes without one, test that machine's memory. The guard can also repair "
        "([drift](drift.md)).",
    ),
    "PeerError": Kind(
        "Another rank failed, died or did not come to a sum, and this one waits for it in vain.",
        "Nothing here: look at the rank that is named. The launcher blames that one.",
    ),
    "CheckpointError": Kind(
        "The disk is full, what lies there is damaged, belongs to another model, or is cut otherwise; a state holds an "
        "object that is neither a tensor nor plain data.",
        "The message names files and tensors. `samestep checkpoint verify PATH` reads every byte; what is damaged is "
        "quarantined and the one before it is used ([checkpoints](checkpoints.md#damage)).",
    ),
    "RankFailure": Kind(
        "`samestep.spawn` or `samestep.testing.run_ranks` had a rank that raised, died or hung; `rank`, `reason` and "
        "`exit_code` say which and why, with that rank's own traceback.",
        "Fix what the reason says; the other ranks have been ended.",
    ),
    "Preempted": Kind(
        "SIGTERM, SIGUSR1 or the end of a job's time: all ranks have saved the same step. It is a SystemExit, so that "
        "`except Exception` does not hold it up.",
        "Rerun the same command to resume ([making room](launching.md#on-one-host)).",
    ),
    "SamestepError": Kind(
        "The root of all of these, never raised itself. `exit_code` is what a process ends with that does not catch "
        "it; `secondary` is true of one that only reports the failure of another rank.",
        "`except samestep.SamestepError` catches all but `Preempted`.",
    ),
}
