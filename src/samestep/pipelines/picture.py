"""Steps of a pipeline as pictures: who computes what when, and where the time went; a page, or an image."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from samestep.errors import UsageError
from samestep.pipelines.lanes import AXIS_TITLE, COLOURS, PART_COLOURS, PARTS_TITLE, ROW, boxes, title
from samestep.pipelines.png import draw_png
from samestep.schedule.simulate import Timeline

__all__: list[str] = []

NEEDS = {".html": "plotly", ".png": "Pillow"}  # by the kind of file
_MODULES = {"plotly": "plotly", "Pillow": "PIL"}


def draw(timelines: Mapping[str, Timeline], parts: Mapping[str, float], file: Path) -> None:
    """Writes a page or an image, as the name of the file ends.

    Args:
        timelines: title -> a step; drawn one below the other, on one scale.
        parts: seconds of a step by what they went to; drawn at the foot, if there are any.
        file: where; ".html", a page that needs no network, or ".png".

    Raises:
        UsageError: the name ends otherwise, or plotly, for a page, or Pillow, for an image, is not installed.
    """
    needed = NEEDS.get(file.suffix.lower())
    if needed is None:
        raise UsageError(f"a picture is a page or an image: {file.name} must end in .html or .png")
    if find_spec(_MODULES[needed]) is None:
        raise UsageError(f"a picture needs {needed}: pip install 'samestep[report]'")
    if needed == "Pillow":
        draw_png(timelines, parts, file)
    else:
        _draw_page(timelines, parts, file)


def _draw_page(timelines: Mapping[str, Timeline], parts: Mapping[str, float], file: Path) -> None:
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    titles = [title(name, each) for name, each in timelines.items()]
    heights = [ROW * each.plan.ranks for each in timelines.values()] + ([ROW] if parts else [])
    figure = make_subplots(
        rows=len(heights),
        cols=1,
        shared_xaxes=True,
        subplot_titles=titles + ([PARTS_TITLE] if parts else []),
        row_heights=heights,
        vertical_spacing=min(0.2, 60 / sum(heights)),
    )
    shown: set[str] = set()
    for row, timeline in enumerate(timelines.values(), 1):
        for kind, (name, colour) in COLOURS.items():
            spans = boxes(timeline, kind)
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
                marker={"color": PART_COLOURS[place % len(PART_COLOURS)]},
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
    figure.update_xaxes(title=AXIS_TITLE, row=len(heights), col=1)
    figure.write_html(file, include_plotlyjs=True)
