"""Deltas: exact for any bits, checked by layer and as a whole, undone where they do not lead as told."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.weights import delta, layout
from engine.weights.store import WeightFault

torch = pytest.importorskip("torch")

from weight_files import described, link, nudged, raw, save, weights  # noqa: E402

from engine.weights.weight_buffer import Image  # noqa: E402


def held(path: Path, digest: str) -> Image:
    image = Image()
    image.read(path.as_uri(), digest, path.stat().st_size)
    return image


@given(
    st.lists(st.integers(0, 1 << 34), unique=True, max_size=60).map(sorted)
    | st.sets(st.integers(0, 400), max_size=200).map(sorted)
)
def test_gaps_of_any_width_lead_back_to_the_places(places: list[int]) -> None:
    symbols = delta.encode_gaps(np.asarray(places, np.int64))
    assert delta._places(symbols).tolist() == places
    if places and places[-1] < 1 << 32:
        assert symbols.nbytes <= 4 * len(places) + 4


WORDS = st.sampled_from(["<u1", "<u2", "<u4", "<u8"])


@given(st.data())
def test_any_change_of_bits_is_reproduced_and_undone(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Also those that no float would make: signs, infinities, not-a-numbers with their payloads."""
    directory = tmp_path_factory.mktemp("delta")
    word = np.dtype(data.draw(WORDS))
    kind = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.int64}[word.itemsize]
    length = data.draw(st.integers(1, 700))
    seed = data.draw(st.integers(0, 2**32 - 1))
    generator = np.random.default_rng(seed)
    old = generator.integers(0, 1 << 8 * word.itemsize, length, word, endpoint=False)
    new = old.copy()
    places = data.draw(st.lists(st.integers(0, length - 1), max_size=50))
    new[places] += generator.choice([1, 3, -1, 200, 1 << 7], len(places)).astype(word)
    files = []
    for name, bits in (("old", old), ("new", new)):
        tensor = torch.from_numpy(bits.view(np.uint8).copy()).view(kind)
        files.append(save(directory / name, {"layers.0.w": tensor, "same": torch.ones(3)}))
    (base, base_digest), (result, digest) = files
    one = link(directory, base, result)
    image = held(base, base_digest)
    image.apply([one])
    assert image.digest == digest
    assert bytes(image._data) == result.read_bytes()
    undo = delta.Undo()
    again = held(base, base_digest)
    delta.apply(again._data, again.layout, delta.load(directory / "delta.safetensors"), undo, where="")
    delta.take_back(again._data, undo)
    assert bytes(again._data) == base.read_bytes()


def test_a_chain_leads_to_the_last_version(tmp_path: Path) -> None:
    states = [weights()]
    for step in range(3):
        states.append(nudged(states[-1], seed=step))
    files = [save(tmp_path / str(index), state) for index, state in enumerate(states)]
    chain = [link(tmp_path, files[i][0], files[i + 1][0], f"d{i}") for i in range(3)]
    image = held(*files[0])
    image.apply(chain)
    assert image.digest == files[-1][1]
    found = dict(image.tensors())
    assert found.keys() == states[-1].keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in states[-1].items())


def test_neighbouring_values_take_about_two_bytes_each(tmp_path: Path) -> None:
    state = {"layers.0.w": (0.05 * torch.randn(300_000)).bfloat16()}
    base, new = save(tmp_path / "a", state)[0], save(tmp_path / "b", nudged(state, every=50))[0]
    one = link(tmp_path, base, new)
    assert one.size < 2.1 * 6_000 + 1000
    assert one.size < 0.03 * base.stat().st_size


def test_a_tensor_that_did_not_change_is_not_in_the_file(tmp_path: Path) -> None:
    state = weights()
    other = {**state, "model.norm.weight": state["model.norm.weight"] * 2}
    link(tmp_path, save(tmp_path / "a", state)[0], save(tmp_path / "b", other)[0])
    found = delta.load(tmp_path / "delta.safetensors")
    assert found.parts.keys() == {"model.norm.weight"}
    same = link(tmp_path, tmp_path / "a", tmp_path / "a", "same")
    image = held(*save(tmp_path / "a", state))
    image.apply([same])
    assert image.digest == same.base == same.whole


