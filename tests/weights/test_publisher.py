"""The learner's announcements, its versions on disk and bus, and the content of a server's cache."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from scenes.memory_bus import MemoryBus

from bus.messages import PolicyPublished
from engine.config import Config, ModelConfig, RunConfig, ServerConfig
from engine.lineage import Version
from engine.weights import store, ways
from engine.weights.loaders import BusLoader, FetchFailed, FileLoader, UpdateRefused
from engine.weights.publisher import FilePublisher
from engine.weights.store import Release

torch = pytest.importorskip("torch")


def announced(version: int, release: Release) -> PolicyPublished:
    return PolicyPublished(
        version=version,
        step=version,
        uri=release.uri,
        sha256=release.sha256,
        size=release.size,
        canary_tokens=b"",
        canary_logprobs=b"",
    )


def test_files_of_the_newest_versions_stay(tmp_path: Path) -> None:
    publisher = FilePublisher(tmp_path)
    for step in range(4):
        release = publisher.release(Version(0, step), {"a": torch.full((3,), float(step))})
        assert (release.name, release.sha256) == ("", store.file_digest(store.local_path(release.uri)))
    assert store.versions(tmp_path) == [Version(0, 1), Version(0, 2), Version(0, 3)]


class Hosts:
    """A learner and a server on two hosts that share nothing but the bus."""

    def __init__(self, directory: Path, keep: int = 3) -> None:
        self.bus = MemoryBus(run="t", role="learner", instance="learner-0")
        self.publisher = FilePublisher(directory / "learner", bus=True, keep=keep)
        self.cache = directory / "server"
        self.loader = BusLoader(self.bus.peer("server", "server-0").blobs, self.cache)
        self.step = 0

    async def publish(self) -> PolicyPublished:
        weights = {"a": torch.full((64,), float(self.step))}
        release = self.publisher.release(Version(0, self.step), weights)
        await self.publisher.upload(self.bus.blobs, release)
        await self.publisher.tidy(self.bus.blobs)
        self.step += 1
        return announced(self.step - 1, release)

    async def stored(self) -> set[str]:
        names = [f"weights.whole.0-{step}" for step in (*range(10), *range(100, 110))]
        return {name for name in names if await self.bus.blobs.info(name) is not None}

    async def fetch(self, policy: PolicyPublished) -> Path:
        return await self.loader._fetch(policy, None)


async def test_the_bus_keeps_the_newest_versions_and_a_cache_two(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, keep=3)
    for step in range(6):
        policy = await hosts.publish()
        file = await hosts.fetch(policy)
        assert store.file_digest(file) == policy.sha256
        assert len(list(hosts.cache.iterdir())) == min(2, step + 1)
        assert await hosts.stored() == {f"weights.whole.0-{one}" for one in range(max(0, step - 2), step + 1)}


async def test_versions_of_a_killed_learner_stay_until_newer_ones_replace_them(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path)
    for _ in range(3):
        await hosts.publish()
    old = await hosts.stored()
    hosts.publisher, hosts.step = FilePublisher(tmp_path / "again", bus=True), 100
    await hosts.publish()
    assert len(old & await hosts.stored()) == 2
    for _ in range(2):
        await hosts.publish()
    assert not old & await hosts.stored()


async def test_a_version_that_is_published_again_is_there_once(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path)
    for _ in range(2):
        hosts.step = 7
        policy = await hosts.publish()
    assert await hosts.stored() == {"weights.whole.0-7"}
    assert store.file_digest(await hosts.fetch(policy)) == policy.sha256


async def test_a_fetch_that_fails_or_is_cancelled_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Hosts(tmp_path)
    policy = await hosts.publish()
    blobs = hosts.loader._blobs

    async def cut(name: str, path: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(blobs, "save", cut)
        with pytest.raises(FetchFailed, match="No space left"):
            await hosts.fetch(policy)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await hosts.fetch(policy)
    assert not list(hosts.cache.iterdir())
    assert store.file_digest(await hosts.fetch(policy)) == policy.sha256


async def test_other_bytes_and_missing_ones_are_refused(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path)
    policy = await hosts.publish()
    await hosts.bus.blobs.put(policy.uri.removeprefix("bus:"), b"other")
    with pytest.raises(UpdateRefused, match=r".* were published"):
        await hosts.fetch(policy)
    await hosts.bus.blobs.remove(policy.uri.removeprefix("bus:"))
    with pytest.raises(UpdateRefused, match="not on the bus"):
        await hosts.fetch(policy)


async def test_the_servers_of_a_role_share_one_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = announced(0, FilePublisher(tmp_path).release(Version(0, 0), {"a": torch.ones(3)}))
    loader, digests, original = FileLoader(), [], store.file_digest

    def counted(path: Path) -> str:
        digests.append(path)
        return original(path)

    monkeypatch.setattr(store, "file_digest", counted)
    first, second = await loader._fetch(policy, None), await loader._fetch(policy, None)
    assert first == second
    assert len(digests) == 1
    content = first.read_bytes()
    first.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UpdateRefused, match="SHA-256"):
        await loader._fetch(policy, None)


def test_the_guide_names_every_way() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "weights.md").read_text()
    for name in ways.WAYS:
        assert f"| `{name}`" in guide
    server = ServerConfig(weights="pigeon")
    unknown = Config(run=RunConfig(name="t"), model=ModelConfig(path="x"), server=server)
    ((key, problem),) = ways.check(unknown)
    assert key == "server.weights"
    assert all(f'"{name}"' in problem for name in ways.WAYS)
