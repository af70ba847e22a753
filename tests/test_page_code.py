"""The Python on the pages runs as it stands, and the commands on them have options that are there."""

from __future__ import annotations

import contextlib
import re
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset

import samestep
import samestep.testing
from help_texts import options_of
from samestep.cli import COMMANDS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted(DOCS.rglob("*.md"))]
ELSEWHERE = {  # which test has the block
    ("start.md", 0): "tests/test_site.py",
    ("ci.md", 0): "tests/examples/test_clusters_and_ci.py, by examples/ci/test_training.py",
    ("ci.md", 1): "tests/examples/test_clusters_and_ci.py, by examples/ci/test_training.py",
    ("rpc.md", 0): "tests/examples/test_examples.py, by examples/rpc_parameter_server.py",
    ("mpi.md", 0): "tests/examples/test_examples.py, by examples/mpi_hello.py",
    ("verify.md", 0): "tests/verification/test_verify.py",
    ("launching.md", 0): "tests/launch/test_notebook.py",
}


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


def block(page, number=0):
    return blocks(page)[number]


def run(code, **names):
    """Runs a block among the names that its page takes for granted; returns all names."""
    known = {"samestep": samestep, "torch": torch, "nn": nn, "F": F, "dist": dist, **names}
    exec(compile(code, "a page", "exec"), known)
    return known


def data(samples=40):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 4, generator=draw)
    return TensorDataset(x, (x.sum(1) > 0).long())


def net():
    return nn.Linear(4, 2)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([torch.ones(4)] * 64)


@pytest.fixture
def world():
    with samestep.world(device="cpu") as here:
        yield here


def among(page, number, names):
    """Runs a block on every rank of a gloo world."""
    with samestep.world(device="cpu") as world:
        run(block(page, number), world=world, **names)
    return world.size


def test_every_block_of_python_is_run_somewhere():
    text = Path(__file__).read_text(encoding="utf-8")
    for page in sorted(page.name for page in DOCS.glob("*.md")):
        for number in range(len(blocks(page))):
            here = f'"{page}"' if number == 0 else f'"{page}", {number}'
            assert here in text, f"block {number} of {page} is run by no test: here, or ELSEWHERE"
    assert all((ROOT / where.split(",")[0]).exists() for where in ELSEWHERE.values())


def test_all_reduce_is_proved_priced_and_simulated():
    first, _, last = block("all-reduce.md").partition("engine.run(")
    assert last
    buffers = [torch.full((16,), 2**rank) for rank in range(8)]
    priced = first.replace(".seconds", ".seconds\nfound = _", 1)
    known = run(first, buffers=buffers)
    assert [buffer.tolist() for buffer in buffers] == [[255] * 16] * 8
    seconds = known["price"](known["plan"], 25e6, known["Links"](known["Link"](20e-6, 1.25e9))).seconds
    assert f"# 2  {seconds:.4f} s" in priced


def two_ranks_reduce():
    code = block("all-reduce.md").replace("(8)", "(2)").replace("simulate.run(plan, buffers)", "pass")
    with samestep.world(device="cpu") as world:
        buffer = torch.full((16,), world.rank + 1.0)
        run(code, buffer=buffer)
        return buffer.tolist()


def test_all_reduce_runs_on_ranks(two_ranks):
    assert two_ranks(two_ranks_reduce) == [[3.0] * 16] * 2


def test_an_algorithm_is_chosen_from_links_that_are_measured(two_ranks):
    assert two_ranks(among, "all-reduce.md", 1, {}) == [2, 2]


def test_gradients_are_compressed(two_ranks):
    assert two_ranks(among, "compression.md", 0, {"Net": net}) == [2, 2]


