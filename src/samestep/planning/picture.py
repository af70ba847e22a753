"""A plan as a picture: how the samples a second grow with the ranks, and what a step goes into; needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from samestep.planning.planned import Planned
from samestep.planning.search import KINDS
from samestep.planning.step import WORDS, Step
from samestep.planning.told import TITLES

__all__: list[str] = []

WHOLE_PAGE = True  # plotly's own script lies in the page


def draw(plan: Planned, file: Path) -> None:
    """Writes the page."""
    from plotly.subplots import make_subplots

    titles = ("samples a second", "what a step of the quickest way goes into, ms")
    figure: Any = make_subplots(rows=1, cols=2, subplot_titles=titles)
    _curves(figure, plan)
    _parts(figure, plan)
    figure.update_layout(title=plan.title().replace("\n", "<br>"), barmode="stack", template="plotly_white")
    figure.update_xaxes(title="ranks", type="log", dtick=0.30103, row=1, col=1)
    figure.update_yaxes(type="log", row=1, col=1)
    figure.update_xaxes(title="ranks", type="category", row=1, col=2)
    figure.write_html(file, include_plotlyjs=WHOLE_PAGE)


def _curves(figure: Any, plan: Planned) -> None:
    ranks = [one.ranks for one in plan.points]
    alone = plan.planner.alone.rate
    figure.add_scatter(
        name="as many times one process", x=ranks, y=[alone * n for n in ranks], line={"dash": "dot"}, row=1, col=1
    )
    for kind in KINDS:
        steps = [(one.ranks, one.steps.get(kind)) for one in plan.points]
        found = [(n, one) for n, one in steps if isinstance(one, Step)]
        if found:
            figure.add_scatter(
                name=TITLES[kind],
                x=[n for n, _ in found],
                y=[one.rate for _, one in found],
                text=[str(one.way) for _, one in found],
                row=1,
                col=1,
            )


def _parts(figure: Any, plan: Planned) -> None:
    best = [(one.ranks, one.best) for one in plan.points if one.best is not None]
    for name, words in WORDS.items():
        values = [1e3 * one.parts.shares()[name] for _, one in best]
        if any(values):
            figure.add_bar(name=words, x=[str(n) for n, _ in best], y=values, row=1, col=2)
