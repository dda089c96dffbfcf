"""Base class of messages, their registry, deterministic ids and subject tokens."""

from __future__ import annotations

import functools
import hashlib
import re
from typing import ClassVar, TypeVar

import msgspec

from bus.errors import BusError

_KIND = re.compile(r"[a-z][a-z0-9_]*\.v[1-9][0-9]*")


def stable_id(kind: str, *parts: object) -> str:
    """Return the id of a logical result: the same parts give the same id on every host.

    Returns ``kind`` and 24 hex digits of BLAKE2b over the parts.
    """
    text = "\x1f".join(str(part) for part in parts)
    return f"{kind}-{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}"


@functools.lru_cache(maxsize=4096)
def token(text: str) -> str:
    """Return ``text`` as one subject token: lower case, ``[a-z0-9_-]`` only."""
    return re.sub(r"[^a-z0-9_-]+", "-", text.lower()).strip("-") or "none"


class Message(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="kind"):
    """Base of all messages. ``stream`` names where they are stored ("" = not stored, sent at most once).

    ``key`` is the deterministic id of a message, ``tail`` its subject after ``spade.<run>.``. A kind gives
    the forms of both, in which ``{m.name}`` stands for a field, or overrides the properties. Messages are
    plain data without reference cycles, so the garbage collector does not track them.
    """

    stream: ClassVar[str] = "EVENT"
    key_form: ClassVar[str] = ""
    tail_form: ClassVar[str] = ""

    @property
    def key(self) -> str:
        """Return the deterministic id: two messages with one key are the same result."""
        return self.key_form.format(m=self)

    @property
    def tail(self) -> str:
        """Return the subject after the run, for example ``event.agent.finished``."""
        return self.tail_form.format(m=self)


M = TypeVar("M", bound=Message)
_registered: dict[str, type[Message]] = {}


def register_message(kind: type[M]) -> type[M]:
    """Make a message class known to this process: it can be published, and what is read is decoded as it.

    Used as a decorator. The class is a frozen Struct with a ``tag`` of the form ``name.v1``, unique among all
    kinds. Raises BusError otherwise.
    """
    tag = kind_of(kind)
    if not _KIND.fullmatch(tag):
        raise BusError(
            f"message class {kind.__name__} has the tag {tag!r}",
            remedy='Give it one of the form name.v1: class Counted(Message, ..., tag="counted.v1").',
        )
    known = _registered.get(tag)
    if known is not None and (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
        raise BusError(
            f"message kind {tag} is registered by {known.__module__}.{known.__qualname__}",
            remedy=f"Give {kind.__module__}.{kind.__qualname__} another tag.",
        )
    _registered[tag] = kind
    return kind


def kind_of(kind: type[Message]) -> str:
    """Return the tag of a message class, for example ``episode_finished.v1``."""
    return str(kind.__struct_config__.tag)


def registered() -> dict[str, type[Message]]:
    """Return all registered message classes by kind."""
    return dict(_registered)


def class_of(kind: str) -> type[Message] | None:
    """Return the class registered for a kind, None for an unknown one."""
    return _registered.get(kind)
