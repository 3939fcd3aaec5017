import gzip
import json
import re
import sys
import sysconfig
from itertools import islice
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from sampled_sae.data import text
from sampled_sae.data.text import TextSource, as_text
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.third_party import install

TEXTS = ["first\nof two lines", "zweites, schön", "third \u2028 \U0001f600"]


def documents(source: str, **options):
    return TextSource(source, **options).documents()


def jsonl(texts, field="text") -> bytes:
    return "".join(json.dumps({"source": "x", field: text}, ensure_ascii=False) + "\n" for text in texts).encode()


def write_parquet(path, columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


WRITERS = {
    "a.jsonl": lambda path, texts, field: path.write_bytes(jsonl(texts, field)),
    "a.jsonl.gz": lambda path, texts, field: path.write_bytes(gzip.compress(jsonl(texts, field))),
    "a.jsonl.zst": lambda path, texts, field: path.write_bytes(zstandard.compress(jsonl(texts, field))),
    "a.parquet": lambda path, texts, field: write_parquet(path, {"source": ["x"] * len(texts), field: texts}),
    "A.JSONL": lambda path, texts, field: path.write_bytes(jsonl(texts, field)),
}


def refusal(source, **options) -> str:
    with pytest.raises(UserError) as caught:
        list(documents(str(source), **options))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- files and folders ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("field", ["text", "content"])
def test_a_file_of_rows(tmp_path, name, field):
    WRITERS[name](tmp_path / name, TEXTS, field)
    assert list(documents(str(tmp_path / name), field=field)) == TEXTS


@pytest.mark.parametrize("name", WRITERS)
def test_rows_without_text_are_left_out(tmp_path, name):
    WRITERS[name](tmp_path / name, ["", TEXTS[0], None, " \n\t", TEXTS[1]], "text")
    assert list(documents(str(tmp_path / name))) == TEXTS[:2]
    WRITERS[name](tmp_path / name, ["", None, " "], "text")
    assert refusal(tmp_path / name).endswith("holds no document with any text in it")


def test_a_txt_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\n\r\ntwo ä".encode())
    assert list(documents(str(tmp_path / "a.txt"))) == ["one\r\n\r\ntwo ä"]


def test_blank_lines_and_a_missing_last_newline(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\r\n\r\n{"text": "b"}')
    assert list(documents(str(tmp_path / "a.jsonl"))) == ["a", "b"]


@pytest.mark.parametrize("chunk", [1, 7, 2**16])
def test_zstd_in_several_frames_and_small_chunks(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(text, "CHUNK", chunk)
    content = jsonl([*TEXTS, "x" * 500])
    frames = [zstandard.compress(part) for part in (content[:20], b"", content[20:70], content[70:])]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    assert list(documents(str(tmp_path / "a.jsonl.zst"))) == [*TEXTS, "x" * 500]


def test_zstd_with_a_long_window(tmp_path):
    options = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    packer = zstandard.ZstdCompressor(compression_params=options).compressobj()  # which writes no size into the frame
    (tmp_path / "a.jsonl.zst").write_bytes(packer.compress(jsonl(TEXTS)) + packer.flush())
    assert list(documents(str(tmp_path / "a.jsonl.zst"))) == TEXTS


def test_a_folder_is_read_by_path(tmp_path):
    for name in ("b/2.txt", "b/10.txt", "a.txt", "c.txt", "b.d/1.txt", ".hidden/x.txt", ".y.txt", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "again").symlink_to(tmp_path)
    (tmp_path / "linked.txt").symlink_to(tmp_path / "a.txt")
    WRITERS["a.parquet"](tmp_path / "b" / "3.parquet", ["row 0", "row 1"], "text")
    assert list(documents(str(tmp_path))) == [
        "a.txt", "b/10.txt", "b/2.txt", "row 0", "row 1", "b.d/1.txt", "c.txt", "a.txt"
    ]  # fmt: skip


def test_only_what_is_asked_for_is_read(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.jsonl").write_text("not JSON")
    assert list(islice(documents(str(tmp_path)), 1)) == ["a"]


# ---- bad input ------------------------------------------------------------------------------------


def cut(packed: bytes) -> bytes:
    return packed[:-6]


def spoilt(packed: bytes) -> bytes:
    return packed[:40] + bytes(20) + packed[60:]


MANY = jsonl([f"{number * 7919} of them" for number in range(200)])
BAD = {
    "json": ("a.jsonl", b'{"text": "a"}\n\n{"text": "b\n', "a.jsonl: line 3 is not valid JSON"),
    "json in gzip": ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n{]\n'), "a.jsonl.gz: line 2 is not valid JSON"),
    "nested json": ("a.jsonl", b"[" * 100_000, "line 1 is not valid JSON"),
    "json not UTF-8": ("a.jsonl", b'{"text": "\xff\xfe"}', "line 1 is not valid JSON"),
    "no object": ("a.jsonl", b'["text"]', "line 1 is a list: must be an object with a field 'text'"),
    "no field": ("a.jsonl", b'{"body": "a", "id": 3}', "line 1: field = 'text' is not there; name one of body, id"),
    "nothing in it": ("a.jsonl", b"{}", "line 1: field = 'text' is not there; name one of none at all"),
    "number": ("a.jsonl", b'{"text": 3}', "line 1: 'text' is a int: must be text"),
    "gzip": ("a.jsonl.gz", b"no gzip at all", "a.jsonl.gz: damaged or cut short"),
    "cut gzip": ("a.jsonl.gz", cut(gzip.compress(MANY)), "a.jsonl.gz: damaged or cut short"),
    "spoilt gzip": ("a.jsonl.gz", spoilt(gzip.compress(MANY)), "a.jsonl.gz: "),
    "zstd": ("a.jsonl.zst", b"no zstd at all", "a.jsonl.zst: damaged or cut short"),
    "cut zstd": ("a.jsonl.zst", cut(zstandard.compress(MANY)), "a.jsonl.zst: damaged or cut short"),
    "cut second zstd": ("a.jsonl.zst", cut(zstandard.compress(MANY) * 2), "damaged or cut short"),
    "spoilt zstd": ("a.jsonl.zst", spoilt(zstandard.compress(MANY)), "a.jsonl.zst: damaged or cut short"),
    "parquet": ("a.parquet", b"no parquet at all", "a.parquet: damaged or cut short"),
    "txt": ("a.txt", b"caf\xe9", "a.txt: not UTF-8 text"),
    "empty": ("a.txt", b"", "holds no document with any text in it"),
    "empty zstd": ("a.jsonl.zst", b"", "holds no document with any text in it"),
    "ending": ("a.csv", b"text", "must end in .txt, .jsonl, .jsonl.gz, .jsonl.zst, .parquet, or be a folder"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_gets_one_clear_line(tmp_path, case):
    name, content, message = BAD[case]
    (tmp_path / name).write_bytes(content)
    assert message in refusal(tmp_path / name)


def test_bad_parquet_columns(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, {"body": ["a"], "id": [1]})
    assert refusal(path).endswith("a.parquet: field = 'text' is not there; name one of body, id")
    assert "row 1: 'id' is a int: must be text" in refusal(path, field="id")
    path.write_bytes(path.read_bytes()[:-6])
    assert "a.parquet: damaged or cut short" in refusal(path)


def test_what_is_not_there(tmp_path):
    for source in (
        tmp_path / "no.jsonl",
        "no.jsonl.zst",
        "./no/such",
        "a/b/c",
        "no such name",
        "",
        "~nobody0/a",
        "a\0b",
    ):
        assert refusal(source) == f"text = {str(source)!r}: no such file or folder"
    (tmp_path / "notes.md").write_text("x")
    assert "the folder holds no file ending in .txt, .jsonl" in refusal(tmp_path)
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    assert refusal(tmp_path).endswith("gone.txt: cannot be read (No such file or directory)")


@pytest.mark.parametrize(("name", "package"), [("b.jsonl.zst", "zstandard"), ("b.parquet", "pyarrow")])
def test_a_missing_package_is_named_before_anything_is_read(tmp_path, monkeypatch, name, package):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / name).write_bytes(b"")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=re.escape(f"{package} is missing; {install('lm')}")):
        documents(str(tmp_path))


# ---- the standard library and the hub --------------------------------------------------------------


def test_the_standard_library():
    texts = list(documents("stdlib"))
    assert len(texts) > 300
    assert texts == list(documents("stdlib"))
    assert any("class JSONDecodeError" in text for text in texts)
    assert not any("class TestCase(" in text and "regrtest" in text for text in texts)


def test_only_the_librarys_own_files(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert "comes without the files of its library" in refusal("stdlib")
    for name in ("b.py", "a/z.py", "a/tests/x.py", "test/x.py", "site-packages/x.py", "x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "aa.py").write_bytes(b"# coding: latin-1\n# \xe9")
    assert list(documents("stdlib")) == ["a/z.py", "b.py"]


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the package `datasets`: `hub.load_dataset` is set by each test."""
    package = SimpleNamespace(load_dataset=None)
    monkeypatch.setitem(sys.modules, "datasets", package)
    return package


def test_a_dataset_of_the_hub_is_streamed(hub):
    asked = []

    def load(name, subset, **options):
        asked.append((name, subset, options))
        return ({"content": text} for text in [*TEXTS, "", None])

    hub.load_dataset = load
    assert list(documents("owner/name", field="content", split="test", subset="en")) == TEXTS
    assert asked == [("owner/name", "en", {"split": "test", "streaming": True})]


def raising(error):
    def load(*_, **__):
        raise error

    return load


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FileNotFoundError("Dataset 'o/n' doesn't\nexist"), "no such dataset on the Hugging Face hub (Dataset 'o/n' "),
        (ConnectionError("Couldn't reach 'o/n'"), "the Hugging Face hub cannot be reached (Couldn't reach 'o/n')"),
        (ValueError('Bad split: "x".\nAvailable: a'), "split = 'x', subset = None: Bad split: \"x\". Available: a"),
        (RuntimeError(), "subset = None: RuntimeError"),
    ],
)
def test_a_hub_that_refuses(hub, error, message):
    hub.load_dataset = raising(error)
    line = refusal("o/n", split="x")
    assert line.startswith("text = 'o/n'")
    assert message in line


def test_a_split_is_for_the_hub_alone(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    for source in ("stdlib", str(tmp_path / "a.txt"), str(tmp_path)):
        line = "is for a dataset on the hub, which text = "
        assert refusal(source, split="test").startswith(f"split = 'test': {line}")
        assert refusal(source, subset="en").startswith(f"subset = 'en': {line}")


def test_a_hub_that_breaks_off(hub):
    def rows():
        yield {"text": "a"}
        raise ConnectionError("reset by peer")

    hub.load_dataset = lambda *_, **__: rows()
    stream = documents("o/n")
    assert next(stream) == "a"
    with pytest.raises(UserError, match=r"'o/n': the hub's stream broke off at row 1 \(reset by peer\)"):
        next(stream)


def test_a_dataset_without_the_column(hub):
    hub.load_dataset = lambda *_, **__: iter([{"question": "a", "answer": "b"}])
    assert refusal("o/n") == "text = 'o/n': row 0: field = 'text' is not there; name one of question, answer"


def test_no_datasets_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert refusal("o/n") == f"text = 'o/n': datasets is missing; {install('lm')}"


def test_a_new_text_is_one_entry(monkeypatch, tmp_path):
    monkeypatch.setitem(text.NAMED, "poems", lambda: iter(["roses", "", "violets"]))
    assert list(TextSource("poems").documents()) == ["roses", "violets"]

    def read(path, field):
        yield from path.read_text().split("---")

    monkeypatch.setitem(text.READERS, ".md", text.Reader(read))
    (tmp_path / "a.md").write_text("one---two")
    (tmp_path / "b.txt").write_text("three")
    assert list(TextSource(str(tmp_path)).documents()) == ["one", "two", "three"]


def test_documents_in_memory():
    a, b = as_text(["x", " ", "y"]), as_text(iter(["x", "z"]))
    assert list(a.documents()) == ["x", "y"] and a.name == "3 documents in memory" and a.part != b.part
    assert as_text(a) is a and as_text("stdlib") == TextSource("stdlib")
