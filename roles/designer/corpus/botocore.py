"""``botocore:`` - the documentation of web services, one document an operation.

``botocore:sqs,s3`` names services, ``botocore:`` reads a handful of well-known ones. The descriptions are
data files of the package ``botocore``; nothing of it is imported and nothing is called.
"""

from __future__ import annotations

import gzip
import html
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ConfigError
from roles.designer.corpus.document import WHERE, Document, Reading, listed

_USUAL = ("dynamodb", "ec2", "events", "glue", "iam", "kms", "lambda", "route53", "s3", "sns", "sqs", "ssm")
_MODELS = ("service-2.json", "service-2.json.gz")
_BREAK = re.compile(r"</?(?:p|li|ul|ol|note|important|dl|dt|dd|br|h\d)[^>]*>")
_TAG = re.compile(r"<[^>]+>")
_SHORTEST = 200


def read(argument: str, reading: Reading) -> Iterator[Document]:
    """Yield the operations of the services named, newest version of each.

    Raises ConfigError for a service that is not there, or without the package.
    """
    root = _data()
    for service in listed(argument) or _USUAL:
        yield from _service(service, _newest(root, service), reading)


def _data() -> Path:
    found = importlib.util.find_spec("botocore")
    places = found.submodule_search_locations if found else None
    if not places:
        raise ConfigError(
            "the corpus botocore: needs the package botocore, which is not installed",
            where=WHERE,
            remedy="pip install 'spade-selfplay[corpora]'",
        )
    return Path(places[0]) / "data"


def _newest(root: Path, service: str) -> Path:
    for version in sorted((root / service).glob("*/"), reverse=True):
        for name in _MODELS:
            if (version / name).is_file():
                return version / name
    known = sorted(path.name for path in root.glob("*/"))
    near = [name for name in known if name.startswith(service[:2])][:12] or known[:12]
    raise ConfigError(
        f"botocore has no service {service!r}", where=WHERE, remedy=f"Some of its names: {', '.join(near)}."
    )


def _service(service: str, path: Path, reading: Reading) -> Iterator[Document]:
    raw = path.read_bytes()
    model = msgspec.json.decode(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    title = model["metadata"].get("serviceFullName", service)
    for name, operation in sorted(model["operations"].items()):
        text = _operation(name, operation, model["shapes"])
        if len(text) >= _SHORTEST:
            yield Document(f"{service}.{name}", f"{title}: {name}\n\n{text}"[: reading.longest])
        else:
            reading.skip(f"{service}.{name}", "hardly documented")


def _operation(name: str, operation: dict[str, Any], shapes: dict[str, Any]) -> str:
    parts = [plain(operation.get("documentation", ""))]
    for key, heading in (("input", "Parameters"), ("output", "Returns")):
        if key in operation:
            lines = _members(shapes[operation[key]["shape"]], shapes)
            parts += [f"{heading}:", *lines] if lines else []
    errors = [error["shape"] for error in operation.get("errors", ())]
    lines = [f"- {error}: {_line(shapes[error].get('documentation', ''))}".rstrip(": ") for error in errors]
    parts += ["Errors:", *lines] if lines else []
    return "\n".join(part for part in parts if part)


def _members(shape: dict[str, Any], shapes: dict[str, Any]) -> list[str]:
    required = set(shape.get("required", ()))
    lines = []
    for name, member in shape.get("members", {}).items():
        inner = shapes[member["shape"]]
        allowed = f", one of {', '.join(inner['enum'][:20])}" if "enum" in inner else ""
        marks = f"{inner['type']}{', required' if name in required else ''}{allowed}"
        text = _line(member.get("documentation", inner.get("documentation", "")))
        lines.append(f"- {name} ({marks}): {text}".rstrip(": "))
    return lines


def _line(text: str) -> str:
    return " ".join(plain(text).split())


def plain(text: str) -> str:
    """Return the text of a piece of HTML, its paragraphs as lines."""
    lines = _TAG.sub("", _BREAK.sub("\0", text)).replace("\n", " ").split("\0")
    return "\n".join(html.unescape(" ".join(line.split())) for line in lines if line.strip())
