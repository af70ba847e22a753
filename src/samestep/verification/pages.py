"""What `samestep verify --explain NAME` says of a kind of finding, or of an error that samestep raises. No torch here.

Links are written for docs/codes.md, which has the same texts.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from samestep import errors

_LINK = re.compile(r"\[[^\]]+\]\(([^)]+)\)")


class Page(NamedTuple):
    """A kind of finding: what is the matter; how it comes about and what it does; what fixes it; how it was noticed."""

    title: str
    why: str
    fix: str
    seen: str


class Kind(NamedTuple):
    """An error, beyond its docstring: when it is raised, what fixes it."""

    cause: str
    remedy: str


def explanation(name: str) -> list[str]:
    """Returns the paragraphs on a finding's code, or on an error's name."""
    if name in PAGES:
        page = PAGES[name]
        return [f"{name}: {page.title}", page.why, f"fix: {page.fix}", f"detected by: {page.seen}"]
    kind, error = KINDS[name], getattr(errors, name)
    first = " ".join((error.__doc__ or "").split("\n\n")[0].split()).replace(":func:", "")
    plain = (_LINK.sub(r"docs/\1", text) for text in (f"cause: {kind.cause}", f"fix: {kind.remedy}"))
    return [f"{name}: {first}", *plain, f"exit code: {error.exit_code}"]


PAGES = {
    "initial-state-differs": Page(
        "ranks begin with different weights",
        "Averaged gradients keep ranks together only if they begin together. DistributedDataParallel sends rank 0's "
        "weights to all when it is made, and never again: what is loaded or changed on one rank afterwards stays "
        "different for good, and the checkpoint is that of one of several models. fully_shard sends nothing: each rank "
        "cuts its shards out of the model that it has made. Or a buffer, which all ranks then share, was computed from "
        "one rank's part of the data: a centre, or the mean of a feature.",
        "Load weights on every rank, before DistributedDataParallel(model); by hand: dist.broadcast(p.data, src=0) for "
        "every parameter and buffer before the first step.",
        "digests of all parameters before the first step, compared between ranks; buffers, with those of one process "
        "that loads its samples by itself",
    ),
    "parameter-order-differs": Page(
        "ranks register their parameters in different orders",
        "DistributedDataParallel matches parameters by their order and compares shapes only. Two of one shape that are "
        "exchanged get each other's weights and gradients, without an error. The usual source is a set, whose order of "
        "texts differs from process to process (PYTHONHASHSEED).",
        "Iterate over a list, or over sorted(names).",
        "the names in order, compared between ranks; `verify` gives every rank another hash seed",
    ),
    "gradients-not-synchronised": Page(
        "ranks step with different gradients",
        "Each rank trains a model of its own on its part of the data, and what is saved has seen 1/N of it. Usual "
        "sources: model.module(x) in place of model(x), no_sync() around every micro-batch, layers that were frozen "
        "when the model was wrapped, a hand-written average that leaves tensors out.",
        "Call the wrapped model; leave the last micro-batch outside no_sync(), its forward too; wrap after unfreezing; "
        "average every gradient between backward() and step().",
        "digests of all gradients at every optimizer step, compared between ranks",
    ),
    "parameters-diverged": Page(
        "parameters drift apart though gradients agree",
        "Something after the average differs: learning rate, weight decay, the optimizer's own state, clipping by a "
        "local norm, or a change of the weights on some ranks only. An average of the weights belongs here, too: one "
        "that some ranks do not keep, or whose decay counts the samples of one rank.",
        "Do the same on all ranks, or broadcast the parameters from rank 0 afterwards.",
        "digests of all parameters before and after every step and in evaluations, compared between ranks; what a step "
        "makes of models that no optimizer holds, compared with one process",
    ),
    "buffers-diverged": Page(
        "buffers differ where they are used",
        "BatchNorm's running statistics are each rank's own after a training step; DistributedDataParallel overwrites "
        "them with rank 0's at the next forward through the wrapper. An evaluation of model.module, or a checkpoint of "
        "another rank, uses others. A normalisation of the script's own that normalises by the samples of all ranks "
        "can still follow one rank's in its running statistics.",
        "Evaluate on all ranks through buffers that were broadcast from rank 0, or use synchronised BatchNorm.",
        "digests of all buffers when an evaluation runs, compared between ranks; what a step makes of them, compared "
        "with one process",
    ),
    "gradient-scale": Page(
        "gradients are a constant multiple of one process's",
        "1/N: a summed loss is averaged over ranks. N: the loss is multiplied by the number of ranks once too often. "
        "k or 1/k: micro-batches are not divided by their number, or twice. The learning rate is wrong by that factor; "
        "Adam hides it, weight decay and clipping do not.",
        "Let the sum of all that is backpropagated be the mean over all samples of the step.",
        "gradients compared with the script run alone on the whole batch; the factor is fitted",
    ),
    "gradient-differs": Page(
        "gradients are not those of one process",
        "Most often a mean of means: ranks, or micro-batches, hold different numbers of samples or tokens and count "
        "alike. Each step is pulled towards the smaller parts. Or a weight that two stages of a pipeline share has a "
        "gradient in each, and nothing adds them up.",
        "Divide every part's sum by the number of items of the whole step: loss = sum * world_size / all_items.",
        "gradients compared with the script run alone on the whole batch, and on each rank's part",
    ),
    "update-differs": Page(
        "the optimizer makes another update than in one process",
        "Gradients agree, and what the optimizer makes of them does not: its step is multiplied by the world size, or "
        "it takes a norm, a mean or a matrix factor over a rank's shard instead of the whole tensor, or each rank has "
        "state that belongs to all. Or each rank steps with its own gradient and parameters are averaged behind it, "
        "which is one process's step only for SGD.",
        "Compute the update from whole tensors and values that all ranks share: all_reduce what is summed over shards, "
        "gather a sharded matrix before it is factored, leave the world size out.",
        "the script alone takes the step from the ranks' parameters, optimizer state, gradients and rates; parameters "
        "and state behind it are compared",
    ),
    "optimizer-misses-parameters": Page(
        "the optimizer holds other parameters than the model",
        "A model that is rebuilt, copied or moved after its optimizer was made leaves the optimizer with the old "
        "tensors: they get no gradient, and the new ones are never stepped. The loss stays flat.",
        "Make the optimizer last.",
        "parameters that get gradients and are in no optimizer, beside ones of the optimizer that get none",
    ),
    "batches-differ": Page(
        "ranks train on other batches than the ranks of their group, or than one process",
        "Under tensor parallelism the ranks of a group compute one forward pass together, each with its part of the "
        "parameters. Where each has a batch of its own, what they add up belongs to no batch at all. Samples that a "
        "rank makes from its own part of the data (negatives, weights of edges, ids of words) also differ from those "
        "that one process makes from all of it, and so do samples that a sampler draws, with replacement, from a "
        "rank's part.",
        "Shard the data by the rank in the data-parallel mesh, not by the global rank; seed what shuffles alike. Make "
        "samples from all data, and divide them after that.",
        "the contents of what the ranks' loaders yield, compared within each group; without a loader, what the models "
        "get in a step, compared with one process where the gradients differ",
    ),
    "samples-repeated": Page(
        "samples are used more than once an epoch",
        "Without a DistributedSampler every rank goes through all data; a stream that is not split by rank, or by "
        "worker, comes as often as there are readers. An epoch is then N epochs of an N-fold smaller diversity.",
        "DataLoader(…, sampler=DistributedSampler(dataset)); islice(stream, rank, None, world_size); without a loader, "
        "seed what draws the batches with the rank.",
        "the indices and contents of what every rank's loader yields, counted together; without a loader, what the "
        "models get, and whether two ranks compute the same gradient by themselves",
    ),
    "samples-missing": Page(
        "samples are never used",
        "They were dropped between ranks, or loaded and never stepped on.",
        "Cut the data so that the parts of all ranks make the whole; step at the last batch of an epoch.",
        "the indices of what every rank's loader yields, counted together; batches after an epoch's last step",
    ),
    "same-order-every-epoch": Page(
        "the shuffle is the same in every epoch",
        "DistributedSampler draws its order from seed and epoch, and does not know the epoch.",
        "sampler.set_epoch(epoch) at the start of every epoch.",
        "the order of two passes over one loader",
    ),
    "datasets-differ": Page(
        "ranks hold different data",
        "Indices are split between ranks as if they meant the same sample on all: where directories are listed in "
        "another order, or splits are drawn with another seed, samples are lost, repeated, or leak into evaluation. Or "
        "all ranks choose the same samples, by scores that were gathered in another order than that of the samples. Or "
        "features are computed from one rank's part of the data: means of a category, the time since a user's "
        "last event.",
        "sorted(os.listdir(…)); random_split(…, generator=torch.Generator().manual_seed(0)); features from all data, "
        "divided afterwards.",
        "length and a few samples of every rank's dataset; which samples a Subset has, compared with one process; the "
        "rows of a whole pass, compared with those that one process loads by itself, where no random numbers make them",
    ),
    "random-streams": Page(
        "random numbers are equal where they must differ, or the reverse",
        "Equal seeds on all ranks make all ranks draw the same noise and augmentation; workers that are seeded alike "
        "repeat each other. Ranks of a tensor-parallel group hold the same activations between their layers, and need "
        "the same dropout there.",
        "torch.manual_seed(seed + rank) after the model is made, where each rank has samples of its own; one seed for "
        "the ranks of a tensor-parallel group; no constant seed in worker_init_fn.",
        "what the script draws while it trains, compared between ranks and workers",
    ),
    "steps-differ": Page(
        "ranks take different numbers of steps",
        "Skipped steps, early stopping or schedules that each rank decides for itself drive ranks apart, or leave some "
        "waiting for ever.",
        "Decide together: reduce what the decision depends on.",
        "steps, skips and schedules of every rank, counted",
    ),
    "learning-rate-differs": Page(
        "learning rates differ",
        "Between ranks: parameters drift apart though gradients agree. Between N ranks and one process: the script "
        "scales its rate more than its batch grows, or while the batch of all ranks stays as large, or its schedule "
        "has another pace: it moves on once for each rank, say, while its length counts steps. A warm-up of a fixed "
        "number of steps, which has the samples of more steps of one process, is a note.",
        "Let schedules see reduced metrics; scale the rate once.",
        "rates of every optimizer at every step, compared between ranks and with the script alone",
    ),
    "collective-order": Page(
        "ranks communicate in another order",
        "Collectives carry no name: the first of one rank meets the first of another. Exchanged ones of one shape mix "
        "their values without an error.",
        "Call collectives in one order on all ranks.",
        "the lines from which each rank calls them, in order",
    ),
    "collective-mismatch": Page(
        "ranks call different collectives at once",
        "Another operation, shape, type or root: gloo may accept it and mix values, or hang.",
        "Let all ranks call the same, with tensors of one shape and type.",
        "operation, shapes, types and roots of each rank's calls, in order",
    ),
    "evaluation-inexact": Page(
        "the metric is not that of one process",
        "Padding counts samples twice (DistributedSampler pads); drop_last leaves some out; a mean of means of batches "
        "or ranks weighs samples unequally; a metric that is no mean is computed on each rank's part.",
        "Take each sample once, DataLoader(…, sampler=range(rank, len(dataset), world_size)), and sum before dividing: "
        "totals = torch.tensor([correct, count]); dist.all_reduce(totals); totals[0] / totals[1]. samestep.evaluate "
        "does all of it.",
        "samples of the evaluation, counted; the metric of the script alone with the same weights",
    ),
    "checkpoint-inexact": Page(
        "what was loaded is not what was running",
        "A state that is not in the file (optimizer, schedule, scaler, random streams, position in the data) begins "
        "anew, and training goes on as another one.",
        "Save and load everything the next step depends on; samestep.checkpoint does.",
        "states before a save and after the load of the same file, in one process or in a second start after a kill",
    ),
    "pipeline-inexact": Page(
        "stages or micro-batches change the step",
        "A pipeline that scales, ties or accumulates wrongly is another training. Means of micro-batches, averaged, "
        "are not the mean of the batch where padding is ignored or sizes differ.",
        "Weigh each micro-batch's loss before its backward by its share of the batch, scale no gradients afterwards, "
        "clip by the norm of all stages; samestep.pipeline does.",
        "gradients of the stages, compared with those of one process",
    ),
    "data-parallel-module": Page(
        "nn.DataParallel is in use",
        "It runs one process on several devices, slower than one process each, and averages nothing between processes.",
        "samestep.replicate(model, world), or DistributedDataParallel(model).",
        "its constructor",
    ),
    "hang": Page(
        "a rank waits for ever",
        "A collective is under a condition that ranks see differently, or a rank has ended early.",
        "Let every rank come by every collective.",
        "nothing moved any more; the last collective of every rank",
    ),
    "crash": Page(
        "the script fails by itself",
        "On N ranks and not alone: the cause lies in how ranks differ.",
        "See the exception.",
        "its exit code",
    ),
}

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
        "A rank that never came, an address on which no process listens, a rank that is there twice, a file of a "
        "dead run, hosts with different versions of samestep or torch, another SAMESTEP_TOKEN.",
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
