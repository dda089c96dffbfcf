"""Charts of the report: traces as dictionaries, a figure as a fragment of HTML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

BLUE, ORANGE, GREEN, RED, GREY = "#2563a8", "#d9822b", "#2e8b57", "#c0392b", "#8a8f98"
COLOURS = (BLUE, ORANGE, GREEN, RED)

Row = dict[str, Any]


def trace(points: Sequence[tuple[Any, float]], colour: str, name: str = "") -> list[Row]:
    """Return one line through ``points``, [] without points."""
    if not points:
        return []
    x, y = zip(*points, strict=True)
    return [{"x": list(x), "y": list(y), "name": name, "line": {"color": colour}, "mode": "lines"}]


def curves(
    title: str,
    rows: Sequence[Row],
    names: dict[str, str],
    span: tuple[float, float] | None = None,
    x: str = "round",
) -> str:
    """Draw columns of ``rows`` against their round; columns without values are left out."""
    traces = []
    for colour, (key, name) in zip(COLOURS, names.items(), strict=False):
        points = [(row["round"], row[key]) for row in rows if row.get(key) is not None]
        traces += trace(points, colour, name)
    return figure(title, traces, x, span)


def figure(title: str, traces: list[Row], x: str, span: tuple[float, float] | None = None) -> str:
    """Return a chart of ``traces`` over ``x``, y in ``span`` or from zero; "" without traces."""
    if not traces:
        return ""
    layout = {
        "height": 300,
        "xaxis": {"title": {"text": x}},
        "yaxis": {
            "range": [span[0], span[1]] if span else None,
            "rangemode": "tozero" if not span else "normal",
        },
        "showlegend": len(traces) > 1,
    }
    return drawn(title, traces, layout)


def drawn(title: str, traces: list[Row], layout: Row) -> str:
    """Return ``traces`` as HTML, with the common layout and ``layout`` over it."""
    import plotly.graph_objects as go

    chart = go.Figure([_plotted(go, values) for values in traces])
    chart.update_layout(
        title={"text": title, "font": {"size": 14}},
        template="plotly_white",
        margin={"l": 45, "r": 10, "t": 40, "b": 70},
        legend={"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0.0, "xanchor": "left"},
    )
    chart.update_layout(layout)
    convert: Callable[..., str] = chart.to_html
    return convert(
        include_plotlyjs=False, full_html=False, config={"displayModeBar": False, "responsive": True}
    )


def _plotted(go: Any, values: Row) -> Any:
    """Return one trace as plotly's object; ``type`` "bar" makes bars of it."""
    if values.get("type") != "bar":
        return go.Scatter(**values)
    return go.Bar(
        x=values["x"], y=values["y"], name=values["name"], marker={"color": values["line"]["color"]}
    )