def mean_of_an_epoch():
    with samestep.world(device="cpu", seed=0) as world:
        torch.manual_seed(0)
        model = samestep.replicate(net(), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # so each sample has one loss
        batches = samestep.shards(data(40), world, batch_size=10)
        mean = run(block("step.md"), model=model, optimizer=optimizer, batches=batches)["mean"]
        x, y = data(40).tensors
        return mean, F.cross_entropy(model.module(x), y).item()


def test_the_mean_loss_of_an_epoch_is_that_of_all_samples(two_ranks):
    for mean, expected in two_ranks(mean_of_an_epoch):
        assert mean == pytest.approx(expected, rel=1e-6)


def counts_of_a_run(folder, stop=None):
    """Returns the mean losses, and the best score, of two epochs; a run that stops ends in front of that step."""
    with contextlib.chdir(folder), samestep.world(device="cpu", seed=0) as world:
        torch.manual_seed(0)
        model = samestep.replicate(net(), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = samestep.shards(data(40), world, batch_size=10)
        losses = []

        def predict(batch):
            return model(batch[0]), batch[1]

        def cross_entropy(*args, **options):
            losses.append(batches.step + 4 * batches.epoch)
            if losses[-1] == stop:
                raise KeyboardInterrupt
            return F.cross_entropy(*args, **options)

        known = {"model": model, "optimizer": optimizer, "batches": batches, "predict": predict, "test_set": data(20)}
        known |= {"F": types.SimpleNamespace(cross_entropy=cross_entropy), "accuracy": hits}
        code = block("runs.md").replace("epochs(10)", "epochs(2)").replace("every=100", "every=1")
        code = code.replace("scores =", "means.append(mean)\n    scores =")
        known["means"] = []
        try:
            known = run(code, world=world, **known)
        except KeyboardInterrupt:
            return None
        return known["means"], known["progress"].best, sorted(torch.load("best.pt", weights_only=True))


def hits(outputs, targets):
    return (outputs.argmax(1) == targets).double().mean().item()


def test_the_sum_of_an_epoch_and_the_best_score_go_on_after_a_resume(tmp_path):
    (whole := tmp_path / "whole").mkdir()
    (resumed := tmp_path / "resumed").mkdir()
    means, best, names = counts_of_a_run(whole)
    assert counts_of_a_run(resumed, stop=6) is None
    (last,), again, _ = counts_of_a_run(resumed)
    assert (len(means), names) == (2, ["bias", "weight"])
    assert last == pytest.approx(means[1], rel=1e-6)
    assert best == again > 0


def evaluated():
    from torch.utils.data import DataLoader

    torch.manual_seed(0)
    with samestep.world(device="cpu") as world:
        model = types.SimpleNamespace(module=net())
        about = {"model": model, "test_set": data(37), "rank": world.rank, "world_size": world.size}
        known = run(block("verify.md", 1), DataLoader=DataLoader, **about)
        images, labels = data(37).tensors
        right = (model.module(images).argmax(1) == labels).sum()
        return known["accuracy"].item(), right.item() / len(labels)


def test_an_evaluation_by_hand_is_that_of_one_process(two_ranks):
    for accuracy, expected in two_ranks(evaluated):
        assert accuracy == pytest.approx(expected, abs=1e-12)


def test_drift_is_guarded_against(world):
    run(block("drift.md"), Net=net, world=world)


def test_the_data_are_audited(world):
    batches = samestep.shards(data(), world, batch_size=8)
    for _ in batches:
        pass
    code = block("data.md").replace("audit(batches", "said = audit(batches")
    assert run(code, batches=batches)["said"].startswith("every sample of 1 epoch")


def test_samples_are_shared_out_by_cost(world):
    run(block("data.md", 1), texts=data(600), lengths=list(range(1, 601)), world=world)


def test_data_are_downloaded_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = []

    def download(folder):
        made.append(folder)
        Path(folder).mkdir()

    for _ in range(2):
        run(block("data.md", 2), download=download)
    assert made == ["data/pictures"]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own
def test_a_stateful_loader_is_read(world):
    torchdata = pytest.importorskip("torchdata")
    pytest.importorskip("torchdata.stateful_dataloader")
    code = block("data.md", 3).replace("num_workers=2", "num_workers=0")
    known = run(code, torchdata=torchdata, world=world, stream_of_this_rank=Stream())
    assert sum(len(batch) for batch in known["batches"]) == 64


def test_virtual_ranks_train():
    prepare = """optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = samestep.shards(dataset, world, batch_size=16)
    state = samestep.checkpoint(None, world, model=model, optimizer=optimizer, data=batches)"""
    known = run(block("elastic.md").replace("…", prepare, 1), Net=net, dataset=data())
    assert known["state"].step == 3


def test_numbers_are_logged(world):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    batches = samestep.shards(data(), world, batch_size=8)
    for x, y in batches:
        batches.mean(F.cross_entropy(model(x), y, reduction="none")).backward()
    run(block("events.md"), world=world, batches=batches, scheduler=scheduler)


def test_a_pipeline_is_planned_trained_and_drawn(tmp_path, monkeypatch, capsys):
    pytest.importorskip("PIL", reason="an image needs Pillow")
    monkeypatch.chdir(tmp_path)
    code = block("pipelines.md").replace("from mine import", "# from mine import")
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    known = run(code, Net=lambda: model, training_set=data(256))
    assert "bubble" in capsys.readouterr().out
    run(block("pipelines.md", 1), **known)
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [["96", "16"], ["120", "20"]]
    run(block("pipelines.md", 2).replace("cuda:0", "cpu").replace("cuda:1", "cpu"), **known)
    run(block("pipelines.md", 3), **known)
    run(block("pipelines.md", 4), **known)
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


class Way(nn.Module):
    """A stage that hands a tensor on, and another around the next one."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, h, skip=None):
        return self.linear(h), h if skip is None else skip


class End(nn.Module):
    """The stage that takes both."""

    def forward(self, h, skip):
        return h + skip


def by_hand():
    known = run(block("pipelines.md", 5), encoder=Way(), middle=Way(), decoder=End())
    return list(known["stage"].parts), known["stage"].micro_batches


def test_stages_by_hand_are_one_for_each_rank(three_ranks):
    assert three_ranks(by_hand) == [([0], 8), ([1], 8), ([2], 8)]


class Branches(nn.Module):
    """A stage by hand that passes a second tensor on."""

    def __init__(self, first=False, last=False):
        super().__init__()
        self.body, self.first, self.last = nn.Linear(4, 4), first, last

    def forward(self, h, skip=None):
        skip = h if self.first else skip
        return self.body(h) + skip if self.last else (self.body(h), skip)


def test_stages_made_by_hand_take_a_step():
    encoder, middle, decoder = Branches(first=True), Branches(), Branches(last=True)
    code = block("pipelines.md", 5) + "\n    loss = stage.step((x, y))\n"
    x, y = torch.randn(16, 4), torch.randn(16, 4)
    known = run(code, encoder=encoder, middle=middle, decoder=decoder, x=x, y=y)
    expected = F.mse_loss(decoder(*middle(*encoder(x))), y)
    torch.testing.assert_close(known["loss"], expected, check_dtype=False)


def process_group_of(number):
    known = run(block("process-group.md", number) + "\ntotal = torch.ones(3)\ndist.all_reduce(total)\n")
    return dist.get_backend(), known["total"].tolist()


@pytest.mark.parametrize("number", [0, 1])
def test_the_process_group_is_made(two_ranks, number):
    assert two_ranks(process_group_of, number) == [("samestep", [2.0] * 3)] * 2
    assert block("process-group.md", 1) != block("process-group.md")


def test_networks_have_the_prices_that_stand_there(capsys):
    code = block("topologies.md")
    run(code)
    assert [f"# {line}" for line in capsys.readouterr().out.splitlines()] == re.findall(r"^# .*$", code, re.MULTILINE)


def test_the_best_offer_of_a_cluster_file_is_found(tmp_path, monkeypatch, capsys):
    (cluster,) = re.findall(r"```toml\n(.*?)```", (DOCS / "plan.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "cluster.toml").write_text(cluster, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    run(block("topologies.md", 1).replace("100_000", "128"))
    assert capsys.readouterr().out.strip()


# --- commands ------------------------------------------------------------------------------------


def commands():
    """Every command of samestep on a page, as (page, words): in blocks, and in the middle of a line."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        fenced = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
        lines = [line.strip().removeprefix("$ ") for each in fenced for line in each.splitlines()]
        inline = [
            " ".join(words.split())
            for words in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        ]
        for line in [*lines, *inline]:
            if re.match(r"samestep [a-z]+ ", line) and not line.startswith("samestep ran"):
                yield page, line


def own_options(line):
    """The command's name and its own options: what stands before the script."""
    words = (
        re.split(r"  +|#", re.sub(r'"[^"]*"', "VALUE", line))[0]
        .replace("…", "")
        .replace("'", "")
        .replace("[", "")
        .split()
    )
    options = []
    for word in words[2:]:
        if re.search(r"\.py$", word) or word in ("-m", "SCRIPT"):
            break
        options.append(word.split("=")[0].strip("[]|,;"))
    return words[1], [word for word in options if re.fullmatch(r"--?[a-z][a-z-]*", word)]


@pytest.fixture(scope="module")
def known():
    return {name: options_of(name) for name in COMMANDS}


def test_a_model_is_made_on_a_fake_gpu():
    assert str(run(block("fake-gpus.md"))["model"].weight.device) == "cuda:1"


def test_every_command_on_a_page_has_options_that_are_there(known):
    found = list(commands())
    assert len(found) > 150
    wrong = []
    for page, line in found:
        name, options = own_options(line)
        if name not in known or set(options) - known[name]:
            wrong.append(f"{page.name}: {line}")
    assert wrong == []


def test_an_option_that_is_not_there_is_found(known):
    name, options = own_options("samestep run -n 2 --restart 3 train.py --lr 0.1   # three times")
    assert (name, options) == ("run", ["-n", "--restart"])
    assert set(options) - known[name] == {"--restart"}
