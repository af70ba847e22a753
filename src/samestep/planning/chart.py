"""A plan as a picture: how the samples a second grow with the ranks, and what a step goes into; needs no network."""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap
from typing import Any

from samestep.planning.plan import TITLES, TrainingPlan
from samestep.planning.planner import KINDS
from samestep.planning.step import WORDS, PredictedStep

WHOLE_PAGE = True  # plotly's own script lies in the page
WIDTH = 150  # letters of a title's line
LEFT, RIGHT = (0.0, 0.38), (0.45, 0.83)  # of the page's width: the plots; what is left is for the second one's legend


def draw(plan: TrainingPlan, file: Path) -> None:
    from plotly.subplots import make_subplots

    titles = ("samples a second", "what a step of the fastest way goes into, ms")
    figure: Any = make_subplots(rows=1, cols=2, subplot_titles=titles)
    _curves(figure, plan)
    _parts(figure, plan)
    title = [part for line in plan.title().splitlines() for part in wrap(line, WIDTH)]
    figure.update_layout(
        title={"text": "<br>".join(title), "font": {"size": 14}},
        margin={"t": 80 + 20 * len(title)},
        barmode="relative",  # a part below 0 lies under the others
        template="plotly_white",
        legend={"x": 0.01, "y": 0.99},
        legend2={"x": RIGHT[1] + 0.01, "y": 1.0},
    )
    figure.update_xaxes(title="ranks", type="log", dtick=0.30103, domain=LEFT, row=1, col=1)
    figure.update_yaxes(type="log", dtick="D2", row=1, col=1)
    figure.update_xaxes(title="ranks", type="category", domain=RIGHT, row=1, col=2)
    for words, plot in zip(figure.layout.annotations, (LEFT, RIGHT), strict=True):
        words.x = sum(plot) / 2
    figure.write_html(file, include_plotlyjs=WHOLE_PAGE, default_height="96vh")


def _curves(figure: Any, plan: TrainingPlan) -> None:
    ranks = [one.ranks for one in plan.points]
    alone = plan.planner.single_process.rate
    ideal = [alone * n for n in ranks]
    figure.add_scatter(name="as many times one process", x=ranks, y=ideal, line={"dash": "dot"}, row=1, col=1)
    for kind in KINDS:
        found = [one for point in plan.points if isinstance(one := point.steps.get(kind), PredictedStep)]
        if found:
            rates, layouts = [one.rate for one in found], [str(one.layout) for one in found]
            x = [one.layout.ranks for one in found]
            figure.add_scatter(name=TITLES[kind], x=x, y=rates, text=layouts, row=1, col=1)


def _parts(figure: Any, plan: TrainingPlan) -> None:
    best = [(one.ranks, one.best) for one in plan.points if one.best is not None]
    for name, words in WORDS.items():
        values = [1e3 * one.parts.shares()[name] for _, one in best]
        if any(values):
            figure.add_bar(name=words, x=[str(n) for n, _ in best], y=values, legend="legend2", row=1, col=2)
