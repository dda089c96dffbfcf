"""Sources of documents, scheme by scheme, and the refusals of sources that cannot be read."""

from __future__ import annotations

import gzip
import json
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine.config import Config, CorpusSource, DesignerConfig, ModelConfig, RunConfig, WarmstartConfig
from engine.errors import ConfigError, SpadeError
from roles.designer.corpus import Document, load, load_for, probe, read_revisions, write_revisions
from roles.designer.corpus.sources import REVISIONS


def only(source: str, **settings: Any) -> tuple[Document, ...]:
    (shelf,) = load(source, **settings).sources
    return shelf.documents


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def recipe(corpus: Any, **designer: Any) -> Config:
    return Config(
        run=RunConfig(name="t", seed=5),
        model=ModelConfig(path="m"),
        designer=DesignerConfig(corpus=corpus, **designer),
    )


def test_jsonl_takes_the_schema_of_the_reference(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "corpus.jsonl",
        {"text": "one", "skill": "Logic", "other": 1},
        "",
        {"orig_doc": "two", "text": "not this", "id": 7},
        {"text": "three", "id": 7, "orig_doc": None},
    )
    found = only(f"jsonl:{path}")
    assert [(item.whole(), item.skill) for item in found] == [("one", "Logic"), ("two", ""), ("three", "")]
    assert [item.id for item in found] == ["corpus.jsonl:1", "7", "7#2"]


def test_jsonl_counts_and_names_what_holds_no_document(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "corpus.jsonl",
        {"text": "one"},
        '{"text": ',
        {"text": "  "},
        {"title": "x"},
        "[]",
        {"text": 3},
    )
    found = load(f"jsonl:{path}")
    assert (found.documents, found.bad) == (1, 5)
    assert [line.partition(": ")[0] for line in found.named] == [f"{path}, line {n}" for n in (2, 3, 4, 5, 6)]
    assert "no text in orig_doc or text" in found.named[1]


def test_jsonl_reads_directories_and_packed_files(tmp_path: Path) -> None:
    write_lines(tmp_path / "b.jsonl", {"text": "bee"})
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "ay"}\n'))
    assert {item.whole() for item in only(f"jsonl:{tmp_path}")} == {"ay", "bee"}
    (tmp_path / "empty").mkdir()
    for scheme, words in (("jsonl", r"\*\.jsonl"), ("dir", "no document.*corpus=off")):
        with pytest.raises(ConfigError, match=words):
            load(f"{scheme}:{tmp_path / 'empty'}")


def damaged(packed: bytes) -> bytes:
    return packed[:200] + bytes(reversed(packed[200:260])) + packed[260:]


@pytest.mark.parametrize("spoil", [lambda _: b"no gzip", lambda packed: packed[:-200], damaged])
def test_a_packed_file_that_is_broken_is_said_by_name(spoil: Any, tmp_path: Path) -> None:
    text = "\n".join(json.dumps({"text": f"{number**9}"}) for number in range(900))
    (tmp_path / "a.jsonl.gz").write_bytes(spoil(gzip.compress(text.encode())))
    with pytest.raises(ConfigError, match=r"a\.jsonl\.gz cannot be read"):
        load(f"jsonl:{tmp_path}")


def test_jsonl_keeps_places_and_not_texts(tmp_path: Path) -> None:
    """A corpus is larger than memory: a line costs a few hundred bytes, whatever its length."""
    texts = [f"{number} {'long ' * 20_000}".strip() for number in range(60)]
    path = write_lines(tmp_path / "corpus.jsonl", "", *({"text": text} for text in texts))
    tracemalloc.start()
    try:
        found = only(f"jsonl:{path}")
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 6_000_000
    assert kept < 300_000
    assert [item.whole() for item in found[::7]] == texts[::7]
    (first, *_) = only(f"jsonl:{path}", longest=30)
    assert first.whole() == texts[0][:30]


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_text('{"text": "other"}')])
def test_a_file_that_changes_under_the_run_is_named(tmp_path: Path, harm: Any) -> None:
    path = write_lines(tmp_path / "corpus.jsonl", {"text": "same1"}, {"text": "same2"})
    _, second = only(f"jsonl:{path}")
    assert second.whole() == "same2"
    harm(path)
    with pytest.raises(SpadeError, match=r"corpus\.jsonl has changed while the run reads from it"):
        second.whole()


def test_a_source_of_bad_lines_only_names_the_first(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "corpus.jsonl", "nonsense", "more of it")
    for read in (lambda: load(f"jsonl:{path}"), lambda: probe(recipe(f"jsonl:{path}"))):
        with pytest.raises(ConfigError, match=r"no document; 2 places have none, the first: .*line 1"):
            read()


