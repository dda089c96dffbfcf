"""A stored message for people (one line) and for programs (one JSON object). Pure.

Messages are taken apart without their types, so that kinds this build does not know can be read as well;
what is no message at all is shown as such.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from bus import codec
from bus.errors import Undecodable
from bus.reads import Stored
from engine.busview import words
from engine.lineage import Version

ARRAYS: Mapping[str, tuple[str, int]] = {
    "tokens": ("int32", 4),
    "mask": ("uint8", 1),
    "logprobs": ("float32", 4),
    "canary_tokens": ("int32", 4),
    "canary_logprobs": ("float32", 4),
}
"""Fields that carry arrays as bytes: element type and bytes an element."""

MAIN: Mapping[str, str] = {
    "design_ticket": "design cohort slot skill round attempts target",
    "held_design": "design cohort attempt skill valid segments",
    "design_rejected": "design attempt skill rung reason",
    "design_failed": "design skill failure attempts reason",
    "environment_ready": "design cohort skill title difficulty trivial_win_rate hint",
    "episode_request": "episode design arm round index max_turns hint",
    "episode_finished": "episode arm round returned outcome failure turns seconds reason",
    "episode_failed": "episode arm round failure reason",
    "environment_scored": "design round state win hinted regret reward plays",
    "sample_ready": "role skill round reward advantage segments group",
    "round_closed": "round plays designs agent_samples designer_samples groups final",
    "round_summary": "round environments accepted rejected plain hinted in_band gradient_share failures",
    "batch_trained": "round step version agent_samples designer_samples dropped max_staleness seconds final",
    "policy_published": "version step size uri",
    "server_serving": "server version url canary_error seconds",
    "server_lost": "server reason",
    "evaluation_finished": "suite step version win stderr episodes seconds",
    "run_ordered": "command roles closing",
    "dead_letter": "source sequence subject attempts reason frame",
}
"""What a line shows of each kind, in this order; of other kinds it shows every field."""

_VERSIONS = ("version", "version_high")
_TEXT = 60
_REASON = 120


class View(msgspec.Struct, frozen=True, kw_only=True):
    """A message taken apart. ``error`` says why this build cannot use it, ``body`` is None when nothing
    of it can be read. ``time`` is when its author made it (when it was stored, if nobody can tell).
    """

    stream: str
    sequence: int
    tail: str
    id: str
    time: float
    kind: str
    role: str
    instance: str
    attempt: int
    size: int
    body: dict[str, Any] | None
    error: str | None

    def is_kind(self, wanted: str) -> bool:
        """Whether this is of ``wanted``, given with its version (``design_rejected.v1``) or without."""
        return self.kind == wanted or self.kind.partition(".")[0] == wanted


def view(stream: str, stored: Stored) -> View:
    """Take a stored message apart; never fails."""
    envelope, body, error = take_apart(stored.frame)
    return View(
        stream=stream,
        sequence=stored.sequence,
        tail=stored.tail,
        id=envelope.id if envelope else stored.id,
        time=envelope.ts / 1e9 if envelope else stored.at,
        kind=envelope.kind if envelope else "",
        role=envelope.role if envelope else "",
        instance=envelope.instance if envelope else "",
        attempt=envelope.attempt if envelope else 0,
        size=len(stored.frame),
        body=body,
        error=error,
    )


def take_apart(frame: bytes) -> tuple[codec.Envelope | None, dict[str, Any] | None, str | None]:
    """Return envelope, body and complaint of a frame, as far as each can be had."""
    error = None
    try:
        codec.decode(frame)
    except Undecodable as refused:
        error = refused.reason
    try:
        outer = msgspec.msgpack.decode(frame, type=codec.Frame)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None, None, error
    if outer.blob is not None:
        return outer.envelope, {"blob": outer.blob.id, "blob_bytes": outer.blob.size}, error
    try:
        body = msgspec.msgpack.decode(outer.body, type=dict[str, Any])
    except (msgspec.DecodeError, ValueError, RecursionError):
        return outer.envelope, None, error
    body.pop("kind", None)
    return outer.envelope, body, error


def record(view: View) -> dict[str, Any]:
    """Return a view as JSON types: bytes as ``{"bytes": n}``, with ``dtype`` and ``shape`` for arrays."""
    return {
        "stream": view.stream,
        "sequence": view.sequence,
        "tail": view.tail,
        "time": datetime.fromtimestamp(view.time, UTC).isoformat(timespec="milliseconds"),
        "id": view.id,
        "kind": view.kind,
        "role": view.role,
        "instance": view.instance,
        "attempt": view.attempt,
        "size": view.size,
        "body": None if view.body is None else _plain("", view.body),
        "error": view.error,
    }


def line(view: View, now: float, *, width: int = 0) -> str:
    """Return a view as one line: time, place, sender, kind, main fields. ``width`` 0 does not cut it."""
    sender = f"{view.role}/{view.instance}" if view.role else "?"
    head = [words.moment(view.time, now), f"{view.stream} {view.sequence}", sender, view.kind or view.tail]
    if view.error is not None:
        head.append(f"UNREADABLE ({words.cut(view.error, _TEXT)}), {words.size(view.size)}")
    text = words.plain("  ".join([*head, *fields(view)]))
    return f"{text[: width - 1]}…" if 0 < width < len(text) else text


def fields(view: View) -> list[str]:
    """Return ``name=value`` of the main fields, long texts cut, None left out."""
    body = view.body or {}
    names = MAIN.get(view.kind.partition(".")[0], "").split()
    if body.keys().isdisjoint(names):
        names = list(body)
    return [
        f"{name}={_short(name, body[name])}"
        for name in names
        if body.get(name) is not None and body[name] != ""
    ]


def _short(name: str, value: Any) -> str:
    if name in _VERSIONS and isinstance(value, int) and value >= 0:
        return str(Version.unpack(value))
    match value:
        case bool():
            return str(value).lower()
        case float():
            return f"{value:.4g}"
        case str():
            text = words.cut(value, _REASON if name == "reason" else _TEXT)
            return f'"{text}"' if " " in text else text
        case bytes():
            return words.size(len(value))
        case list():
            return str(len(value))
        case dict():
            inner = ",".join(f"{key}:{_short('', item)}" for key, item in list(value.items())[:8])
            return f"{{{words.cut(inner, _TEXT)}}}"
    return str(value)


def _plain(name: str, value: Any) -> Any:
    match value:
        case bytes():
            return _array(name, value)
        case dict():
            return {str(key): _plain(str(key), item) for key, item in value.items()}
        case list():
            return [_plain(name, item) for item in value]
        case None | bool() | int() | float() | str():
            return value
    return str(value)


def _array(name: str, value: bytes) -> dict[str, Any]:
    dtype, width = ARRAYS.get(name, ("", 1))
    if not dtype or len(value) % width:
        return {"bytes": len(value)}
    return {"bytes": len(value), "dtype": dtype, "shape": [len(value) // width]}
