"""Steps of a pipeline as pictures: who computes what when, and where the time went, in a page that needs no network."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from samestep.errors import UsageError
from samestep.schedule.simulate import Timeline

__all__: list[str] = []

COLOURS = {  # told apart by the colour-blind too: Okabe and Ito
    "F": ("forward", "#56B4E9"),
    "B": ("backward", "#E69F00"),
    "I": ("backward, inputs", "#E69F00"),
    "W": ("backward, weights", "#009E73"),
    "message": ("message", "#999999"),
}
ROW = 46  # pixels of a rank


def draw(timelines: Mapping[str, Timeline], parts: Mapping[str, float], file: Path) -> None:
    """Writes the page.

    Args:
        timelines: title -> a step; drawn one below the other, on one scale.
        parts: seconds of a step by what they went to; drawn at the foot, if there are any.
        file: where.

    Raises:
        UsageError: plotly is not installed.
    """
    if find_spec("plotly") is None:
        raise UsageError("a picture needs plotly: pip install 'samestep[report]'")
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    titles = [f"{name}: {1e3 * each.seconds:.2f} ms, {100 * each.idle:.0f} % idle" for name, each in timelines.items()]
    heights = [ROW * each.plan.ranks for each in timelines.values()] + ([ROW] if parts else [])
    figure = make_subplots(
        rows=len(heights),
        cols=1,
        shared_xaxes=True,
        subplot_titles=titles + (["where a step's time goes"] if parts else []),
        row_heights=heights,
        vertical_spacing=min(0.2, 60 / sum(heights)),
    )
    shown: set[str] = set()
    for row, timeline in enumerate(timelines.values(), 1):
        for kind, (name, colour) in COLOURS.items():
            spans = [
                span
                for span in timeline.spans
                if kind == ("message" if span.target is not None else span.action.kind) and span.end > span.begin
            ]
            if not spans:
                continue
            message = kind == "message"
            figure.add_trace(
                graph_objects.Bar(
                    name=name,
                    legendgroup=name,
                    showlegend=name not in shown,
                    orientation="h",
                    base=[1e3 * span.begin for span in spans],
                    x=[1e3 * (span.end - span.begin) for span in spans],
                    y=[f"rank {span.rank}" for span in spans],
                    text=[str(span.action.micro_batch) for span in spans],
                    textposition="inside",
                    insidetextanchor="middle",
                    textangle=0,
                    constraintext="none",
                    customdata=[[str(span.action), 1e3 * (span.end - span.begin)] for span in spans],
                    hovertemplate="%{customdata[0]}: %{customdata[1]:.3f} ms from %{base:.3f} ms<extra></extra>",
                    marker={"color": colour, "line": {"color": "white", "width": 1}},
                    width=0.18 if message else 0.7,
                    offset=-0.5 if message else -0.35,
                ),
                row=row,
                col=1,
            )
            shown.add(name)
        figure.update_yaxes(autorange="reversed", row=row, col=1)
    for place, (name, seconds) in enumerate(parts.items()):
        before = sum(list(parts.values())[:place])
        figure.add_trace(
            graph_objects.Bar(
                name=name,
                showlegend=False,
                orientation="h",
                base=[1e3 * before],
                x=[1e3 * seconds],
                y=["a step"],
                text=[name],
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                hovertemplate=f"{name}: {1e3 * seconds:.3f} ms<extra></extra>",
                marker={"color": ["#0072B2", "#F0E442", "#CC79A7", "#999999", "#D55E00"][place % 5]},
            ),
            row=len(heights),
            col=1,
        )
    figure.update_layout(
        barmode="overlay",
        template="plotly_white",
        height=sum(heights) + 80 * len(heights) + 60,
        legend={"orientation": "h", "y": -0.12},
    )
    figure.update_xaxes(title="ms from the step's begin", row=len(heights), col=1)
    figure.write_html(file, include_plotlyjs=True)
