"""The supervised examples: read with care, drawn by seed and step."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from learner_fakes import random_samples, sample, segment

from engine.errors import ConfigError
from engine.training.samples import CreditedSample
from engine.training.supervised import FILE, Accepted, DesignArchive, draw, load


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


def design(name: str, *, reward: float = 0.4, accepted: bool = True) -> CreditedSample:
    number = int(name)
    part = segment([7, number, number + 1], [0, 1, 1])
    return sample(name, role="designer", segments=[part], reward=reward, accepted=accepted)


def texts(archive: DesignArchive) -> list[list[int]]:
    return [example.tokens.tolist() for example in archive.examples()]


def test_the_archive_keeps_the_newest_accepted_designs():
    archive = DesignArchive(capacity=2, floor=0.0)
    archive.note([design("1"), *random_samples(3, seed=1), design("3", accepted=False)])
    archive.note([design("5"), design("9", reward=0.0)])
    assert texts(archive) == [[7, 1, 2], [7, 5, 6]]
    archive.note([design("11")])
    assert texts(archive) == [[7, 5, 6], [7, 11, 12]]
    assert archive.examples()[0].mask.tolist() == [False, True, True]


def test_the_archive_goes_on_from_a_checkpoint():
    archive = DesignArchive(capacity=4, floor=0.0)
    archive.note([design("1"), design("2")])
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(archive.state()), type=tuple[Accepted, ...])
    again = DesignArchive(capacity=4, floor=0.0, state=kept)
    for one in (archive, again):
        one.note([design("3")])
    assert texts(again) == texts(archive) == [[7, 1, 2], [7, 2, 3], [7, 3, 4]]
    assert texts(DesignArchive(capacity=1, floor=0.0, state=kept)) == [[7, 2, 3]]
