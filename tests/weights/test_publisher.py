"""What the learner announces and what lies on disk and bus for it: keyframes, chains, bounds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from scenes.memory_bus import MemoryBus

from bus.messages import PolicyPublished
from engine.lineage import Version
from engine.weights import buspath, store
from engine.weights.outcome import FetchFailed, UpdateRefused
from engine.weights.publisher import INDEX, Publisher, Release
from engine.weights.update_plan import Route, routes

torch = pytest.importorskip("torch")

from weight_files import Tensors, nudged, weights  # noqa: E402

from engine.weights.weight_buffer import Image  # noqa: E402


def announced(version: int, release: Release) -> PolicyPublished:
    return PolicyPublished(
        version=version,
        step=version,
        uri=release.uri,
        sha256=release.sha256,
        size=release.size,
        canary_tokens=b"",
        canary_logprobs=b"",
        start=release.start,
        deltas=release.deltas,
    )


def follow(image: Image, route: Route) -> None:
    """Do what a worker does."""
    if route.uri:
        image.read(route.uri, route.start, route.size)
    image.apply(route.deltas)
    assert image.digest == route.sha256


def run(publisher: Publisher, count: int, *, change: Callable[[Tensors, int], Tensors] | None = None) -> list:
    """Release ``count`` versions, each a small change of the one before."""
    state, found = weights(), []
    for step in range(count):
        found.append(publisher.release(Version(0, step), state))
        state = change(state, step) if change else nudged(state, seed=step)
    return found


def test_without_deltas_each_version_is_whole(tmp_path: Path) -> None:
    for release in run(Publisher(tmp_path), 4):
        assert (release.start, release.deltas, release.uploads) == ("", (), ())
    assert store.versions(tmp_path) == [Version(0, 1), Version(0, 2), Version(0, 3)]


def test_files_of_the_kept_versions_lead_on_from_each_of_them(tmp_path: Path) -> None:
    releases = run(Publisher(tmp_path, deltas=True, keyframe_every=10, keep=3), 6)
    last = releases[-1]
    assert [one.whole for one in last.deltas] == [one.sha256 for one in releases[3:]]
    image = Image()
    image.read(releases[3].uri, releases[3].sha256, releases[3].size)
    follow(image, routes(announced(5, last), releases[3].sha256)[0])
    assert sum(one.size for one in last.deltas) < last.size


def test_the_whole_goes_out_again_after_some_deltas(tmp_path: Path) -> None:
    releases = run(Publisher(tmp_path, bus=True, deltas=True, keyframe_every=3), 7)
    assert [len(release.deltas) for release in releases] == [0, 1, 2, 0, 1, 2, 0]
    assert [bool(release.start) for release in releases] == [False, True, True, False, True, True, False]
    assert [len(release.names) for release in releases] == [1, 2, 3, 1, 2, 3, 1]


def test_a_version_that_changed_everywhere_is_whole(tmp_path: Path) -> None:
    def change(state: Tensors, step: int) -> Tensors:
        return weights(step + 1) if step == 1 else nudged(state, seed=step)

    releases = run(Publisher(tmp_path, deltas=True), 4, change=change)
    assert [len(release.deltas) for release in releases] == [0, 1, 0, 1]
    assert not (tmp_path / "0-2" / "delta.safetensors").exists()


def test_a_chain_never_grows_as_large_as_the_whole(tmp_path: Path) -> None:
    def change(state: Tensors, step: int) -> Tensors:
        return nudged(state, seed=step, every=4)

    releases = run(Publisher(tmp_path, bus=True, deltas=True, keyframe_every=50), 8, change=change)
    assert any(not release.deltas for release in releases[1:])
    assert all(sum(one.size for one in release.deltas) < release.size for release in releases)


def test_other_shapes_start_anew(tmp_path: Path) -> None:
    def change(state: Tensors, step: int) -> Tensors:
        return {**nudged(state), "new": torch.ones(2)} if step == 0 else nudged(state)

    assert [len(one.deltas) for one in run(Publisher(tmp_path, deltas=True), 3, change=change)] == [0, 0, 1]


class Hosts:
    """A learner and a server on two hosts that share nothing but the bus."""

    def __init__(self, directory: Path, **settings) -> None:
        self.bus = MemoryBus(run="t", role="learner", instance="learner-0")
        self.publisher = Publisher(directory / "learner", bus=True, **settings)
        self.cache = directory / "server"
        self.path = self.server()
        self.state = weights()
        self.step = 0

    def server(self, *, hold: bool = True) -> buspath.BusPath:
        return buspath.BusPath(self.bus.peer("server", "server-0").blobs, self.cache, hold=hold)

    async def publish(self) -> PolicyPublished:
        release = self.publisher.release(Version(0, self.step), self.state)
        await self.publisher.upload(self.bus.blobs, release)
        await self.publisher.tidy(self.bus.blobs)
        policy = announced(self.step, release)
        self.state, self.step = nudged(self.state, seed=self.step), self.step + 1
        return policy

    async def there(self, policy: PolicyPublished) -> bool:
        names = {policy.uri.removeprefix("bus:"), *(one.uri.removeprefix("bus:") for one in policy.deltas)}
        return all([await self.bus.blobs.info(name) is not None for name in names])


async def test_a_server_that_was_there_takes_deltas_and_a_new_one_the_newest(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, deltas=True, keyframe_every=4)
    image = Image()
    for step in range(10):
        policy = await hosts.publish()
        (best, *_) = routes(policy, image.digest)
        assert bool(best.uri) == (step % 4 == 0)
        follow(image, await hosts.path.localise(best))
        newcomer = Image()
        follow(newcomer, await hosts.server().localise(routes(policy, "")[0]))
        assert newcomer.digest == image.digest == policy.sha256
        assert len(list(hosts.cache.iterdir())) <= 2 * 4


async def test_a_delta_is_all_that_moves(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, deltas=True)
    first, second = await hosts.publish(), await hosts.publish()
    await hosts.path.localise(routes(first, "")[0])
    before = hosts.path.fetched_bytes
    await hosts.path.localise(routes(second, first.sha256)[0])
    assert hosts.path.fetched_bytes - before == second.deltas[0].size < 0.5 * second.size


async def test_the_bus_keeps_what_leads_to_the_last_versions_and_no_more(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, deltas=True, keyframe_every=3, keep=3)
    policies = [await hosts.publish() for _ in range(12)]
    assert [await hosts.there(policy) for policy in policies[-3:]] == [True] * 3
    assert not any([await hosts.there(policy) for policy in policies[:6]])
    names = await _stored(hosts)
    assert len(names) <= 3 + 2 * 2
    await _new_learner_continues(hosts)


async def _new_learner_continues(hosts: Hosts) -> None:
    """What a learner that was killed left is kept until there is enough of the next one's, then removed."""
    old = await _stored(hosts)
    hosts.publisher = Publisher(hosts.cache.parent / "again", bus=True, deltas=True, keyframe_every=3)
    hosts.step = 100
    await hosts.publish()
    assert old & await _stored(hosts)
    for _ in range(4):
        await hosts.publish()
    assert not old & await _stored(hosts)


