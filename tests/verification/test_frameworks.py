"""`samestep verify` on loops of other libraries: healthy ones are the same training, and what is planted is found."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import samestep
from samestep import Report

SCRIPTS = Path(__file__).parent / "frameworks"
LIBRARIES = {"accelerate": "accelerate", "fabric": "lightning_fabric", "trainer": "transformers"}

MEAN = "cross_entropy(model(x), y)"
SUM = 'cross_entropy(model(x), y, reduction="sum")'
PREPARED = "model, optimizer, train_loader, test_loader, scheduler"
UNPREPARED = "model, optimizer, test_loader, scheduler"
OWN_LOSS = """
class Own(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **_):
        out = model(**inputs)
        loss = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
        return (loss, out) if return_outputs else loss


set_seed(5)"""
STEP = """\
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
"""
EVERY_SECOND_STEP = """\
            if i % 2:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
"""
BY_HAND = {  # the loop of with_accelerate.py, which counts by itself and does not divide
    "gradient_accumulation_steps=2": "gradient_accumulation_steps=1",
    "for x, y in train_loader:": "for i, (x, y) in enumerate(train_loader):",
    "with accelerator.accumulate(model):": "if True:",
    "if accelerator.sync_gradients:": "if False:",
    STEP: EVERY_SECOND_STEP,
}
# library, what is planted -> code, part of its line, factor; {what is replaced: by what}
PLANTED: dict[tuple[str, str], tuple[tuple[str, str, float | None], dict[str, str]]] = {
    ("accelerate", "a summed loss"): (
        ("gradient-scale", "backward(loss)", 0.5),
        {MEAN: SUM, "parameters(), 1.0)": "parameters(), 1e9)"},
    ),
    ("accelerate", "a loader that is not prepared"): (
        ("samples-repeated", "train_loader = DataLoader(", None),
        {f"{PREPARED} = ": f"{UNPREPARED} = ", f"    {PREPARED}\n": f"    {UNPREPARED}\n"},
    ),
    ("accelerate", "predictions gathered with their padding"): (
        ("evaluation-inexact", "accelerator.gather(", None),
        {"gather_for_metrics": "gather"},
    ),
    ("accelerate", "an unwrapped model"): (
        ("gradients-not-synchronised", "unwrap_model(", None),
        {MEAN: "cross_entropy(accelerator.unwrap_model(model)(x), y)"},
    ),
    ("accelerate", "weights of one rank"): (
        ("initial-state-differs", "", None),
        {
            "\nfor epoch": "\nif accelerator.is_main_process:\n"
            "    accelerator.unwrap_model(model)[0].bias.data.zero_()\nfor epoch"
        },
    ),
    ("accelerate", "micro-batches that are not divided"): (("gradient-scale", "backward(loss)", 2.0), BY_HAND),
    ("accelerate", "a last window that is left over"): (
        ("gradient-differs", "optimizer.step()", None),
        {**BY_HAND, "backward(loss)": "backward(loss / 2)", "dataset(210)": "dataset(200)"},
    ),
    ("fabric", "a summed loss"): (("gradient-scale", "backward(", 0.5), {MEAN: SUM, "norm=1.0": "norm=1e9"}),
    ("fabric", "a loader that is not set up"): (
        ("samples-repeated", "train_loader = DataLoader(", None),
        {"train_loader, test_loader = fabric": "test_loader = fabric", "(train_loader, test": "(test"},
    ),
    ("fabric", "a bypassed wrapper"): (
        ("gradients-not-synchronised", "model.module(", None),
        {MEAN: "cross_entropy(model.module(x), y)"},
    ),
    ("fabric", "no synchronisation at all"): (
        ("gradients-not-synchronised", "", None),
        {"enabled=accumulating": "enabled=True"},
    ),
    ("fabric", "padding in an evaluation"): (("evaluation-inexact", "", None), {"dataset(64)": "dataset(63)"}),
    ("trainer", "a mean of token means"): (
        ("gradient-differs", "trainer.train()", None),
        {"    use_cpu": "    average_tokens_across_devices=False,\n    use_cpu"},
    ),
    ("trainer", "a loss of its own that is not divided"): (
        ("gradient-scale", "trainer.train()", 2.0),
        {
            "\nset_seed(5)": OWN_LOSS,
            " = Trainer(": " = Own(",
            "1, 9)": "1, 0)",
            "    use_cpu": "    max_grad_norm=0,\n    use_cpu",
        },
    ),
    # it evaluates the mean over batches, whose number of tokens differs, and cuts them otherwise for two ranks
    ("trainer", "prompts in an evaluation"): (("evaluation-inexact", "trainer.train()", None), {"2, 0)": "2, 9)"}),
}
BRIEFLY = {("accelerate", "an unwrapped model")}  # the others, with `make prove`


def verified(folder: Path, library: str, changes: dict[str, str]) -> tuple[Report, list[str]]:
    """Returns the report on a library's script with some texts replaced, and its lines."""
    if importlib.util.find_spec(LIBRARIES[library]) is None:  # samestep needs none of them, and `make` installs none
        pytest.skip(f"{LIBRARIES[library]} is not installed")
    text = (SCRIPTS / f"with_{library}.py").read_text(encoding="utf-8")
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    script = folder / "train.py"
    script.write_text(text, encoding="utf-8")
    return samestep.verify(script), text.splitlines()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "library", ["accelerate", *(pytest.param(name, marks=pytest.mark.prove) for name in ("fabric", "trainer"))]
)
def test_a_loop_of_another_library_is_the_same_training(tmp_path: Path, library: str) -> None:
    report, _ = verified(tmp_path, library, {})
    report.require_same()
    assert report.steps == 14
    assert report.coverage["gradients"] in {"agrees", "agrees as declared"}
    assert report.coverage["evaluation"] == "agrees"


@pytest.mark.prove
@pytest.mark.timeout(400)
def test_samples_that_one_rank_loads_for_all_are_said_not_to_be_compared(tmp_path: Path) -> None:
    config = "import accelerate\n\nconfig = accelerate.DataLoaderConfiguration(dispatch_batches=True)\n"
    changes = {
        "accelerator = Accelerator(cpu=True,": f"{config}accelerator = Accelerator(cpu=True, dataloader_config=config,",
        "dataset(210)": "dataset(224)",
    }
    report, _ = verified(tmp_path, "accelerate", changes)
    assert (report.verdict, report.errors) == ("inconclusive", [])
    assert "rank 0 loads for all ranks" in report.coverage["gradients"]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("library", "planted"),
    [pytest.param(*name, marks=() if name in BRIEFLY else pytest.mark.prove) for name in PLANTED],
)
def test_a_bug_in_a_loop_of_another_library_is_found(tmp_path: Path, library: str, planted: str) -> None:
    (code, text, factor), changes = PLANTED[library, planted]
    report, lines = verified(tmp_path, library, changes)
    assert report.verdict == "different"
    found = [finding for finding in report.errors if finding.code == code]
    assert found, str(report)
    assert factor is None or found[0].factor == pytest.approx(factor, rel=1e-2)
    if text:
        assert text in lines[int((found[0].where or ":0").rpartition(":")[2]) - 1], str(report)