def test_directory(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.md").write_text("bee")
    (tmp_path / "a.txt").write_text("ay")
    (tmp_path / "c.bin").write_bytes(b"\x00")
    (tmp_path / "d.txt").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "e.txt").write_text(" \n")
    found = load(f"dir:{tmp_path}")
    assert found.sources[0].documents == (Document("a.txt", "ay"), Document("sub/b.md", "bee"))
    assert found.bad == 2
    assert "d.txt" in found.named[0]
    assert only(f"dir:{tmp_path}", longest=1)[0].text == "a"
    assert found.named[1].endswith("e.txt: empty")
    with pytest.raises(ConfigError, match="jsonl:PATH"):
        load(f"dir:{tmp_path / 'a.txt'}")


def test_pydoc_of_a_package_reads_its_public_submodules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "spade_toy_package"
    package.mkdir()
    long = "words " * 50
    (package / "__init__.py").write_text(f'"""top {long}"""')
    (package / "inner.py").write_text(f'def act():\n    """act {long}"""\n')
    (package / "_hidden.py").write_text(f'"""hidden {long}"""')
    (package / "broken.py").write_text("raise RuntimeError('no')")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = load("pydoc:spade_toy_package")
    names = {item.id for item in found.sources[0].documents}
    assert names == {"spade_toy_package", "spade_toy_package.inner.act"}
    assert found.named == ("spade_toy_package.broken: cannot be imported: no",)


def test_pydoc_alone_is_the_standard_library() -> None:
    found = only("pydoc:")
    assert len(found) > 300
    assert {"itertools.groupby", "csv", "heapq"} <= {item.id for item in found}
    assert all(len(item.text) >= 200 for item in found)
    assert found == only("pydoc:")
    some = {item.id for item in only("pydoc:heapq, bisect")}
    assert {name.partition(".")[0] for name in some} == {"heapq", "bisect"}


MORE = "More words. " * 20
SENT = f"<p>Sends a <b>letter</b>\n &amp; waits.</p><ul><li>{MORE}</li></ul>"
WAY = {"shape": "Way", "documentation": "<p>By what.</p>"}
SERVICE = {
    "metadata": {"serviceFullName": "Toy Post"},
    "operations": {
        "Send": {
            "documentation": SENT, "input": {"shape": "SendRequest"}, "output": {"shape": "Nothing"},
            "errors": [{"shape": "Lost"}],
        },
        "Bare": {},
    },
    "shapes": {
        "SendRequest": {
            "type": "structure", "required": ["To"], "members": {"To": {"shape": "Name"}, "Way": WAY},
        },
        "Nothing": {"type": "structure", "members": {}},
        "Name": {"type": "string", "documentation": "<p>To whom.</p>"},
        "Way": {"type": "string", "enum": ["sea", "air"]},
        "Lost": {"type": "structure", "documentation": "<p>It was lost.</p>"},
    },
}  # fmt: skip


