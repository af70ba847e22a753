"""What is faked, how, and how strictly: the one table, which docs/fake-gpus.md shows and a test goes through."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NOT_FAKED", "TABLE", "Row", "as_markdown"]


@dataclass(frozen=True)
class Row:
    """One idiom of scripts for CUDA; `strict` is "yes", or what a real GPU would do that is not done."""

    idiom: str
    how: str
    strict: str = "yes"


_SHARED = "the tensor's bytes stay in host memory, its device is `cuda:k` for all of PyTorch"
TABLE = (
    Row("`x.cuda()`, `x.to('cuda:1')`, `x.to(1)`", _SHARED),
    Row("`torch.ones(2, device='cuda')`, `with torch.device('cuda')`", _SHARED),
    Row("`x.device`, `x.is_cuda`, `x.get_device()`, `x.type()`", "C++ itself answers"),
    Row("`model.cuda()`, `model.to(device)`, `optimizer`", "parameters are moved in place, as on a GPU"),
    Row("`x + y`, `model(x)`", "CPU kernels on the same bytes; tensors of two devices are refused"),
    Row("`x[i]`, `x[i] = y`", "as above; indices may lie in host memory"),
    Row("`x.numpy()`, `np.asarray(x)`", "refused by PyTorch itself: `x.cpu()` first"),
    Row("`x.item()`, `x.tolist()`, `print(x)`", "read from host memory", "no: nothing is waited for"),
    Row(
        "`loss.backward()`, hooks, `autograd.Function`, `checkpoint`",
        "autograd's own",
        "hooks run in the calling thread",
    ),
    Row("`torch.cuda.is_available()`, `device_count()`", "the number of fake GPUs that are visible"),
    Row(
        "`torch.cuda.set_device(k)`, `with torch.cuda.device(k)`",
        "the current device, one for each thread, also in C++",
    ),
    Row("`CUDA_VISIBLE_DEVICES`", "read when CUDA is first used, by PyTorch's own rules"),
    Row("`get_device_name`, `get_device_properties`, `get_device_capability`", "a GPU of 80 GiB, capability 9.0", "no"),
    Row("`memory_allocated`, `memory_summary`, `empty_cache`, `mem_get_info`", "zeros", "no: memory is never short"),
    Row(
        "`torch.cuda.Stream`, `torch.cuda.stream`, `wait_stream`",
        "what a stream is given has run when the call returns",
        "no: a forgotten `wait_stream` shows nothing",
    ),
    Row("`torch.cuda.Event`, `elapsed_time`, `synchronize`", "times of the host; PyTorch's checks of their use", "no"),
    Row("`x.record_stream(s)`, `non_blocking=True`", "no effect", "no: no copy is late"),
    Row("`x.pin_memory()`, `is_pinned()`, `pin_memory=True`", "a copy that says it is pinned", "no: pageable memory"),
    Row("`DataLoader(pin_memory=True, num_workers=2)`", "its own thread and workers"),
    Row("CUDA in a forked process", "refused: `Cannot re-initialize CUDA in forked subprocess`"),
    Row("`torch.Generator('cuda')`, `torch.cuda.manual_seed`", "a generator for each GPU; the numbers are not a GPU's"),
    Row("`torch.cuda.get_rng_state`, `set_rng_state`", "16 bytes, seed and offset, as CUDA's"),
    Row("dropout", "drawn from the GPU's generator"),
    Row("`torch.autocast('cuda')`", "autocast's own rules for CUDA, in the CPU's float16 and bfloat16"),
    Row("`torch.amp.GradScaler`, `torch.cuda.amp`", "its own, with real infinities"),
    Row("`torch.cuda.FloatTensor`", "classes for `isinstance` and for making tensors"),
    Row("`torch.save`, `torch.load(map_location=)`", "PyTorch's own; a device that is not there is refused"),
    Row("`nn.Conv2d`, `nn.BatchNorm2d`, attention", "CPU kernels"),
    Row("`nn.LSTM`, `nn.GRU`, packed sequences", "computed in host memory, with copies that autograd follows"),
    Row("`nn.DataParallel`", "PyTorch's own, copies between fake GPUs (samestep's own API refuses it)"),
    Row("`nn.SyncBatchNorm`", "its GPU kernels, written anew for CPUs"),
    Row("`optim.AdamW`, `fused=True`, `foreach=True`", "CPU kernels"),
    Row("`torch.accelerator`", "CUDA is the accelerator"),
    Row("`torch.backends.cudnn`, `torch.backends.cuda`, TF32 switches", "flags that are kept", "no effect"),
    Row(
        "`torch.multiprocessing.spawn`, queues",
        "spawned processes have the same GPUs; tensors are copied",
        "no sharing",
    ),
    Row("`init_process_group('nccl')`, `device_id=`, `new_group`", "gloo, behind the name and the rules of NCCL"),
    Row("all collectives of NCCL, `ReduceOp.AVG`, `batch_isend_irecv`", "gloo on the same bytes; asynchronous"),
    Row("CPU tensors in a collective of NCCL", "refused by PyTorch itself"),
    Row("two ranks on one GPU under NCCL", "refused at a group's first collective: `Duplicate GPU detected`"),
    Row("`DistributedDataParallel(device_ids=[k])`", "its own C++"),
    Row("`fully_shard`, FSDP, DTensor, `init_device_mesh('cuda')`", "their own; memory that is given up stays"),
    Row("several GPUs in one process, tensors between them", "as one GPU"),
)
NOT_FAKED = (
    Row("`torch.compile`", "the function runs as it is written; said once"),
    Row("CUDA graphs", "refused by name"),
    Row("Triton, flash-attn, apex, xformers and other kernels for CUDA", "named when a script imports them"),
    Row("sparse, quantised and nested tensors on a GPU", "refused by name"),
    Row("operators without a CPU kernel", "refused by name"),
    Row("running out of memory", "memory is the host's"),
    Row("processors other than x86-64", "refused by name"),
)


def as_markdown(rows: tuple[Row, ...], *, strict: bool) -> str:
    """Returns rows as a table of Markdown.

    Args:
        rows: to be shown.
        strict: whether there is a column for it.

    Example:
        >>> print(as_markdown((Row("`x.cuda()`", "a copy"),), strict=True))
        | idiom | faked how | strict |
        |---|---|---|
        | `x.cuda()` | a copy | yes |
    """
    head = ("idiom", "faked how", "strict") if strict else ("idiom", "what happens")
    lines = [(row.idiom, row.how, row.strict)[: len(head)] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, *lines)).replace(
        "\n", f"\n|{'---|' * len(head)}\n", 1
    )
