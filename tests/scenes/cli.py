"""The command ``spade`` in the test's process: arguments in, exit status and output out."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engine import cli


class Result(NamedTuple):
    """The end of one command."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def records(self) -> list[dict[str, Any]]:
        """The JSON objects that were printed, one per line."""
        return [json.loads(line) for line in self.stdout.splitlines()]


Spade = Callable[..., Result]


@pytest.fixture
def spade(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Spade]:
    """Call the command in an empty directory; ``stdin`` comes through a pipe."""
    monkeypatch.chdir(tmp_path)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])

    def call(*arguments: object, stdin: str = "") -> Result:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["spade", *map(str, arguments)])
        ours, theirs = os.pipe()
        os.write(theirs, stdin.encode())
        os.close(theirs)
        with os.fdopen(ours) as piped:
            monkeypatch.setattr(sys, "stdin", piped)
            with pytest.raises(SystemExit) as caught:
                cli.main()
        printed = capsys.readouterr()
        return Result(int(caught.value.code or 0), printed.out, printed.err)

    yield call
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def refused(result: Result, *parts: str, code: int = 2) -> None:
    """Assert that the command failed with one paragraph that has all of ``parts``, and no trace."""
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    for part in parts:
        assert part in result.stderr
