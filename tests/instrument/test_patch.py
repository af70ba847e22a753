"""Functions of torch and Python are replaced once, however many subscribe, and all are restored."""

from __future__ import annotations

import builtins
import gc
import importlib
import inspect
import random
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.utils.data import DataLoader

from samestep import evaluation
from samestep.instrument import patch as patches
from samestep.instrument import randomness
from samestep.instrument.callbacks import SUBSCRIBERS, Callbacks, notify, subscribe, unsubscribe_all
from samestep.instrument.patch import exchange, install, on_import, patch, uninstall, wrap
from samestep.launch.rank.progress_notes import ProgressNotes, begin
from samestep.verification.recording.script_observer import _GROUPS

MODULES = (  # that are patched
    *("torch.distributed.fsdp", "torch.distributed.pipelining.schedules", "torch.distributed.algorithms.join"),
    *("torch.distributed.algorithms.model_averaging.averagers", "torch.amp.grad_scaler"),
    "torch.distributed.algorithms.model_averaging.hierarchical_model_averager",
    *("samestep.evaluation", "samestep.replicas.compression", "samestep.pipelines.pipeline"),
    *("samestep.replicas.replicate", "samestep.pipelines.build", "samestep.checkpoints.checkpoint"),
    *("samestep.replicas.local_sgd", "samestep.data.create", "samestep.runtime.world"),
)
GROUPS = (*_GROUPS, randomness.without_dropout_and_autocast)


@pytest.fixture(autouse=True, scope="module")
def _imported() -> None:
    for name in MODULES:
        importlib.import_module(name)


def replaced(value: object) -> bool:
    """Whether a function of ours stands in the place of another."""
    function = type(value) is types.FunctionType and hasattr(value, "__wrapped__")
    return function and str(value.__globals__.get("__name__")).startswith("samestep.instrument")


def everything() -> Iterator[tuple[str, object]]:
    """All functions of modules and classes of torch, samestep and Python, once each."""
    known: set[int] = set()
    wanted = ("torch", "samestep", "numpy.random", "random", "builtins")
    for name, module in [*sys.modules.items()]:
        if name.startswith(wanted):
            for attribute, value in [*vars(module).items()]:
                yield f"{name}.{attribute}", value
                if type(value) is type and id(value) not in known:
                    known.add(id(value))
                    for inner, method in [*vars(value).items()]:
                        yield f"{name}.{attribute}.{inner}", method


def test_everything_is_restored() -> None:
    before = dict(everything())
    assert not [name for name, value in before.items() if replaced(value)]
    begin()
    subscribe(Callbacks(), *GROUPS)
    changed = {name for name, value in everything() if replaced(value)}
    assert len(changed) > 100
    unsubscribe_all()
    after = dict(everything())
    assert [name for name, value in before.items() if after.get(name) is not value and name in changed] == []
    assert not [name for name, value in after.items() if replaced(value)]
    assert (SUBSCRIBERS, patches._installed, patches._patches._undo) == ([], set(), [])


def test_every_name_that_is_patched_exists_and_is_wrapped_once() -> None:
    begin()
    subscribe(Callbacks(), *_GROUPS)  # what switches dropout off is no report
    changed = {name: value for name, value in everything() if replaced(value)}
    for name, value in changed.items():
        assert not replaced(value.__wrapped__), name  # type: ignore[attr-defined]
    for owner, name in (
        *((torch, "save"), (torch, "load"), (torch, "rand"), (torch.autograd, "backward"), (torch.autograd, "grad")),
        *((builtins, "print"), (random, "random"), (np.random, "randn"), (nn.utils, "clip_grad_norm_")),
        *((dist, "all_reduce"), (dist, "init_process_group"), (fsdp, "fully_shard")),
        *((torch.multiprocessing, "start_processes"), (evaluation, "evaluate"), (nn.Module, "train")),
        *((torch.optim.lr_scheduler.StepLR, "step"), (DataLoader, "__iter__"), (torch.optim.Optimizer, "__init__")),
    ):
        assert replaced(getattr(owner, name)), name
    assert not replaced(dist.isend)  # P2POp compares it by identity
    assert not replaced(dist.irecv)


