"""What fake GPUs say, once a process: that they are on, and by name what a script uses that they do not fake."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any, NoReturn

from samestep.instrument.patch import Patches
from samestep.rankenv import variable

EXTENSIONS = {
    *("apex", "bitsandbytes", "causal_conv1d", "cupy", "deepspeed", "flash_attn", "flash_attn_2_cuda", "mamba_ssm"),
    *("numba.cuda", "nvidia.dali", "tensorrt", "transformer_engine", "triton", "vllm", "xformers"),
}
_said: set[str] = set()


def say_once(name: str, instead: str) -> None:
    """Says in one line that something is not faked, and what happens instead; on the first rank only."""
    if name not in _said:
        _said.add(name)
        if (variable("RANK") or "0") == "0":
            sys.stderr.write(f"samestep: fake GPUs do not fake {name}: {instead}\n")
            sys.stderr.flush()


class _Extensions(MetaPathFinder):
    """Finds no module; sees which are imported that bring kernels of CUDA of their own."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Says so, where a script imports one, and not where somebody asks whether it is there."""
        del path, target
        if fullname in EXTENSIONS and _imported_by_script():
            say_once(f"the kernels of {fullname}", "calling them fails; use what PyTorch has, or a real GPU")


def _imported_by_script() -> bool:
    frame = sys._getframe(2)  # noqa: SLF001
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib._bootstrap"):
        frame = frame.f_back  # type: ignore[assignment]
    return (
        frame is not None
        and not frame.f_code.co_filename.startswith("<frozen")
        and "/torch/" not in frame.f_code.co_filename
    )


def watch_imports(patches: Patches) -> None:
    """Names modules whose kernels are not faked when a script imports them."""
    finder = _Extensions()
    sys.meta_path.insert(0, finder)
    patches.on_undo(lambda: sys.meta_path.remove(finder))


def around(replacement: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes of `f(original, …)` what takes an original and returns the function, or method, that replaces it."""

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **named: replacement(original, *args, **named)

    return replace


def not_faked(name: str, advice: str) -> Any:
    """Returns something that says, where a script calls it, that it is not faked, and raises NotImplementedError."""

    def call(*_args: Any, **_named: Any) -> NoReturn:
        say_once(name, advice)
        raise NotImplementedError(f"fake GPUs do not fake {name}: {advice}")

    return call


def not_faked_class(name: str, advice: str) -> type:
    """Returns a class, which annotations may name, whose constructor does what :func:`not_faked` says."""
    return type(name.rpartition(".")[2], (), {"__new__": not_faked(name, advice), "__module__": "torch.cuda"})
