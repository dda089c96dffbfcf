"""The diversity part of a report: curves over rounds, figures by skill, a map of the environments."""

from __future__ import annotations

import html
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.diversity.measures import Vectors, WrittenEnvironment, sampled
from engine.diversity.similarity import HashedTfidf
from engine.records import diversity_log
from engine.views.charts import Row, curves, drawn

FEWEST_FOR_TSNE = 8
_DIMENSIONS = 30
_ITERATIONS = 500
_SYMBOLS = (
    "circle",
    "square",
    "diamond",
    "cross",
    "x",
    "triangle-up",
    "star",
    "pentagon",
    "hexagon",
    "bowtie",
)
_HOVER = """SELECT e.design, e.title, e.cohort, s.win, s.regret, s.state FROM environments e
LEFT JOIN scores s USING (design)"""

_FLAGS = """SELECT cohort, flag, COUNT(*) * 1.0 / SUM(COUNT(*)) OVER (PARTITION BY cohort)
FROM environments JOIN labels USING (design) GROUP BY cohort, flag ORDER BY cohort"""

Places = NDArray[np.float64]


def section(connection: sqlite3.Connection) -> Row:
    """Return the parts of the template: ``curves`` and ``picture`` as HTML, ``rows`` of figures by skill.

    Figures of the whole run are those of ``sampled`` (at most ``engine.diversity.measures.SAMPLE``) ``of``
    its environments. Raises sqlite3.Error.
    """
    with _one_thread():
        return _section(connection)


def _section(connection: sqlite3.Connection) -> Row:
    items = diversity_log.items(connection)
    chosen = sampled(items, [item.design for item in items])
    embedder = HashedTfidf()
    texts = diversity_log.sources(connection, [item.design for item in chosen])
    vectors, weighed = embedder.embed(texts), HashedTfidf(texts).embed(texts)
    places, method = _laid_out(chosen, vectors)
    return {
        "curves": [*_curves(diversity_log.rounds(connection)), *_flagged(connection)],
        "picture": _picture(connection, chosen, places, method) if chosen else None,
        "rows": diversity_log.overall(items, chosen, vectors, weighed, near=embedder.near),
        "near": embedder.near,
        "sampled": len(chosen),
        "of": len(items),
    }


def _one_thread() -> AbstractContextManager[object]:
    """Limit loaded numeric libraries to one thread; on a busy host more of them spin for minutes."""
    from threadpoolctl import threadpool_limits

    limits: AbstractContextManager[object] = threadpool_limits(limits=1)
    return limits


def layout(vectors: Vectors, *, seed: int = 0) -> tuple[Places, str]:
    """Return coordinates (N, 2) that put similar vectors (N, D) close together, and the method's name.

    The method is t-SNE (van der Maaten & Hinton 2008) for enough different vectors, else the two principal
    components. Equal vectors give equal coordinates in every call.
    """
    wide = _components(vectors, _DIMENSIONS)
    flat = len(wide) < FEWEST_FOR_TSNE or float(wide[:, 0].std()) < 1e-6
    if flat:
        return _padded(wide)[:, :2], "PCA"
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(wide) - 1) / 3)
    fit = TSNE(2, perplexity=perplexity, init="pca", random_state=seed, max_iter=_ITERATIONS, n_jobs=1)
    with _one_thread():
        return np.asarray(fit.fit_transform(_padded(wide)), np.float64), "t-SNE"


def _components(vectors: Vectors, count: int) -> Places:
    """Return the first ``count`` principal components of rows, or fewer."""
    rows = np.asarray(vectors, np.float64)
    if not len(rows):
        return np.zeros((0, 2))
    rows = rows - rows.mean(axis=0)
    values, directions = np.linalg.eigh(rows @ rows.T)
    kept = np.argsort(-values)[:count]
    # An eigenvector's sign is arbitrary: the largest entry is made positive.
    directions = directions[:, kept]
    signs = np.sign(directions[np.abs(directions).argmax(axis=0), np.arange(len(kept))])
    return np.asarray(directions * signs * np.sqrt(np.clip(values[kept], 0.0, None)), np.float64)


