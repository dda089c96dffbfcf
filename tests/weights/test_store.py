"""Published weights: atomic, pruned, checked."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.lineage import Version
from engine.weights import store, tensor_file
from engine.weights.store import WeightFault, check, local_path, prune, publish, versions

torch = pytest.importorskip("torch")


def tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 4), value), "b.c": torch.arange(5, dtype=torch.int64)}


def load(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def test_what_is_published_passes_the_check(tmp_path: Path) -> None:
    published = publish(tmp_path, Version(3, 7), tensors(2.5))
    path = local_path(published.uri)
    check(path, published.sha256, published.size)
    assert path == tmp_path / "3-7" / "model.safetensors"
    found = load(path)
    assert torch.equal(found["a"], tensors(2.5)["a"])
    assert torch.equal(found["b.c"], tensors()["b.c"])
    assert [file.name for file in path.parent.iterdir()] == ["model.safetensors"]


def test_a_path_with_odd_characters_survives_the_uri(tmp_path: Path) -> None:
    published = publish(tmp_path / "a b%20#?ü", Version(0, 0), tensors())
    assert local_path(published.uri).is_file()


def test_tied_tensors_are_written_once_and_dtype_is_converted(tmp_path: Path) -> None:
    weight = torch.randn(4, 4)
    state = {"embed": weight, "norm": torch.ones(4), "head": weight, "view": weight[:2]}
    published = publish(tmp_path, Version(0, 1), state, dtype=torch.bfloat16)
    found = load(local_path(published.uri))
    assert set(found) == {"embed", "norm", "view"}
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


def test_two_writers_make_one_file(tmp_path: Path) -> None:
    """Of tensors of several widths, each aligned; a reader sees no difference."""
    state = {"a": torch.randn(3, 4), "odd": torch.ones(3, dtype=torch.uint8), "b": torch.randn(5).bfloat16()}
    state["none"] = torch.zeros(0, 2)
    path = tmp_path / "file"
    for names in (("odd", "none"), ("b", "a")):
        mine = {name: state[name] if name in names else state[name].to("meta") for name in state}
        tensor_file.write(path, mine)
    found = load(path)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert {name: info.shape for name, info in store.header(path).items()} == {
        name: tuple(tensor.shape) for name, tensor in state.items()
    }


def test_a_large_file_is_hashed_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(250)))
    assert store.file_digest(path) == hashlib.sha256(bytes(range(250))).hexdigest()
    monkeypatch.setattr(store, "_PIECE", 100)
    pieces = [bytes(range(100)), bytes(range(100, 200)), bytes(range(200, 250))]
    known = b"".join(hashlib.sha256(piece).digest() for piece in pieces)
    assert store.file_digest(path) == hashlib.sha256(known).hexdigest()


def test_same_bytes_again_are_harmless_other_bytes_are_refused(tmp_path: Path) -> None:
    first = publish(tmp_path, Version(1, 1), tensors())
    assert publish(tmp_path, Version(1, 1), tensors()) == first
    with pytest.raises(WeightFault, match="already published"):
        publish(tmp_path, Version(1, 1), tensors(9.0))
    check(local_path(first.uri), first.sha256, first.size)
    assert [file.name for file in (tmp_path / "1-1").iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("fault", ["missing", "size", "digest", "scheme"])
def test_a_check_refuses(tmp_path: Path, fault: str) -> None:
    published = publish(tmp_path, Version(0, 0), tensors())
    path = local_path(published.uri)
    content = path.read_bytes()
    if fault == "missing":
        path.unlink()
    elif fault == "size":
        path.write_bytes(content[:-1])
    elif fault == "digest":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    uri = published.uri.replace("file", "http") if fault == "scheme" else published.uri
    messages = {"missing": "gone", "size": "bytes", "digest": "SHA-256", "scheme": "http"}
    with pytest.raises(WeightFault, match=messages[fault]):
        check(local_path(uri), published.sha256, published.size)


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        publish(tmp_path, Version(0, 0), tensors())
    assert list((tmp_path / "0-0").iterdir()) == []


@given(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 20)), min_size=1, max_size=12), st.integers(-1, 6))
def test_pruning_keeps_the_newest(tmp_path_factory: pytest.TempPathFactory, made: set, keep: int) -> None:
    directory = tmp_path_factory.mktemp("weights")
    for fence, step in made:
        (directory / f"{fence}-{step}").mkdir()
    (directory / "not-a-version").mkdir()
    gone = prune(directory, keep=keep)
    left = versions(directory)
    assert left == sorted(Version(*pair) for pair in made)[-max(1, keep) :]
    assert sorted(gone + left) == sorted(Version(*pair) for pair in made)
    assert (directory / "not-a-version").is_dir()


def test_publishing_prunes(tmp_path: Path) -> None:
    for step in range(5):
        publish(tmp_path, Version(0, step), tensors(float(step)), keep=2)
    publish(tmp_path, Version(1, 2), tensors(7.0), keep=2)
    assert versions(tmp_path) == [Version(0, 4), Version(1, 2)]
