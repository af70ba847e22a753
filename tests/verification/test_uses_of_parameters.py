"""Evaluations of models that are no modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from samestep.verification.journal import TraceWriter
from samestep.verification.recording.inputs import Inputs
from samestep.verification.recording.uses import ParameterUses

W = torch.ones(3, 2, requires_grad=True)
X = torch.ones(4, 3)


class Watched:
    """What a ParameterUses tells, and the line at which the script's own code is said to step."""

    def __init__(self) -> None:
        self.told: list[list[int]] = []
        self.stepping: tuple[object, int] | None = None
        self.mode = ParameterUses(lambda: [W], self._used, lambda: self.stepping)

    def _used(self, data: tuple[Tensor, ...]) -> None:
        self.told += [list(one.shape) for one in data]


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    watched.mode.enter()
    yield watched
    watched.mode.leave()


@pytest.mark.parametrize(
    "use",
    [
        lambda: X @ W,
        lambda: X @ W.detach(),
        lambda: torch.nn.functional.linear(X[:, :2], W),
        lambda: torch.einsum("ij,jk->ik", X, W),
        lambda: W[torch.tensor([0, 2])],
        lambda: torch.nn.functional.embedding(torch.tensor([0, 2]), W),
    ],
)
def test_data_that_meet_a_parameter_without_gradients_go_through_a_model(
    watched: Watched, use: Callable[[], Tensor]
) -> None:
    use()
    assert watched.told == []  # with gradients it trains
    with torch.no_grad():
        use()
    assert len(watched.told) == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda: torch.zeros(3, 2).lerp_(W, 0.1),
        lambda: torch.linalg.norm(W) * 2,
        lambda: W[0],
        lambda: W @ W.T,
        lambda: X @ torch.ones(3, 2),
    ],
)
def test_averages_and_norms_of_parameters_are_no_evaluations(watched: Watched, use: Callable[[], Tensor]) -> None:
    with torch.no_grad():
        use()
    assert watched.told == []


def test_what_a_step_of_own_code_computes_is_no_evaluation(watched: Watched) -> None:
    code = test_what_a_step_of_own_code_computes_is_no_evaluation.__code__

    def logits() -> Tensor:
        return X @ W

    with torch.no_grad():
        watched.stepping = code, code.co_firstlineno + 100
        X @ W  # in the lines that write
        assert watched.told == []
        logits()
        watched.stepping = code, code.co_firstlineno
        X @ W  # behind them
    assert watched.told == [[4, 3], [4, 3]]


def test_what_torch_func_transforms_has_no_values_to_look_at(watched: Watched, tmp_path: Path) -> None:
    """Gradients of each sample, as differentially private training takes them."""
    model, called = torch.nn.Linear(3, 2), []
    inputs = Inputs(TraceWriter(tmp_path, 0), lambda: 0, lambda *_: called.append(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.samestep_number = 0  # type: ignore[attr-defined]
    inputs.watch(optimizer)

    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (row,)).square().sum()

    weights = {name: one.detach() for name, one in model.named_parameters()}
    by_row = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, X)
    with torch.no_grad():
        torch.vmap(lambda row: row @ W)(X)
    assert (list(by_row["weight"].shape), called, watched.told) == ([4, 2, 3], [], [])
    model(X)
    assert called == [1]
