"""`samestep verify` on whole scripts, with real ranks: a few of the zoo, which `make zoo` runs whole, and bad input."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
import shutil
import textwrap
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from lazily import Lazily

import samestep
from samestep import Report, UsageError
from samestep.cli import main
from samestep.verification.pages import PAGES
from samestep.verification.report import shown

ROOT = Path(__file__).parents[2]
ZOO = ROOT / "zoo"

BROKEN = {  # directory -> code, and a text of the culprit's line
    "ddp-bypassed": ("gradients-not-synchronised", "model.module("),
    "loss-summed": ("gradient-scale", "loss = criterion(model(x), y)"),
    "iterable-not-split-by-worker": ("samples-repeated", "DataLoader("),
    "micro-batch-token-means": ("gradient-differs", "loss.backward()"),
    "mean-of-rank-accuracies": ("evaluation-inexact", ""),
}
FRESH = {"modules-from-set": ("parameter-order-differs", "")}  # the order of a set goes by hashes of strings
HEALTHY = ("accumulation_no_sync", "gan", "own_spawning", "batchnorm_local", "samestep_micro_batches")
PROVED = {"gan", "own_spawning"}
DIGITS = """
    from pathlib import Path
    from types import SimpleNamespace
    import numpy

    def load_digits():
        table = numpy.load(Path(__file__).with_name("digits.npy"))
        data = table[:, :-1]
        return SimpleNamespace(data=data, images=data.reshape(-1, 8, 8), target=table[:, -1].astype(int))
"""

CUT = """
        import torch, torch.distributed as dist
        from torch import nn
        from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
        {imports}
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        dataset = TensorDataset(torch.randn(64, 8), torch.randn(64, 3))
        loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset, shuffle=False))
        model = nn.Sequential(nn.Linear(8, 17), nn.ReLU(), nn.Linear(17, 3))
        {wrap}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for x, y in loader:
            optimizer.zero_grad()
            {loss}.backward()
            {clip}
            optimizer.step()
        dist.destroy_process_group()