async def _stored(hosts: Hosts) -> set[str]:
    store_ = hosts.bus.blobs._store
    names = {tail.removeprefix("blob.name.") for tail in await store_.tails("blob.name.>")}
    return names - {INDEX}


async def test_what_cannot_be_fetched_may_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Hosts(tmp_path)
    policy = await hosts.publish()
    (route,) = routes(policy, "")
    blobs = hosts.path._blobs
    original = blobs.save

    async def cut(name: str, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(blobs, "save", cut)
    with pytest.raises(FetchFailed, match="No space left"):
        await hosts.path.localise(route)
    assert not list(hosts.cache.iterdir())
    monkeypatch.setattr(blobs, "save", original)
    follow(Image(), await hosts.path.localise(route))


async def test_a_fetch_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path)
    (route,) = routes(await hosts.publish(), "")
    with anyio.CancelScope() as scope:
        scope.cancel()
        await hosts.path.localise(route)
    assert not hosts.cache.exists() or not list(hosts.cache.iterdir())
    follow(Image(), await hosts.path.localise(route))


async def test_what_is_gone_or_something_else_is_refused(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path)
    (route,) = routes(await hosts.publish(), "")
    await hosts.bus.blobs.put(route.uri.removeprefix("bus:"), b"other")
    with pytest.raises(UpdateRefused, match="was published"):
        await hosts.path.localise(route)
    await hosts.bus.blobs.remove(route.uri.removeprefix("bus:"))
    with pytest.raises(UpdateRefused, match="not on the bus"):
        await hosts.path.localise(route)


async def test_a_damaged_file_in_the_cache_is_fetched_again(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path)
    (route,) = routes(await hosts.publish(), "")
    local = await hosts.path.localise(route)
    path = store.local_path(local.uri)
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    hosts.path.discard(route)
    follow(Image(), await hosts.path.localise(route))
