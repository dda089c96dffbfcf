"""Errors of the bus, each with a remedy."""

from __future__ import annotations


class BusError(Exception):
    """A fault of the bus. ``remedy`` is advice for the user, empty without any."""

    def __init__(self, what: str, *, remedy: str = "") -> None:
        self.what, self.remedy = what, remedy
        super().__init__(f"{what}. {remedy}" if remedy else what)


class Conflict(BusError):
    """A compare-and-set failed: another client wrote the key since it was read."""


class Denied(BusError):
    """The server does not let us do this: ``action`` is ``publish`` or ``subscribe``, ``subject`` where."""

    def __init__(self, action: str, subject: str) -> None:
        self.action, self.subject = action, subject
        super().__init__(
            f"the broker does not allow us to {action} to {subject}",
            remedy="Was the key of another role given, or are the broker's allow-lists older?",
        )

    def concerns(self, subject: str) -> bool:
        """Return whether ``subject``, or one below it, was denied. The server writes it in lower case."""
        denied, ours = self.subject.lower(), subject.lower()
        return denied == ours or denied.startswith(f"{ours}.")


class NotFound(BusError):
    """No such message, stream or consumer."""


class Undecodable(BusError):
    """Bytes that are no message of ours, or one of a kind or version this build does not know.

    ``kind`` is the kind the envelope names, empty when even the envelope cannot be read.
    """

    def __init__(self, reason: str, *, kind: str = "") -> None:
        self.reason, self.kind = reason, kind
        super().__init__(f"undecodable message{f' of kind {kind}' if kind else ''}: {reason}")


class UnknownKind(Undecodable):
    """A whole message of a kind, or a version of it, that is not registered in this process."""

    def __init__(self, kind: str) -> None:
        super().__init__("unknown kind or version", kind=kind)


class BusUnavailable(BusError):
    """The broker did not answer: ``awaited`` names the missing answer, ``deadline`` the seconds given."""

    def __init__(self, awaited: str, deadline: float, *, remedy: str = "") -> None:
        self.awaited, self.deadline = awaited, deadline
        super().__init__(f"no {awaited} within {deadline:g} s", remedy=remedy)