@pytest.mark.parametrize("change", ["name", "shape", "type", "more"])
def test_other_layouts_have_no_delta(tmp_path: Path, change: str) -> None:
    state = weights()
    other = dict(state)
    if change == "name":
        other["renamed"] = other.pop("steps")
    elif change == "shape":
        other["model.norm.weight"] = other["model.norm.weight"].reshape(5, 20)
    elif change == "type":
        other["model.norm.weight"] = other["model.norm.weight"].half()
    else:
        other["extra"] = torch.ones(1)
    base, new = save(tmp_path / "a", state)[0], save(tmp_path / "b", other)[0]
    assert not delta.write(tmp_path / "d", raw(base), raw(new), digests=("", ""), version=1)
    assert not (tmp_path / "d").exists()


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Path, str]:
    directory = tmp_path_factory.mktemp("pushed")
    state = weights()
    base, digest = save(directory / "a", state)
    new, wanted = save(directory / "b", nudged(state))
    link(directory, base, new)
    return base, digest, directory / "delta.safetensors", wanted


@given(st.data())
def test_no_damaged_byte_gets_through(pushed: tuple[Path, str, Path, str], data: st.DataObject) -> None:
    """With the file's own digest made to fit: the digests inside have to find it."""
    base, digest, file, wanted = pushed
    content = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    torn = file.with_name("torn.safetensors")
    torn.write_bytes(content)
    image = held(base, digest)
    try:
        image.apply([described(torn, digest, wanted)])
    except WeightFault:
        assert image.digest == digest
        assert bytes(image._data) == base.read_bytes()
    else:  # a byte of no meaning, such as the version for people
        assert image.digest == wanted


def test_a_damaged_layer_is_named(pushed: tuple[Path, str, Path, str]) -> None:
    file = pushed[2]
    content = bytearray(file.read_bytes())
    entries = layout.read(raw(file), where="").entries
    entry = next(entry for entry in entries if entry.name.startswith("model.layers.1."))
    content[entry.start] ^= 1
    torn = file.with_name("layer.safetensors")
    torn.write_bytes(content)
    with pytest.raises(WeightFault, match=r"damaged in model\.layers\.1"):
        delta.load(torn)


@pytest.mark.parametrize("fault", ["cut", "digest", "base", "missing", "elsewhere"])
def test_a_bad_delta_changes_nothing(pushed: tuple[Path, str, Path, str], fault: str, tmp_path: Path) -> None:
    base, digest, file, wanted = pushed
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(file.read_bytes())
    one = described(copy, digest, wanted)
    image = held(base, digest)
    if fault == "cut":
        copy.write_bytes(file.read_bytes()[:-40])
    elif fault == "digest":
        copy.write_bytes(file.read_bytes()[:-1] + b"\xff")
    elif fault == "base":
        image = held(*save(tmp_path / "other", nudged(weights(), seed=9)))
        digest = image.digest
    elif fault == "missing":
        copy.unlink()
    else:
        one = described(copy, digest, "0" * 64)
    before = bytes(image._data)
    with pytest.raises(WeightFault):
        image.apply([one])
    assert image.digest == digest
    assert bytes(image._data) == before


@pytest.mark.parametrize("fault", ["cut", "bits", "missing", "header"])
def test_bad_whole_weights_are_not_held(tmp_path: Path, fault: str) -> None:
    path, digest = save(tmp_path / "a", weights())
    size = path.stat().st_size
    image = held(path, digest)
    other, wanted = save(tmp_path / "b", nudged(weights()))
    if fault == "cut":
        other.write_bytes(other.read_bytes()[:-3])
    elif fault == "bits":
        other.write_bytes(other.read_bytes()[:-1] + b"\xfe")
    elif fault == "missing":
        other.unlink()
    else:
        other.write_bytes(b"\xff" * size)
        wanted = hashlib.sha256(b"\xff" * size).hexdigest()
    with pytest.raises(WeightFault):
        image.read(other.as_uri(), wanted, size)
    assert image.digest == (digest if fault in ("cut", "missing") else "")
    image.read(path.as_uri(), digest, size)
    assert image.digest == digest


def test_layers_are_told_by_the_first_number() -> None:
    assert layout.group("model.layers.3.mlp.experts.7.w1") == "model.layers.3"
    assert layout.group("model.norm.weight") == "model.norm"
    assert layout.group("scale") == "scale"
