"""A training that is profiled is the same training, and its profile agrees with what the script itself sees."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from samestep.errors import UsageError
from samestep.launch.start.prefork_server import PreforkServer
from samestep.planning.observer import LISTENED, WARM_UP
from samestep.planning.profile import Profile
from samestep.verification import runs

STEPS = 5

# It draws random numbers in its loader and in its model, remembers statistics, and notes what it sees of itself.
NOTING = """
    import sys, time, torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(256, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(0.3), nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(4096, 256), torch.randint(0, 10, (4096,)))
    with open(sys.argv[1], "w") as file:
        for x, y in DataLoader(data, batch_size=256, shuffle=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            print(loss.item().hex(), time.perf_counter(), file=file, flush=True)
"""

CHAIN = """
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        optimizer.zero_grad(); model(torch.randn(256, 256)).square().mean().backward(); optimizer.step()
"""

TIED = """
    import torch
    from torch import nn

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.middle = nn.Embedding(50, 16), nn.Linear(16, 16)
            self.head = nn.Linear(16, 50, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, ids):
            return self.head(torch.relu(self.middle(self.tokens(ids))))

    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        optimizer.zero_grad(); model(torch.randint(0, 50, (8, 12))).square().mean().backward(); optimizer.step()
"""

EVALUATES = """
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        model.train()
        optimizer.zero_grad(); model(torch.randn(8, 64)).square().mean().backward(); optimizer.step()
        model.eval()
        model(torch.randn(512, 64))  # torch.no_grad is forgotten
"""

LONG_WINDED = 'raise RuntimeError("sizes differ:\\n\\tweight is [2, 2]\\n\\tand not [3, 2]")'

Measure = Callable[..., Profile]


def seen(path: Path) -> tuple[list[str], list[float]]:
    """What the script has noted: its losses to the last bit, and what each step but the first took."""
    lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    return [loss for loss, _ in lines], [float(two) - float(one) for (_, one), (_, two) in pairwise(lines)]


def test_a_profiled_training_is_the_same_to_the_last_bit(
    measure: Measure, nursery: PreforkServer, tmp_path: Path
) -> None:
    measure(NOTING, str(tmp_path / "watched.txt"))
    script = runs.Script(program=str(tmp_path / "train.py"), arguments=(str(tmp_path / "alone.txt"),))
    assert runs.run(script, 1, tmp_path / "run", "", {}, still_s=60, fork_server=nursery).code == 0
    losses, _ = seen(tmp_path / "watched.txt")
    expected, _ = seen(tmp_path / "alone.txt")
    assert len(losses) == WARM_UP + STEPS + LISTENED - 1  # it is stopped in its last step
    assert losses == expected[: len(losses)]


@pytest.mark.prove
def test_a_step_takes_what_the_script_itself_sees(measure: Measure, tmp_path: Path) -> None:
    profile = measure(NOTING, str(tmp_path / "watched.txt"))
    _, took = seen(tmp_path / "watched.txt")
    own = statistics.median(took[WARM_UP - 1 :][:STEPS])
    assert 0.8 * own < profile.step_s < 1.02 * own


@pytest.mark.prove
def test_a_quarter_of_a_batch_takes_less_than_the_whole(measure: Measure) -> None:
    took = [one.forward_s + one.backward_s for one in measure(CHAIN).sizes]
    assert all(few < many for few, many in zip(took, took[2:], strict=False))


def test_sizes_are_parts_of_the_batch_and_layers_have_the_parameters(measure: Measure) -> None:
    profile = measure(CHAIN)
    assert [one.samples for one in profile.sizes] == [16, 32, 64, 128, 256]
    assert all(sum(one.parameters for one in layers) == profile.parameter_bytes for layers in profile.layers.values())


def test_each_layer_that_shares_a_weight_has_it(measure: Measure) -> None:
    profile = measure(TIED)
    shared = 4 * 50 * 16
    assert profile.parameter_bytes == shared + 4 * (16 * 16 + 16) == sum(one.nbytes for one in profile.gradients)
    assert sum(one.parameters for one in profile.layers[8]) == profile.parameter_bytes + shared
    assert profile.gradients[-1].name == "tokens.weight"


def test_what_an_evaluation_keeps_is_no_activation_of_the_training(measure: Measure) -> None:
    profile = measure(EVALUATES)
    assert profile.batch == 8
    assert profile.activation_bytes == 4 * 8 * (64 + 128 + 4)


def test_a_training_that_ends_with_an_evaluation_is_measured_as_it_trained(measure: Measure) -> None:
    profile = measure(
        """
        import torch
        from torch import nn

        model = nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.5), nn.Linear(128, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(7):
            optimizer.zero_grad(); model(torch.randn(8, 64)).square().mean().backward(); optimizer.step()
        model.eval()
        """
    )
    assert profile.layers[8][1].saved > 0  # the mask, which an evaluation has none of


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (LONG_WINDED, "train.py:1: RuntimeError: sizes differ: weight is [2, 2] and not [3, 2]"),
        ("raise KeyboardInterrupt", "train.py:1: KeyboardInterrupt"),
    ],
    ids=["several lines", "no message"],
)
def test_whatever_an_exception_says_is_told_in_a_line(measure: Measure, source: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        measure(source)
    assert str(refused.value).endswith(said)