def test_a_group_is_installed_once() -> None:
    counts: list[str] = []

    def group() -> None:
        counts.append("installed")

    subscribe(Callbacks(), group)
    subscribe(Callbacks(), group)
    install(group)
    assert counts == ["installed"]
    uninstall()
    install(group)
    assert len(counts) == 2


def test_a_module_that_was_not_imported_is_waited_for_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("late_one", "late_other"):
        (tmp_path / f"{name}.py").write_text("def f(): return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def act(module: Any) -> None:
        patch(module, "f")(lambda original: original() + 1)

    on_import("late_one", act)
    on_import("late_other", act)
    one = importlib.import_module("late_one")
    assert one.f() == 2
    uninstall()
    assert (one.f(), importlib.import_module("late_other").f()) == (1, 1)


def test_a_method_that_was_inherited_is_inherited_again() -> None:
    class Base:
        def f(self) -> int:
            return 1

    class Derived(Base):
        pass

    patch(Derived, "f")(lambda original, self: original(self) + 1)
    assert (Derived().f(), Base().f()) == (2, 1)
    uninstall()
    assert Derived().f() == 1
    assert "f" not in vars(Derived)


def test_the_line_of_the_script_is_found() -> None:
    lines: list[str] = []

    class Lines(Callbacks):
        def on_optimizer(self, optimizer: Any, where: str) -> None:
            lines.append(where)

    subscribe(Lines(), *_GROUPS)
    frame = inspect.currentframe()
    assert frame is not None
    torch.optim.Adam([nn.Parameter(torch.ones(1))])
    assert [line.rpartition("/")[2] for line in lines] == [f"test_patch.py:{frame.f_lineno - 1}"]


def test_code_that_is_compiled_calls_the_original() -> None:
    calls: list[str] = []

    def replacement(original: Callable[[Any], Any], x: Any) -> Any:
        calls.append("called")
        return original(x)

    double = wrap(lambda x: 2 * x, replacement, "torch")
    compiled = torch.compile(lambda x: double(x) + 1, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [3, 3]
    assert calls == []
    double(1)
    assert calls == ["called"]


def test_a_function_is_replaced_wherever_a_package_has_it() -> None:
    module, other = types.ModuleType("made_up"), types.ModuleType("made_up.inside")
    module.f = other.g = original = lambda: 1  # type: ignore[attr-defined]
    sys.modules |= {"made_up": module, "made_up.inside": other}
    try:
        exchange("made_up", {original: lambda: 2})
        assert (module.f(), other.g()) == (2, 2)  # type: ignore[attr-defined]
        uninstall()
        assert (module.f, other.g) == (original, original)  # type: ignore[attr-defined]
    finally:
        del sys.modules["made_up"], sys.modules["made_up.inside"]


class Recording(Callbacks):
    """Keeps what it is called with, by name."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_event(self, kind: str, **fields: Any) -> None:
        self.calls.append(kind if kind != "mode" else (kind, fields["training"]))

    def on_optimizer(self, optimizer: Any, where: str) -> None:
        self.calls.append("optimizer")

    def before_backward(self, root: Any, where: str) -> None:
        self.calls.append("backward")

    def after_backward(self) -> None:
        self.calls.append("after backward")

    def before_step(self, optimizer: Any) -> None:
        self.calls.append("step")

    def after_step(self, optimizer: Any) -> None:
        self.calls.append("stepped")

    def on_random(self, name: str, where: str, value: Any, *, own_generator: bool) -> Any:
        self.calls.append(name)
        return value

    def on_print(self, text: Callable[[], str], where: str) -> None:
        self.calls.append(text())

    def on_grad(self, inputs: list[Any], gradients: list[Any], where: str) -> None:
        self.calls.append("grad")


def test_two_subscribers_hear_of_the_same_things(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = Recording(), Recording()
    subscribe(first, *_GROUPS)
    subscribe(second, *_GROUPS)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model.train()
    model(torch.rand(2, 2)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    model.eval()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    model.load_state_dict(torch.load(tmp_path / "model.pt"))
    builtins.print("loss", 1)
    np.random.rand(1), random.random()
    torch.autograd.grad(model(torch.ones(1, 2)).sum(), [*model.parameters()])
    assert first.calls == second.calls
    assert first.calls == [
        *("optimizer", "schedule_made", ("mode", True), "torch.rand", "backward", "after backward", "clipping", "clip"),
        *("step", "stepped", "scheduler", ("mode", False), "save", "load", "weights", "loss 1", "numpy.random.rand"),
        *("random.random", "grad"),
    ]
    assert capsys.readouterr().out == "loss 1\n"


def test_an_optimizer_that_steps_another_takes_one_step_and_a_closure_is_run_first() -> None:
    class Outer(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            inner.step()

    recording = Recording()
    weight = nn.Parameter(torch.ones(1))
    inner, outer = torch.optim.SGD([weight], lr=0.1), Outer([weight], {})
    subscribe(recording, *_GROUPS)
    weight.grad = torch.ones(1)
    outer.step()
    assert recording.calls == ["step", "stepped"]
    del recording.calls[:]

    def closure() -> Any:
        recording.calls.append("closure")
        return weight.sum()

    torch.optim.LBFGS([weight], max_iter=1).step(closure)
    assert recording.calls[:3] == ["optimizer", "closure", "step"]
    assert recording.calls[-1] == "stepped"


def test_the_first_subscriber_is_the_progress_record() -> None:
    begin()
    assert [type(one) for one in SUBSCRIBERS] == [ProgressNotes]
    notify("mode", training=True)


def test_nothing_of_a_script_is_kept_alive() -> None:
    subscribe(Callbacks(), *GROUPS)
    model: nn.Module | None = nn.Linear(1, 1)
    assert model is not None
    known = id(model)
    del model
    gc.collect()
    assert not [one for one in gc.get_objects() if id(one) == known and isinstance(one, nn.Module)]


def test_noise_of_layers_is_off_and_draws_nothing() -> None:
    subscribe(Callbacks(), randomness.without_dropout_and_autocast)
    values, before = torch.linspace(-1, 1, 8), torch.get_rng_state()
    for layer in (nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.RReLU()):
        assert torch.equal(layer(values), layer.eval()(values))
    assert torch.equal(torch.get_rng_state(), before)


def test_what_torch_draws_for_the_script_is_reported() -> None:
    one = Recording()
    subscribe(one, *_GROUPS)
    torch.distributions.Normal(0.0, 1.0).sample((2,))
    torch.distributions.Categorical(logits=torch.zeros(2)).sample()
    nn.init.uniform_(torch.empty(2))
    next(iter(torch.utils.data.RandomSampler(range(3))))
    assert one.calls == ["torch.normal", "torch.multinomial", "torch.Tensor.uniform_"]


def test_what_a_library_draws_for_the_script_is_reported_with_its_name() -> None:
    one = Recording()
    subscribe(one, *_GROUPS)
    where = f"{sysconfig.get_path('purelib')}/layers/drop.py"
    library: dict[str, Any] = {"__name__": "layers.drop", "torch": torch}
    exec(compile("def mask(n):\n    return torch.empty(n).bernoulli_(0.5)", where, "exec"), library)
    library["mask"](2)
    torch.nn.functional.gumbel_softmax(torch.zeros(2))
    assert one.calls == ["layers: torch.Tensor.bernoulli_", "torch.Tensor.exponential_"]


def test_a_random_state_is_one_of_its_kind_and_reports_its_seed() -> None:
    class Seeded(Recording):
        def on_seed(self, seed: str) -> None:
            self.calls.append(seed)

    one, known = Seeded(), np.random.RandomState
    subscribe(one, *_GROUPS)
    made = np.random.RandomState(7)
    assert one.calls == ["[7]"]
    assert isinstance(made, np.random.RandomState)
    assert isinstance(known(8), np.random.RandomState)
    assert made.uniform() == known(7).uniform()


def test_numbers_drawn_in_place_can_be_exchanged() -> None:
    class Handing(Recording):
        def on_random(self, name: str, where: str, value: Any, *, own_generator: bool) -> Any:
            super().on_random(name, where, value, own_generator=own_generator)
            return torch.ones(2)

    one = Handing()
    subscribe(one, *_GROUPS)
    drawn = torch.zeros(2)
    assert drawn.normal_() is drawn
    assert drawn.tolist() == [1.0, 1.0]
    assert one.calls == ["torch.Tensor.normal_"]
