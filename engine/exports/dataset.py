"""Environments of a run as a data set: JSONL and Parquet with the same rows, and a card."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet

from engine.errors import SpadeError
from engine.records.envs import Catalogue, EnvironmentRecord, empty

JSONL, PARQUET, CARD = "environments.jsonl", "environments.parquet", "README.md"


def write(catalogue: Catalogue, entries: Sequence[EnvironmentRecord], directory: Path, run: str) -> int:
    """Write one row per design into ``directory``; return their number.

    A row has the fields of :class:`EnvironmentRecord`, ``source``, ``hint``, and ``episodes``: the recorded
    plays of both arms with their turns. Raises ConfigError when the directory is not empty, SpadeError when
    it cannot be written.
    """
    rows = [_row(catalogue, entry) for entry in entries]
    try:
        empty(directory)
        with (directory / JSONL).open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), directory / PARQUET)
        (directory / CARD).write_text(card(entries, run), encoding="utf-8")
    except OSError as error:
        raise SpadeError(
            f"The data set cannot be written into {directory}: {error.strerror}.",
            remedy="Name a directory that can be written, on a disk with room.",
        ) from error
    return len(rows)


def _row(catalogue: Catalogue, entry: EnvironmentRecord) -> dict[str, Any]:
    program = catalogue.program(entry)
    episodes = [
        {
            "arm": play["arm"],
            "return": float(play["returned"]),
            "turns": [
                {"observation": saw, "reply": said, "action": did, "reward": float(reward)}
                for saw, said, did, reward in play["turns"]
            ],
        }
        for play in catalogue.plays(entry)
    ]
    fields: dict[str, Any] = msgspec.to_builtins(entry)
    return fields | {"source": program.source, "hint": program.hint, "episodes": episodes}


def card(entries: Sequence[EnvironmentRecord], run: str) -> str:
    """Return the card of the data set."""
    skills = sorted({one.skill for one in entries})
    return f"""---
configs:
- config_name: default
  data_files: {PARQUET}
tags: [reinforcement-learning, environments, self-play, spade]
---

# Environments of {run}

{len(entries):,} environments that a language model designed in a self-play run
([SPADE](https://arxiv.org/abs/2608.19197)), each a Python program with `reset(seed)` and
`step(action)`, a hint, and recorded episodes without the hint (`plain`) and with it (`hinted`).
`{JSONL}` has the rows of `{PARQUET}`.

Skills: {", ".join(skills)}.

- `win`, `regret`, `reward`: win rate without the hint, hinted minus plain return, reward of the designer;
  `_low` and `_high` are 95 % intervals.
  They are null until the environment's window has closed (`state` is `open`).
- `state`, `flag`: judgement of the run; `degenerate` programs can be won without looking.
- `document`: the document that the design was written from.

A model wrote the programs: run them in a sandbox only.
"""