"""
SHARDED = {
    "imports": "from torch.distributed.fsdp import fully_shard",
    "wrap": "fully_shard(model[0]), fully_shard(model)",
    "loss": "(model(x) - y).square().mean()",
    "clip": "nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
}
SUMMED = SHARDED | {"loss": "(model(x) - y).square().sum()", "clip": ""}
TENSOR_PARALLEL = SHARDED | {
    "imports": "from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module",
    "wrap": "parallelize_module(model[2], dist.init_device_mesh('cpu', (dist.get_world_size(),)), ColwiseParallel())",
}
FLAT = SHARDED | {
    "imports": "from torch.distributed.fsdp import FullyShardedDataParallel",
    "wrap": "model = FullyShardedDataParallel(model, device_id=torch.device('cpu'))",
    "clip": "",
}
LONG = """
        import torch, torch.distributed as dist
        from torch import nn
        from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        data, test = (TensorDataset(torch.randn(n, 8), torch.randint(3, (n,))) for n in (8000, 101))
        sampler = DistributedSampler(data)
        loader, held = DataLoader(data, 4, sampler=sampler), DataLoader(test, 10, sampler=DistributedSampler(test))
        model = nn.parallel.DistributedDataParallel(nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        def train(x, y):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        {loop}
        dist.destroy_process_group()
"""
EPOCHS = """
        for epoch in range(1000):
            sampler.set_epoch(epoch)
            for x, y in loader:
                train(x, y)
            model.eval()
            right = torch.zeros(1)
            with torch.no_grad():
                for x, y in held:
                    right += (model(x).argmax(1) == y).sum()
            dist.all_reduce(right)
            model.train()
"""
FOR_EVER = """
        drawn, rank = torch.Generator().manual_seed(1), dist.get_rank()
        while True:
            x, y = torch.randn(8, 8, generator=drawn), torch.randint(3, (8,), generator=drawn)
            train(*(one.chunk(dist.get_world_size())[rank] for one in (x, y)))
"""
EVERY_BATCH = """
        batches = iter(loader)
        for _ in range(len(loader)):
            train(*next(batches))
"""
SCRIPTS = {
    "evaluates behind a long pass": LONG.format(loop=EPOCHS),
    "trains for ever": LONG.format(loop=FOR_EVER),
    "counts on every batch": LONG.format(loop=EVERY_BATCH),
    "cut by fully_shard": CUT.format(**SHARDED),
    "cut by fully_shard, summed": CUT.format(**SUMMED),
    "cut by tensor parallelism": CUT.format(**TENSOR_PARALLEL),
    "cut by FSDP1": CUT.format(**FLAT),
    "evaluates without eval()": """
        import torch, torch.distributed as dist
        from torch import nn
        from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        dataset = TensorDataset(torch.randn(32, 8), torch.randn(32, 3))
        training, test = (DataLoader(dataset, 8, sampler=DistributedSampler(dataset, shuffle=False)) for _ in range(2))
        model = nn.parallel.DistributedDataParallel(nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(2):
            for loader, trains in ((training, True), (test, False)):
                losses = torch.zeros(2)
                for x, y in loader:
                    with torch.set_grad_enabled(trains):
                        loss = (model(x) - y).square().mean()
                    if trains:
                        optimizer.zero_grad()
                        loss.backward()
                        optimizer.step()
                    losses += torch.tensor([loss.item() * len(x), len(x)])
                    print(f"[GPU{dist.get_rank()}] eval loss {loss:.5f}")
            dist.all_reduce(losses)
        dist.destroy_process_group()
    """,
    "trains nothing": "print('x' * 5_000_000)",
    "fails alone too": "raise RuntimeError('no such file')",
    "wants a terminal": "input('learning rate? ')",
    "fails on one rank": """
        import torch.distributed as dist
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            raise RuntimeError("only here")
        dist.barrier()
    """,
    "registers its layers in another order on rank 1": """
        import torch, torch.distributed as dist
        from torch import nn
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        names = ["first", "second"] if dist.get_rank() == 0 else ["second", "first"]
        layers = nn.ModuleDict({name: nn.Linear(10, 10) for name in names})
        model = nn.parallel.DistributedDataParallel(layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            layers["second"](layers["first"](torch.ones(8, 10))).square().mean().backward()
            optimizer.step()
        dist.destroy_process_group()
    """,
    "has more batches on one rank": """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        size = dist.get_world_size()
        for step in range(10 - dist.get_rank()):
            optimizer.zero_grad()
            model(torch.ones(8, 10)).square().mean().backward()
            optimizer.step()
        dist.all_reduce(torch.zeros(1))
        dist.destroy_process_group()
    """,
    # the sleep is the fault itself: a rank that never comes; the run is ended long before it is over
    "waits for ever": """
        import datetime, time, torch, torch.distributed as dist
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=600))
        if dist.get_rank() == 1:
            time.sleep(600)
        dist.barrier()
    """,
}


def put_digits_in_place_of_sklearn(folder: Path) -> None:
    """Beside the scripts, so that none imports scikit-learn, which takes longer than a training: its digits alone."""
    (sklearn := folder / "sklearn").mkdir()
    (sklearn / "__init__.py").touch()
    (sklearn / "datasets.py").write_text(textwrap.dedent(DIGITS), encoding="utf-8")
    spec = importlib.util.find_spec("sklearn")
    assert spec is not None
    assert spec.origin is not None
    with gzip.open(Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as lines:
        np.save(sklearn / "digits.npy", np.loadtxt(lines, delimiter=","))


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Lazily[Report]:
    folder = tmp_path_factory.mktemp("scripts")
    put_digits_in_place_of_sklearn(folder)
    zoo = {name: ZOO / name / "buggy.py" for name in BROKEN | FRESH} | {n: ZOO / "healthy" / f"{n}.py" for n in HEALTHY}
    scripts = {name: Path(shutil.copy(path, folder / f"{name}.py")) for name, path in zoo.items()}
    for name, text in SCRIPTS.items():
        scripts[name] = folder / f"{name.replace(' ', '_')}.py"
        lines = text.strip("\n").splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip())
        scripts[name].write_text("\n".join(line[indent:] for line in lines), encoding="utf-8")
    waits = {"waits for ever": 5.0}
    steps = {"cut by FSDP1": 3}  # of its four
    return Lazily(lambda name: samestep.verify(scripts[name], timeout=waits.get(name, 60.0), steps=steps.get(name, 64)))


@pytest.mark.parametrize(
    "name",
    [*BROKEN, *(pytest.param(name, marks=[pytest.mark.prove, pytest.mark.fresh_interpreter]) for name in FRESH)],
)
def test_a_broken_script_is_found_and_its_line_named(reports: Lazily[Report], name: str) -> None:
    code, text = (BROKEN | FRESH)[name]
    (found, *_) = [finding for finding in reports[name].errors if finding.code == code]
    assert reports[name].verdict == "different"
    path, _, line = (found.where or ":0").rpartition(":")
    if text:
        assert text in Path(path).read_text(encoding="utf-8").splitlines()[int(line) - 1]


@pytest.mark.prove
@pytest.mark.parametrize(
    "name",
    [
        "10/right/housing_windows",  # windows that go by the number of ranks
        "10/right/iris_loader",  # a batch that all load and cut
        "10/right/cover_sum",  # a rate beside a sum
        "10/right/friedman_solo",  # no exchange
        "13/right/adafactor_shards",  # optimizer state that is partial sums when it is saved
        "13/right/frozen_cache",  # a buffer that each rank fills for itself
    ],
)
def test_right_scripts_of_blind_rounds_are_the_same_training(name: str) -> None:
    samestep.verify(ZOO / "blind" / f"{name}.py").require_same()


@pytest.mark.prove
@pytest.mark.parametrize(
    ("name", "code", "lines"),
    [
        ("spiral_ddpm", "batches-differ", range(30, 34)),  # levels are drawn by what a rank has seen
        ("songs_bpr", "batches-differ", range(34, 42)),  # negatives are no plays of the rank's own
        ("diabetes_preempt", "gradient-differs", None),  # step 10 begins with one rank's part of a gradient
    ],
)
def test_samples_and_steps_that_only_one_process_has_otherwise(name: str, code: str, lines: range | None) -> None:
    (found,) = samestep.verify(ZOO / "blind" / "13" / "bugs" / name / "wrong.py").errors
    assert found.code == code
    assert lines is None or int((found.where or "").rpartition(":")[2]) in lines
    samestep.verify(ZOO / "blind" / "13" / "bugs" / name / "fixed.py").require_same()


@pytest.mark.prove
@pytest.mark.parametrize(
    ("name", "code", "line"),
    [
        ("10/bugs/wells_classes", "evaluation-inexact", "60"),
        ("9/bugs/digits_warm", "initial-state-differs", "50"),
        ("12/bugs/digits_thirds", "evaluation-inexact", "49"),
    ],
)
def test_bugs_of_blind_rounds_and_their_twins(name: str, code: str, line: str) -> None:
    """An evaluation of tensors that are no module, a model that rank 0 trains before the others, and a sampler."""
    (found,) = samestep.verify(ZOO / "blind" / name / "wrong.py").errors
    assert (found.code, (found.where or "").rpartition(":")[2]) == (code, line)
    fixed = samestep.verify(ZOO / "blind" / name / "fixed.py")
    fixed.require_same()
    assert fixed.coverage["evaluation"] == "agrees"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.prove) if name in PROVED else name for name in HEALTHY]
)
def test_a_healthy_script_is_the_same_training(reports: Lazily[Report], name: str) -> None:
    reports[name].require_same()
    assert reports[name].steps > 0
    assert reports[name].coverage["gradients"] in {"agrees", "agrees as declared"}


def test_where_nothing_is_trained_nothing_can_be_said(reports: Lazily[Report]) -> None:
    report = reports["trains nothing"]
    assert (report.verdict, report.findings) == ("inconclusive", [])
    assert "there is no training to compare" in str(report)
    assert report.coverage["communication"] == "not checked: the ranks send each other nothing"


@pytest.mark.parametrize(
    ("name", "why"), [("fails alone too", "no such file"), ("wants a terminal", "EOF when reading a line")]
)
def test_what_fails_alone_too_is_no_difference(reports: Lazily[Report], name: str, why: str) -> None:
    report = reports[name]
    assert (report.verdict, report.errors) == ("inconclusive", [])
    assert report.inconclusive is not None
    assert why in report.inconclusive


def test_layers_that_ranks_register_in_another_order_are_named(reports: Lazily[Report]) -> None:
    (found,) = reports["registers its layers in another order on rank 1"].errors
    assert (found.code, found.rank, found.tensor) == ("parameter-order-differs", 1, "second.weight")
    assert "rank 1 registers second.weight where rank 0 has first.weight (parameter 0)" in found.cause


def test_ranks_with_unlike_numbers_of_batches_are_told_where_each_was(reports: Lazily[Report]) -> None:
    report = reports["has more batches on one rank"]
    (found,) = report.errors
    assert found.code == "collective-mismatch"
    assert "backward()" in found.cause
    assert "dist.all_reduce(torch.zeros(1))" in found.cause
    assert "samestep.shards" in (found.fix or "")
    assert report.coverage["communication"] == "differs"


def test_a_crash_on_one_rank_is_a_difference(reports: Lazily[Report]) -> None:
    (crash,) = reports["fails on one rank"].errors
    assert (crash.code, crash.rank) == ("crash", 1)
    assert "only here" in crash.cause
    assert reports["fails on one rank"].coverage["communication"].startswith("not checked: the run broke off")


def test_a_hang_names_who_is_missing_and_where_both_stand(reports: Lazily[Report]) -> None:
    report = reports["waits for ever"]
    (hang,) = report.errors
    assert (hang.code, hang.rank) == ("hang", 1)
    assert "rank 0 waits in barrier" in hang.cause
    places = [remark for remark in report.remarks if "stands at" in remark]
    assert any("dist.barrier()" in place for place in places)
    assert any("time.sleep(600)" in place for place in places)


def test_parameters_that_fully_shard_cuts_are_put_together_and_compared(reports: Lazily[Report]) -> None:
    reports["cut by fully_shard"].require_same()
    assert reports["cut by fully_shard"].coverage["gradients"] == "agrees"
    assert "there is one copy" in reports["cut by fully_shard"].margins["parameters"]
    (summed,) = reports["cut by fully_shard, summed"].errors
    assert (summed.code, summed.factor) == ("gradient-scale", pytest.approx(0.5, rel=1e-3))


def test_parameters_that_fsdp1_puts_into_flat_ones_are_taken_out_and_compared(reports: Lazily[Report]) -> None:
    reports["cut by FSDP1"].require_same()
    assert reports["cut by FSDP1"].coverage["updates"] == "identical"
    assert "there is one copy" in reports["cut by FSDP1"].margins["parameters"]


def test_ranks_of_tensor_parallelism_that_get_different_batches_are_found(reports: Lazily[Report]) -> None:
    assert "batches-differ" in [one.code for one in reports["cut by tensor parallelism"].errors]


def test_an_evaluation_is_compared_though_gradients_are_off_around_the_model_only(reports: Lazily[Report]) -> None:
    report = reports["evaluates without eval()"]
    report.require_same()
    assert report.coverage["evaluation"] == "agrees"


def test_as_many_steps_are_recorded_as_were_asked_for(reports: Lazily[Report]) -> None:
    assert [reports[name].steps for name in ("cut by FSDP1", "cut by fully_shard")] == [3, 4]


def test_a_bug_of_an_evaluation_is_found_behind_a_pass_of_any_length(reports: Lazily[Report]) -> None:
    report = reports["evaluates behind a long pass"]
    (found,) = report.errors  # padded: 101 samples on two ranks
    assert (found.code, report.steps) == ("evaluation-inexact", 64)
    assert "dist.all_reduce(right)" in Path((found.where or "").rpartition(":")[0]).read_text(encoding="utf-8")
    assert "the pass was ended after 64 of 1,000 batches to reach the evaluation" in " ".join(report.remarks)
    assert (report.coverage["data"], report.margins["data"]) == ("identical", "2 epochs of 2 ranks")


def test_a_training_without_end_is_compared_and_what_it_has_not_reached_is_named(reports: Lazily[Report]) -> None:
    report = reports["trains for ever"]
    report.require_same()
    assert (report.steps, report.coverage["gradients"]) == (256, "agrees")  # four times as many, without a DataLoader
    assert "steps: evaluation, checkpoint; see --steps" in shown(report)


@pytest.mark.prove
def test_a_script_that_counts_on_every_batch_is_recorded_without_an_early_end(reports: Lazily[Report]) -> None:
    report = reports["counts on every batch"]
    report.require_same()
    assert (report.steps, report.margins["data"]) == (64, "1 epoch of 2 ranks")
    assert any("no pass was ended early" in remark for remark in report.remarks)


def test_a_report_is_json_with_every_property(reports: Lazily[Report]) -> None:
    told = json.loads(json.dumps(reports["loss-summed"].as_json()))
    (finding,) = [one for one in told["findings"] if one["severity"] == "error"]
    assert finding["factor"] == pytest.approx(0.5, rel=1e-3)
    assert set(told["coverage"]) == {
        *("initial_state", "parameter_order", "gradients", "updates", "parameters", "buffers", "data", "random"),
        *("control", "communication", "evaluation", "checkpoint", "pipeline"),
    }
    with pytest.raises(AssertionError, match="gradient-scale"):
        reports["loss-summed"].require_same()


@pytest.fixture(scope="module")
def readme() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme", ROOT / "scripts" / "readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_of_the_readme_shows_what_the_command_says(
    readme: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    buggy, _ = readme.scripts()
    (tmp_path / "train.py").write_text(buggy, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["verify", "train.py"]) == 1
    said = capsys.readouterr().out
    assert readme.text_in(readme.drawn(said)) == re.sub(r"\s", "", said)
    assert re.sub(r"\s", "", said) in readme.text_in(readme.PICTURE.read_text(encoding="utf-8"))


@pytest.mark.prove
def test_the_picture_of_the_readme_is_what_the_script_draws(readme: ModuleType) -> None:
    assert readme.drawn(readme.session()) == readme.PICTURE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-n", "1", "x.py"], "give 2 or more"),
        (["--explain", "nothing"], "there is no finding and no error"),
        (["--explain", "SteppError"], "did you mean StepError?"),
        (["--explain", "gradient-sale"], "did you mean gradient-scale?"),
        ([], "no script is given"),
        (["nowhere.py"], "there is no script"),
        (["--steps", "0", "x.py"], "give 1 or more"),
    ],
)
def test_usage_errors_say_how_to_fix_them(capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    assert exit_code(["verify", *arguments]) == 2
    assert text in capsys.readouterr().err


def exit_code(arguments: list[str]) -> object:
    try:
        return main(arguments)
    except SystemExit as end:
        return end.code


def test_a_verification_takes_two_ranks_or_more() -> None:
    with pytest.raises(UsageError, match="at least 2"):
        samestep.verify(__file__, ranks=1)


def test_every_kind_of_finding_has_a_page() -> None:
    sources = (ROOT / "src" / "samestep" / "verification").rglob("*.py")
    told = {code for path in sources for code in re.findall(r'code="([a-z-]+)"', path.read_text(encoding="utf-8"))}
    assert told == set(PAGES)
