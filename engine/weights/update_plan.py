"""Which files bring a server from what it holds to a version: pure."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from bus.messages import PolicyPublished, WeightDelta


@dataclass(frozen=True)
class Route:
    """First the whole file at ``uri`` with the SHA-256 ``start`` (none with an empty ``uri``: what is held is
    the start), then ``deltas``, lead to the weights with ``sha256``, whose whole file has ``size`` bytes.
    """

    uri: str
    start: str
    sha256: str
    size: int
    deltas: tuple[WeightDelta, ...] = ()

    @property
    def bytes(self) -> int:
        """What has to be read."""
        return (self.size if self.uri else 0) + sum(delta.size for delta in self.deltas)

    def info(self, *, check_only: bool, hold: bool) -> dict[str, object]:
        """Return vLLM's ``update_info`` for our weight-transfer engine."""
        return {
            "uri": self.uri,
            "start": self.start,
            "sha256": self.sha256,
            "size": self.size,
            "deltas": [msgspec.structs.asdict(delta) for delta in self.deltas],
            "check_only": check_only,
            "hold": hold,
        }


def routes(policy: PolicyPublished, held: str) -> list[Route]:
    """Return the ways to ``policy`` for who holds the weights with the SHA-256 ``held`` ("" for none), the
    best first; later ones are for when an earlier one turns out to be damaged.

    Deltas are taken where their base is held and they are smaller than the whole way.
    """
    start = policy.start or policy.sha256
    chain = policy.deltas if policy.start else ()
    whole = Route(policy.uri, start, policy.sha256, policy.size, chain)
    if held and held == policy.sha256:
        return [Route("", held, policy.sha256, policy.size), whole]
    for index, delta in enumerate(policy.deltas):
        if delta.base == held:
            short = Route("", held, policy.sha256, policy.size, policy.deltas[index:])
            return [short, whole] if short.bytes < whole.bytes else [whole]
    return [whole]
