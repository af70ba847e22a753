"""What a step took, where it went, and how it compares with what was predicted."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import samestep
from samestep.errors import StepError
from samestep.pipelines.gantt import COLOURS, PART_COLOURS, ROW
from samestep.pipelines.pipeline import Pipeline
from samestep.pipelines.report import PARTS, Prediction, make_report
from samestep.schedule.algorithms import SCHEDULE_NAMES, make_schedule
from samestep.schedule.simulate import Costs, simulate


class _Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ahead, back):
        ctx.seconds = back
        threading.Event().wait(ahead)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        threading.Event().wait(ctx.seconds)
        return gradient, None, None


class Waits(nn.Module):
    """A layer that takes its time, and no core."""

    def __init__(self, ahead, back):
        super().__init__()
        self.ahead, self.back, self.weight = ahead, back, nn.Parameter(torch.ones(1))

    def forward(self, x):
        return _Waits.apply(x * self.weight, self.ahead, self.back)


SECONDS = [(0.01, 0.02), (0.02, 0.03)]


def stepped(schedule, chunks):
    with samestep.world(pipeline=2) as world:
        model = nn.Sequential(*(Waits(*SECONDS[layer % 2]) for layer in range(2 * chunks)))
        costs = Costs(*([each[half] for each in SECONDS] * chunks for half in (0, 1)), [0.0] * 2 * chunks)
        stage = Pipeline(
            model,
            world,
            F.mse_loss,
            ends=range(1, 2 * chunks + 1),
            schedule=schedule,
            prediction=Prediction(8, 4, costs),
        )
        with pytest.raises(StepError, match="none was taken"):
            stage.report()
        for samples in (8, 8, 8, 3):
            stage.step((torch.ones(samples, 2), torch.zeros(samples, 2)))
        report = stage.report()
        ended = max(span.end for span in report.timeline.spans)
        orders = [[span.action for span in report.timeline.spans if span.rank == rank] for rank in (0, 1)]
        same = [tuple(order) == plan for order, plan in zip(orders, report.timeline.schedule.rank_actions, strict=True)]
        return report.steps, report.samples, report.seconds, report.predicted, report.parts, report.stages, ended, same


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), pytest.param("interleaved", 2, marks=pytest.mark.prove)])
def test_a_report_tells_steps_of_the_usual_size_and_adds_up(two_ranks, schedule, chunks):
    results = two_ranks(stepped, schedule, chunks)
    assert results[0] == results[1]  # the same on every rank
    steps, samples, seconds, predicted, parts, stages, ended, same = results[0]
    assert (steps, samples) == (3, 8)
    assert list(parts) == list(PARTS)
    assert sum(parts.values()) == pytest.approx(seconds, rel=1e-9)
    costs = Costs(*([each[half] for each in SECONDS] * chunks for half in (0, 1)), [0.0] * 2 * chunks)
    assert predicted == simulate(make_schedule(schedule, 2, 4, chunks), costs).seconds
    assert seconds > predicted  # waiting takes as long as it was told, or longer
    assert all(took >= wanted for (took, *_), (wanted, _) in zip(stages, SECONDS * chunks, strict=True))
    assert all(sum(took) >= wanted for (_, *took), (_, wanted) in zip(stages, SECONDS * chunks, strict=True))
    assert parts["work"] >= 4 * sum(map(sum, SECONDS)) * chunks / 2
    assert ended <= seconds * 1.5
    assert same == [True, True]


def exactly(schedule):
    """A step whose stages took exactly what was predicted."""
    plan = make_schedule(schedule, 1, 3)
    costs = Costs([2.0], [0.0], [3.0])
    timeline = simulate(plan, costs)
    spans = [[*span.action, span.begin, span.end] for span in timeline.spans]
    return (plan, 6, {"began": 100.0, "seconds": timeline.seconds + 1.0, "spans": spans}), costs


@pytest.mark.parametrize("schedule", [name for name in SCHEDULE_NAMES if name != "interleaved"])
def test_a_step_that_goes_as_predicted_is_all_work_and_tail(schedule):
    timed, costs = exactly(schedule)
    with samestep.world() as world:
        report = make_report(world, [timed, timed], Prediction(6, 3, costs))
    assert report.parts == {"work": 15.0, "bubble": 0.0, "imbalance": 0.0, "messages": 0.0, "tail": 1.0}
    assert report.predicted == 15.0
    assert "it took +0.0 %" in str(report)
    assert "a step       16000.00 ms" in str(report)


def test_without_a_plan_or_with_batches_of_another_size_nothing_is_predicted():
    timed, costs = exactly("1f1b")
    with samestep.world() as world:
        assert make_report(world, [timed], None).predicted is None
        report = make_report(world, [timed], Prediction(7, 3, costs))
    assert report.predicted is report.predicted_timeline is None
    assert "predicted" not in str(report)


def test_a_picture_shows_every_action(tmp_path):
    pytest.importorskip("plotly")
    timed, costs = exactly("zero-bubble")
    with samestep.world() as world:
        make_report(world, [timed], Prediction(6, 3, costs)).gantt(tmp_path / "step.html")
    page = (tmp_path / "step.html").read_text()
    drawn = page.rpartition("Plotly.newPlot(")[2]
    for text in ("predicted: 15000.00 ms, 0 % idle", "achieved: 15000.00 ms", "where a step", "F0.2", "W0.0", "tail"):
        assert text in drawn
    assert "<script src" not in page  # it needs no network


def test_an_image_shows_every_action_where_it_was(tmp_path):
    """Rank 0's forwards fill [0, 6) of 15 seconds, its backwards the rest; below them stands what the time went to."""
    image, names = pytest.importorskip("PIL.Image"), pytest.importorskip("PIL.ImageColor")
    timed, costs = exactly("fill-drain")
    with samestep.world() as world:
        make_report(world, [timed], Prediction(6, 3, costs)).gantt(tmp_path / "step.PNG")
    with image.open(tmp_path / "step.PNG") as picture:
        assert picture.format == "PNG"
        pixels = [[picture.getpixel((x, y)) for x in range(picture.width)] for y in range(picture.height)]

    def widest(colour, line):
        return sum(pixel == names.getrgb(colour) for pixel in pixels[line])

    (_, forward), (_, backward) = COLOURS["F"], COLOURS["B"]
    lines = [line for line in range(len(pixels)) if widest(forward, line) > 300]
    assert len(lines) == 2 * (ROW - 14)  # the predicted step's lane, and the achieved one's
    for line in lines[:5]:  # above the numbers
        assert widest(forward, line) / widest(backward, line) == pytest.approx(6 / 9, rel=0.02)
    assert any(widest(PART_COLOURS[0], line) > 800 for line in range(lines[-1], len(pixels)))  # all is work


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("step.html", r"a picture needs plotly: pip install 'samestep\[report\]'"),
        ("step.png", r"a picture needs Pillow: pip install 'samestep\[report\]'"),
        ("step.jpeg", "step.jpeg must end in .html or .png"),
        ("step", "step must end in .html or .png"),
    ],
)
def test_a_picture_that_cannot_be_drawn_says_why(tmp_path, monkeypatch, file, said):
    timed, _ = exactly("1f1b")
    monkeypatch.setattr("samestep.pipelines.gantt.find_spec", lambda _: None)
    with samestep.world() as world, pytest.raises(samestep.UsageError, match=said):
        make_report(world, [timed], None).gantt(tmp_path / file)
    assert os.listdir(tmp_path) == []  # noqa: PTH208
