from __future__ import annotations

import pytest
import torch

from samestep.recipes.common import cosine, cosine_factor


def rates(optimizer, schedule, steps):
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


@pytest.fixture
def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)


def test_the_rate_climbs_in_a_line_and_falls_to_a_tenth():
    factor = cosine_factor(110, warm_up=10)
    assert [factor(step) for step in range(10)] == [(step + 1) / 10 for step in range(10)]
    assert factor(10) == 1
    assert factor(60) == pytest.approx(0.55)
    assert factor(110) == pytest.approx(0.1)
    falling = [factor(step) for step in range(10, 111)]
    assert falling == sorted(falling, reverse=True)


def test_without_a_warm_up_it_starts_at_the_top():
    assert cosine_factor(10, warm_up=0)(0) == 1


def test_a_warm_up_longer_than_the_training_is_allowed():
    assert cosine_factor(5, warm_up=10)(4) == 0.5
    assert cosine_factor(5, warm_up=10)(10) == pytest.approx(0.1 + 0.9)


def test_the_optimizer_takes_the_rate_of_each_step(optimizer):
    factor = cosine_factor(8, warm_up=2)
    schedule = cosine(optimizer, 8, warm_up=2)
    assert rates(optimizer, schedule, 8) == [pytest.approx(2.0 * factor(step)) for step in range(8)]


def test_a_run_resumed_for_more_steps_keeps_falling(optimizer):
    schedule = cosine(optimizer, 10)
    rates(optimizer, schedule, 10)
    saved = schedule.state_dict()
    longer = cosine(optimizer, 20)
    longer.load_state_dict(saved)
    longer.step()
    seen = rates(optimizer, longer, 9)
    assert seen == sorted(seen, reverse=True)
    assert seen[0] == pytest.approx(2.0 * cosine_factor(20, 0)(11))
