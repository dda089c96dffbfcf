"""The supervised examples: read with care, drawn by seed and step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.training.supervised import FILE, draw, load


def write(directory: Path, *records: object) -> Path:
    (directory / FILE).write_text("\n".join(json.dumps(record) for record in records))
    return directory


def test_examples_without_anything_to_learn_are_left_out(tmp_path: Path):
    found = load(
        write(
            tmp_path,
            {"tokens": [1, 2, 3], "mask": [1, 0, 1]},
            {"tokens": [1, 2], "mask": [1, 0]},
            {"tokens": [4, 5], "mask": [0, 1]},
        )
    )
    assert [example.tokens.tolist() for example in found] == [[1, 2, 3], [4, 5]]
    assert found[0].mask.tolist() == [False, False, True]


@pytest.mark.parametrize(
    "record", [{"tokens": [1, 2]}, {"tokens": [1, 2], "mask": [1]}, {"tokens": "x", "mask": [1]}, [1]]
)
def test_a_bad_line_is_named(record: object, tmp_path: Path):
    with pytest.raises(ConfigError, match=rf"{FILE}:2"):
        load(write(tmp_path, {"tokens": [1, 2], "mask": [0, 1]}, record))


def test_a_missing_or_empty_file_is_a_config_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="no examples"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="no examples"):
        load(write(tmp_path))


def test_the_draw_depends_on_seed_and_step_only(tmp_path: Path):
    examples = load(write(tmp_path, *({"tokens": [0, index], "mask": [0, 1]} for index in range(40))))
    first = draw(examples, 8, seed=1, step=5)
    assert len({int(example.tokens[1]) for example in first}) == 8
    again, later = draw(examples, 8, seed=1, step=5), draw(examples, 8, seed=1, step=6)
    assert [id(one) for one in first] == [id(one) for one in again]
    assert [id(one) for one in first] != [id(one) for one in later]
    assert len(draw(examples, 99, seed=1, step=0)) == 40
