"""``hf:NAME@REVISION`` - a dataset of the Hugging Face hub; or a directory or file that ``datasets`` reads.

REVISION is a commit, a branch or a tag. Without one, or with one that moves, the commit that it stands for
when the run begins is the run's: it is told to ``Reading``, and pinned by a resumed run.

Options follow a question mark: ``hf:allenai/peS2o?name=v2&split=train&field=text&take=20000&buffer=5000``.
The dataset is streamed through a shuffle buffer that the run's seed sets, and the first ``take`` documents
are kept: the same documents on every host and after a restart, and never more than that in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from engine.errors import ConfigError
from roles.designer.corpus import files
from roles.designer.corpus.document import WHERE, Document, Reading

_OPTIONS = {"name": "", "split": "train", "field": "", "id": "", "take": "10000", "buffer": "1000"}
_ASK_SECONDS = 20.0
_FILES = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".txt": "text"}


def read(argument: str, reading: Reading) -> Iterator[Document]:
    """Yield up to ``take`` documents of the shuffled stream. Raises ConfigError when it cannot be had."""
    place, options = _parse(argument)
    take, buffer = _whole("take", options), _whole("buffer", options)
    try:
        with _without_torch():
            stream = _open(place, options, reading).shuffle(seed=reading.seed, buffer_size=buffer)
            yield from islice(_documents(stream, place, options, reading), take)
    except ConfigError:
        raise
    except Exception as error:  # the hub's client raises a different one for each way of not being there
        raise _unreachable(place, error) from error


def _documents(
    rows: Iterable[dict[str, Any]], place: str, options: dict[str, str], reading: Reading
) -> Iterator[Document]:
    for number, row in enumerate(rows):
        found = _document(row, options, f"{Path(place).name}:{number}")
        if isinstance(found, str):
            reading.skip(f"hf:{place}, row {number} of the shuffled stream", found)
        else:
            yield found._replace(text=found.text[: reading.longest])


@contextmanager
def _without_torch() -> Iterator[None]:
    """Keep ``datasets`` from importing torch for the sake of data loaders: its process needs none."""
    try:
        from datasets import config
    except ImportError as error:
        raise ConfigError(
            "the corpus hf: needs the package datasets", where=WHERE, remedy="pip install datasets"
        ) from error
    before, config.TORCH_AVAILABLE = config.TORCH_AVAILABLE, False
    try:
        yield
    finally:
        config.TORCH_AVAILABLE = before


def _parse(argument: str) -> tuple[str, dict[str, str]]:
    place, _, query = argument.partition("?")
    given = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(given.keys() - _OPTIONS.keys())
    if unknown or not place:
        what = f"has no option {unknown[0]!r}" if unknown else "names no dataset"
        raise ConfigError(f"hf:{argument} {what}", where=WHERE, remedy=f"Options: {', '.join(_OPTIONS)}.")
    return place, {**_OPTIONS, **given}


def _whole(name: str, options: dict[str, str]) -> int:
    if not options[name].isdecimal() or int(options[name]) < 1:
        raise ConfigError(
            f"hf: option {name}={options[name]} must be a whole number, at least 1", where=WHERE
        )
    return int(options[name])


def _open(place: str, options: dict[str, str], reading: Reading) -> Any:
    import datasets

    path = Path(place).expanduser()
    if path.is_file():
        kind = _FILES.get(path.suffix.lower(), "text")
        return datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)
    arguments = {"name": options["name"] or None, "split": options["split"], "streaming": True}
    if path.is_dir():
        return datasets.load_dataset(str(path), **arguments)
    name, _, asked = place.partition("@")
    reading.revision = reading.pin or _commit(name, asked)
    return datasets.load_dataset(name, revision=reading.revision or None, **arguments)


def _commit(name: str, asked: str) -> str:
    """Return the commit that a revision of a dataset stands for, or it itself where the hub cannot tell."""
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(name, revision=asked or None, timeout=_ASK_SECONDS).sha or asked
    except Exception:  # as above; what is really wrong is said when the dataset is opened
        return asked


def _unreachable(place: str, error: Exception) -> ConfigError:
    line = next(iter(str(error).splitlines()), type(error).__name__)
    return ConfigError(
        f"the dataset hf:{place} cannot be read: {line}",
        where=WHERE,
        remedy="Without access to the hub, name a directory of parquet or JSON files (hf:PATH), "
        "or take documents that are here: pydoc:, dir:PATH, jsonl:PATH.",
    )


def _document(row: dict[str, Any], options: dict[str, str], place: str) -> Document | str:
    field, key = options["field"], options["id"]
    if not field:
        known: dict[str, Any] = {
            name: row[name] for name in ("orig_doc", "text", "id", "skill") if name in row
        }
        return files.document(known, place)
    text = row.get(field)
    if not isinstance(text, str) or not text.strip():
        return f"no text in {field}; the fields are {', '.join(row)}"
    return Document(str(row[key]) if key in row else place, text.strip())
