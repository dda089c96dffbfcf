"""Example messages, derived from the types so that no kind is forgotten."""

from __future__ import annotations

from typing import Any

from msgspec import inspect as look

from bus.messages import DesignTicket, EpisodeRequest, Message, RoundSummary, registered

# The kinds of the package; test modules register others.
KINDS = {tag: kind for tag, kind in registered().items() if kind.__module__.startswith("bus.")}


def ticket(number: int, *, skill: str = "Spatial Reasoning") -> DesignTicket:
    """Return work for a designer."""
    return DesignTicket(
        design=f"d{number}",
        cohort=0,
        slot=number,
        skill=skill,
        seed=number,
        attempts=3,
        target=0.5,
        round=1,
    )


def request(number: int) -> EpisodeRequest:
    """Return work for an agent."""
    return example(EpisodeRequest, episode=f"e{number}", index=number)


def summary(number: int) -> RoundSummary:
    """Return a fact on ``event.scorer.round``."""
    return example(RoundSummary, round=number)


def example(kind: type[Message], **given: Any) -> Any:
    """Return a message of ``kind`` with fixed values in all required fields and ``given`` on top."""
    described = look.type_info(kind)
    assert isinstance(described, look.StructType)
    values = {
        field.name: _value(field.type, field.name, position)
        for position, field in enumerate(described.fields)
        if field.required
    }
    return kind(**{**values, **given})


def _value(kind: look.Type, name: str, position: int) -> Any:
    match kind:
        case look.StrType():
            return f"{name}-{position}"
        case look.BytesType():
            return bytes([position + 1, 0, 0, 0])
        case look.BoolType():
            return position % 2 == 0
        case look.IntType():
            return position + 1
        case look.FloatType():
            return position + 0.25
        case look.LiteralType():
            return kind.values[0]
        case look.VarTupleType():
            return (_value(kind.item_type, name, position),)
        case look.TupleType():
            return tuple(_value(item, name, position) for item in kind.item_types)
        case look.DictType():
            return {"one": _value(kind.value_type, name, position)}
        case look.UnionType():
            real = [item for item in kind.types if not isinstance(item, look.NoneType)]
            return _value(real[0], name, position)
        case look.StructType():
            return kind.cls(
                **{
                    field.name: _value(field.type, field.name, index)
                    for index, field in enumerate(kind.fields)
                    if field.required
                }
            )
    raise AssertionError(f"no example for {kind}")