def _padded(wide: Places) -> Places:
    return np.pad(wide, ((0, 0), (0, max(0, 2 - wide.shape[1]))))


def _laid_out(chosen: Sequence[WrittenEnvironment], vectors: Vectors) -> tuple[Places, str]:
    """Lay out distinct programs; equal programs get the same coordinates."""
    first: dict[str, int] = {}
    for at, item in enumerate(chosen):
        first.setdefault(item.environment, at)
    places, method = layout(vectors[list(first.values())])
    row = {name: at for at, name in enumerate(first)}
    return places[[row[item.environment] for item in chosen]], method


def _curves(rounds: Sequence[Row]) -> list[Row]:
    varied = {"vendi": "programs (Vendi score)", "effective_skills": "skills"}
    repeated = {
        "duplicates": "equal in the round",
        "near_duplicates": "nearly equal",
        "repeats": "played before",
    }
    documents = {"documents": "in the round", "documents_so_far": "so far"}
    found = [
        curves("Effective number", rounds, varied),
        curves("Repeated programs (share)", rounds, repeated, (0, 1)),
        curves("Novelty of new programs (1 - cosine to the nearest)", rounds, {"novelty": "novelty"}),
        curves("Documents behind the environments", rounds, documents),
    ]
    return [one for one in found if one]


def _flagged(connection: sqlite3.Connection) -> list[Row]:
    """Draw the shares of designs that do not match their ticket."""
    rows: dict[int, Row] = {}
    flags: dict[str, str] = {}
    for cohort, flag, share in connection.execute(_FLAGS):
        row = rows.setdefault(cohort, {"round": cohort})
        if flag:
            row[flag], flags[flag] = share, flag.replace("_", " ")
    for row in rows.values():
        row.update({flag: 0.0 for flag in flags if flag not in row})
    found = curves("Designs that miss their ticket (share)", list(rows.values()), flags, (0, 1))
    return [found] if found else []


def _picture(
    connection: sqlite3.Connection, chosen: Sequence[WrittenEnvironment], places: Places, method: str
) -> Row:
    facts = {row[0]: tuple(row[1:]) for row in connection.execute(_HOVER)}
    skills = sorted({item.skill for item in chosen})
    traces = []
    for number, skill in enumerate(skills):
        at = [index for index, item in enumerate(chosen) if item.skill == skill]
        traces.append(
            {
                "x": [round(float(places[index, 0]), 3) for index in at],
                "y": [round(float(places[index, 1]), 3) for index in at],
                "mode": "markers",
                "name": html.escape(skill),
                "text": [_hover(chosen[index], facts) for index in at],
                "hoverinfo": "text",
                "marker": {
                    "symbol": _SYMBOLS[number % len(_SYMBOLS)],
                    "size": 7,
                    "opacity": 0.8,
                    "color": [facts[chosen[index].design][1] for index in at],
                    "coloraxis": "coloraxis",
                },
            }
        )
    hidden = {"showticklabels": False, "zeroline": False, "title": {"text": ""}}
    shape = {
        "height": 620,
        "xaxis": hidden,
        "yaxis": hidden,
        "hovermode": "closest",
        "coloraxis": {"colorscale": "Viridis", "colorbar": {"title": {"text": "step"}, "thickness": 12}},
        "legend": {"orientation": "h", "y": -0.02, "yanchor": "top", "x": 0, "xanchor": "left"},
    }
    return drawn(f"Environments ({method} of their programs), coloured by step", traces, shape)


def _hover(item: WrittenEnvironment, facts: Mapping[str, tuple[Any, ...]]) -> str:
    """Return the text of a point as chart markup; texts of models are escaped."""
    title, cohort, win, regret, state = facts[item.design]
    lines = [
        str(title or item.design),
        item.skill,
        f"step {cohort}, {item.environment[:8]}, {state or 'open'}",
        f"win rate {_number(win)}, regret {_number(regret)}",
        item.document,
    ]
    return "<br>".join(html.escape(line[:100]) for line in lines if line)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
