"""``spade credit``: compares the designer's advantages with expected ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

_SHOWN = 50


def credit(
    parity: Annotated[Path, typer.Option(help="Cases with expected advantages (JSONL).", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Print equal ones, too.")] = False,
) -> None:
    """Compare the designer's advantages in reference mode with expected ones.

    Status 1 when one differs by more than 1e-9.
    """
    found = _check(parity)
    wrong = [one for one in found if not one.equal]
    worst = max(
        (
            abs(one.ours - one.expected)
            for one in found
            if not isinstance(one.ours, str | type(None)) and not isinstance(one.expected, str)
        ),
        default=0.0,
    )
    cases = len({one.case for one in found})
    if as_json:
        import msgspec

        figures = {
            "cases": cases,
            "compared": len(found),
            "different": len(wrong),
            "largest_difference": worst,
            "differences": [msgspec.to_builtins(one) for one in (found if everything else wrong)],
        }
        print(msgspec.json.encode(figures).decode())
    else:
        for one in (found if everything else wrong)[:_SHOWN]:
            mark = "equal" if one.equal else "differs"
            print(f"{one.case}  {one.variant}  {one.environment}  {one.ours}  {one.expected}  {mark}")
        print(
            f"{cases:,} cases, {len(found):,} advantages compared, {len(wrong):,} differ; "
            f"largest difference {worst:.3g}"
        )
    raise typer.Exit(1 if wrong else 0)


def _check(path: Path) -> list[Any]:
    """Run the scorer's check, found by its entry point, because the engine imports no roles."""
    from importlib.metadata import entry_points

    from engine.errors import SpadeError

    for point in entry_points(group="spade.credit", name="parity"):
        return list(point.load()(path))
    raise SpadeError(
        "No installed scorer compares credit.", remedy="Run `make setup`, or install spade again."
    )
