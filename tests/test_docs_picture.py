"""The picture of the architecture is the one that its script draws."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"


def test_the_picture_is_up_to_date() -> None:
    script = runpy.run_path(str(DOCS / "draw_architecture.py"))
    assert (DOCS / "architecture.svg").read_text() == script["draw"](), "run python docs/draw_architecture.py"