@pytest.fixture
def botocore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of that name with one service in two versions."""
    for version, text in (("2012-01-01", "{}"), ("2020-01-01", json.dumps(SERVICE))):
        place = tmp_path / "botocore" / "data" / "post" / version
        place.mkdir(parents=True)
        (place / "service-2.json.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "botocore" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.delitem(sys.modules, "botocore", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_botocore_reads_the_newest_description(botocore: Path) -> None:
    found = load("botocore:post")
    (document,) = found.sources[0].documents
    assert document.id == "post.Send"
    assert document.text.startswith("Toy Post: Send\n\nSends a letter & waits.\nMore words.")
    assert document.text.endswith(
        "Parameters:\n- To (string, required): To whom.\n- Way (string, one of sea, air): By what.\n"
        "Errors:\n- Lost: It was lost."
    )
    assert found.named == ("post.Bare: hardly documented",)
    with pytest.raises(ConfigError, match=r"no service 'pots'.*post"):
        load("botocore:pots")


def test_botocore_that_is_not_there_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'spade-selfplay\[corpora\]'"):
        load("botocore:")


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that ``datasets`` reads, thirty rows in two files."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN", 0.0)
    place = tmp_path / "set"
    place.mkdir()
    rows = [{"text": f"text {n}", "title": f"title {n}", "id": f"n{n}"} for n in range(30)]
    write_lines(place / "train-0.jsonl", *rows[:20])
    write_lines(place / "train-1.jsonl", *rows[20:])
    return place


def test_hf_streams_through_a_seeded_buffer(dataset: Path) -> None:
    source = f"hf:{dataset}?buffer=8&take=12"
    found = only(source, seed=3)
    assert len({item.id for item in found}) == 12
    assert all(item.text == item.id.replace("n", "text ") for item in found)
    assert found == only(source, seed=3)
    assert found != only(source, seed=4)
    whole = load(f"hf:{dataset}")
    assert (whole.documents, whole.revisions) == (30, ())


class Hub:
    """Stands in for the hub: a branch that moves, and a place where commits lie."""

    def __init__(self, dataset: Path) -> None:
        self.tips = {"": "c1", "main": "c1", "old": "c0"}
        self.down = False
        self.loaded: list[tuple[str, str | None]] = []
        import datasets

        self._dataset, self._load = dataset, datasets.load_dataset

    def dataset_info(self, name: str, *, revision: str | None, timeout: float) -> Any:
        if self.down:
            raise OSError("no route to the hub")
        return SimpleNamespace(sha=self.tips.get(revision or "", revision))

    def load_dataset(self, where: str, *, revision: str | None = None, **arguments: Any) -> Any:
        self.loaded.append((where, revision))
        return self._load(str(self._dataset), **arguments)


@pytest.fixture
def hub(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(dataset)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    monkeypatch.setattr("datasets.load_dataset", hub.load_dataset)
    return hub


@pytest.mark.parametrize(
    ("source", "commit"),
    [
        ("hf:some/papers", "c1"),
        ("hf:some/papers@old?take=3", "c0"),
        ("hf:some/papers@main", "c1"),
        ("hf:some/papers@0a1b2c", "0a1b2c"),
    ],
)
def test_hf_reads_the_revision_that_is_asked_for_and_says_which(hub: Hub, source: str, commit: str) -> None:
    found = load(source)
    assert hub.loaded == [("some/papers", commit)]
    assert found.revisions == ((source, commit),)


def test_a_run_keeps_the_revision_that_it_began_with(hub: Hub) -> None:
    source = "hf:some/papers@main"
    began = dict(load(source).revisions)
    hub.tips = {"main": "c2"}
    assert load(source, pins=began).revisions == ((source, "c1"),)
    assert load(source).revisions == ((source, "c2"),)
    assert [revision for _, revision in hub.loaded] == ["c1", "c1", "c2"]


def test_without_an_answer_of_the_hub_the_revision_is_the_one_asked_for(hub: Hub) -> None:
    hub.down = True
    assert load("hf:some/papers@v1").revisions == (("hf:some/papers@v1", "v1"),)
    assert load("hf:some/papers").revisions == ()
    assert hub.loaded == [("some/papers", "v1"), ("some/papers", None)]


def test_pins_are_kept_beside_the_run(tmp_path: Path) -> None:
    assert read_revisions(tmp_path) == {}
    write_revisions(tmp_path, {})
    assert list(tmp_path.iterdir()) == []
    write_revisions(tmp_path, {"hf:a@main": "c1"})
    assert read_revisions(tmp_path) == {"hf:a@main": "c1"}
    for text in ("nonsense", "[]"):
        (tmp_path / REVISIONS).write_text(text)
        with pytest.raises(SpadeError, match=r"corpus\.json.*Delete it"):
            read_revisions(tmp_path)


def test_hf_takes_other_fields_and_single_files(dataset: Path) -> None:
    titles = only(f"hf:{dataset}?field=title&id=id&take=5")
    assert all(item.text == item.id.replace("n", "title ") for item in titles)
    assert len(only(f"hf:{dataset / 'train-1.jsonl'}")) == 10
    with pytest.raises(ConfigError, match="no text in body; the fields are text, title, id"):
        load(f"hf:{dataset}?field=body")


def test_hf_reads_parquet(dataset: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = dataset.parent / "papers.parquet"
    pq.write_table(pa.table({"text": ["one", "", "three"]}), path)
    found = load(f"hf:{path}")
    assert {item.text for item in found.sources[0].documents} == {"one", "three"}
    assert found.bad == 1


def test_hf_without_a_network_says_what_to_do(dataset: Path) -> None:
    with pytest.raises(ConfigError, match=r"hf:nobody/nothing cannot be read.*hf:PATH.*pydoc:"):
        load("hf:nobody/nothing")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("hf:", "names no dataset"),
        ("hf:x?size=3", "no option 'size'"),
        ("hf:x?take=none", "take=none"),
        ("ftp:x", "There is no corpus"),
        ("nonsense", "There is no corpus"),
        ("jsonl:/no/such/file", "does not exist"),
        ("jsonl:", "no path is given"),
        ("dir:/no/such", "does not exist"),
        ("pydoc:no_such_module_x", "cannot be imported"),
    ],
)
def test_bad_sources_are_named(source: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(source)


def test_several_sources_keep_their_weights_and_their_ids_apart(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same.txt").write_text(name)
    found = load([CorpusSource(source=f"dir:{tmp_path / name}", weight=2.0) for name in ("one", "two")])
    assert [shelf.weight for shelf in found.sources] == [2.0, 2.0]
    assert [shelf.documents[0].id for shelf in found.sources] == ["same.txt", "same.txt#2"]
    assert load("").sources == ()


def test_a_recipe_has_the_documents_of_its_own_families() -> None:
    warm = WarmstartConfig(families=("guess", "peak"))
    config = msgspec.structs.replace(recipe("seeds:"), warmstart=warm)
    (shelf,) = load_for(config).sources
    assert {item.id.partition("-")[0] for item in shelf.documents} == {"guess", "peak"}
    probe(config)
    probe(recipe(""))
