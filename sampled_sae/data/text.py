"""A source of text -> documents, in the same order every time.

A source is a file, a folder, `stdlib` (the standard library of this Python) or a dataset of the Hugging Face hub.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from sampled_sae.config import Config, require
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.third_party import package, reason, stream

NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
CHUNK = 2**16  # compressed bytes read at once
LONGEST_WINDOW = 2**31  # large corpora are often packed with `zstd --long=31`, which must be allowed for


@dataclass(frozen=True, slots=True)
class TextSource(Config):
    """A text by name, and where the documents are in it."""

    name: str
    """A .txt file (one document), .jsonl, .jsonl.gz, .jsonl.zst or .parquet (one document per row), a folder of such
    files (by name, with its subfolders, but without links to folders and hidden ones), `stdlib`: the .py files of
    Python's standard library, or a dataset on the Hugging Face hub, which is streamed."""
    field: str = "text"
    """Where the text is in a row."""
    split: str = "train"
    """Split of a hub dataset."""
    subset: str | None = None
    """Configuration of a hub dataset."""

    @property
    def part(self) -> str:
        """Which part of the source the documents are, for the record."""
        return ", ".join(filter(None, (self.subset, self.split, self.field)))

    def documents(self) -> Iterator[str]:
        """The documents, one str each, in the same order every time; those without any text are left out.

        What can be checked without reading is checked at once, the rest as it is read.
        """
        name = self.name
        if name in NAMED:
            self._refuse_parts()
            texts = NAMED[name]()
        elif (path := _on_disk(name)) is not None:
            self._refuse_parts()
            texts = _local(path, name, self.field)
        elif name.lower().endswith(tuple(READERS)) or not HUB_NAME.fullmatch(name) or name.startswith("."):
            raise UserError(f"text = {name!r}: no such file or folder")
        else:
            texts = _hub(name, self.field, self.split, self.subset)
        return _with_text(texts, name)

    def _refuse_parts(self) -> None:
        for part, value, usual in (("split", self.split, "train"), ("subset", self.subset, None)):
            require(value == usual, part, value, f"is for a dataset on the hub, which text = {self.name!r} is not")


@dataclass(frozen=True, slots=True)
class TextList:
    """Documents in memory."""

    texts: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{len(self.texts)} documents in memory"

    @property
    def part(self) -> str:
        """A digest of the documents."""
        return hashlib.blake2b("\0".join(self.texts).encode(errors="replace"), digest_size=8).hexdigest()

    def documents(self) -> Iterator[str]:
        """The documents that hold any text, in order."""
        return _with_text(self.texts, self.name)


Text = str | Path | TextSource | TextList | Iterable[str]
"""A text as users give it."""


def as_text(text: Text) -> TextSource | TextList:
    """A text as users give it: by name, or as a list of documents."""
    if isinstance(text, TextSource | TextList):
        return text
    if isinstance(text, str | Path):
        return TextSource(str(text))
    if isinstance(text, Iterable):
        given = tuple(text)
        if all(isinstance(each, str) for each in given):
            return TextList(given)
    raise UserError(f"text = {type(text).__name__}: must be the name of a text, a TextSource or a list of documents")


def _with_text(texts: Iterable[str], source: str) -> Iterator[str]:
    empty = True
    for text in filter(str.strip, texts):
        empty = False
        yield text
    if empty:
        raise UserError(f"text = {source!r}: holds no document with any text in it")


def _on_disk(source: str) -> Path | None:
    # A name may be too long or have odd characters, and the user in ~user may be unknown.
    with suppress(OSError, ValueError, RuntimeError):
        path = Path(source).expanduser()
        return path if source and path.exists() else None
    return None


def _local(path: Path, source: str, field: str) -> Iterator[str]:
    endings = ", ".join(READERS)
    files = list(_files(path, tuple(READERS))) if path.is_dir() else [path]
    if not files:
        raise UserError(f"text = {source!r}: the folder holds no file ending in {endings}")
    if not files[0].name.lower().endswith(tuple(READERS)):
        raise UserError(f"text = {source!r}: must end in {endings}, or be a folder of such files")
    readers = [next(READERS[end] for end in READERS if file.name.lower().endswith(end)) for file in files]
    # A package that is missing should be known now, not when its first file comes up.
    for name in {reader.package for reader in readers if reader.package}:
        package(name, f"text = {source!r}")
    return (text for file, reader in zip(files, readers, strict=True) for text in reader.read(file, field))


def _files(folder: Path, endings: tuple[str, ...], left_out: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Files below `folder`, sorted by path. Links to folders are not followed: they may lead back here."""
    with _reading(folder):
        entries = sorted(folder.iterdir(), key=lambda path: path.name)
    for path in entries:
        if path.name.startswith(".") or path.name in left_out:
            continue
        if path.is_dir():
            if not path.is_symlink():
                yield from _files(path, endings, left_out)
        elif path.name.lower().endswith(endings):
            yield path


@contextmanager
def _reading(path: Path, *families: type[Exception]) -> Iterator[None]:
    """Turn the refusals of the system, and damage that shows as one of `families`, into one line for the user."""
    damage: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, UnicodeDecodeError, *families)
    try:
        yield
    except damage as error:
        if isinstance(error, OSError) and error.strerror:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        raise UserError(f"{path}: damaged or cut short ({reason(error)})") from None


def _read_txt(path: Path, field: str) -> Iterator[str]:
    with _reading(path):
        content = path.read_bytes()
    try:
        yield content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({reason(error)})") from None


def _read_jsonl(path: Path, field: str) -> Iterator[str]:
    packed = path.name.lower().endswith(".gz")
    with _reading(path), gzip.open(path) if packed else path.open("rb") as file:
        yield from _rows(file, path, field)


def _read_zstd(path: Path, field: str) -> Iterator[str]:
    zstandard = package("zstandard", f"text = {str(path)!r}")
    with _reading(path, zstandard.ZstdError):
        yield from _rows(_lines(_unpacked(path, zstandard)), path, field)


def _unpacked(path: Path, zstandard: Any) -> Iterator[bytes]:
    """The content of a .zst file, which may be several frames one after the other."""
    # The library's own reader does not notice a file that was cut short; a frame by itself has a mark at its end.
    unpacker = zstandard.ZstdDecompressor(max_window_size=LONGEST_WINDOW)
    frame = None
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            while chunk:
                frame = frame or unpacker.decompressobj()
                yield frame.decompress(chunk)
                chunk = frame.unused_data
                if frame.eof:
                    frame = None
    if frame is not None:
        raise EOFError("the last frame has no end")


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    begun = b""
    for chunk in chunks:
        *whole, begun = (begun + chunk).split(b"\n")
        yield from whole
    yield begun


def _rows(lines: Iterable[bytes], path: Path, field: str) -> Iterator[str]:
    """The text of each line of JSON; blank lines are allowed."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: line {number} is not valid JSON ({reason(error)})") from None
        yield _text_of(row, field, f"{path}: line {number}")


def _read_parquet(path: Path, field: str) -> Iterator[str]:
    pyarrow, parquet = (package(name, f"text = {str(path)!r}") for name in ("pyarrow", "pyarrow.parquet"))
    with _reading(path, pyarrow.ArrowException), parquet.ParquetFile(path) as file:
        _text_of(dict.fromkeys(file.schema_arrow.names), field, str(path))  # refuses a field that is not there
        batches = file.iter_batches(batch_size=1024, columns=[field])
        for number, row in enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), 1):
            yield _text_of(row, field, f"{path}: row {number}")


def _text_of(row: Any, field: str, where: str) -> str:
    """The text of a row; null is a document without text."""
    if not isinstance(row, dict):
        raise UserError(f"{where} is a {type(row).__name__}: must be an object with a field {field!r}")
    if field not in row:
        raise UserError(f"{where}: field = {field!r} is not there; name one of {', '.join(row) or 'none at all'}")
    text = row[field]
    if not isinstance(text, str | None):
        raise UserError(f"{where}: {field!r} is a {type(text).__name__}: must be text; name another field")
    return text or ""


def _standard_library() -> Iterator[str]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = list(_files(folder, (".py",), NOT_LIBRARY)) if folder.is_dir() else []
    if not files:
        raise UserError("text = 'stdlib': this Python comes without the files of its library; give a file or folder")
    return _decodable(files)


def _decodable(files: list[Path]) -> Iterator[str]:
    for path in files:
        # A few files of the library are in other encodings on purpose.
        with suppress(UnicodeDecodeError):
            yield path.read_text(encoding="utf-8")


def _hub(name: str, field: str, split: str, subset: str | None) -> Iterator[str]:
    """The texts of a dataset, as they come over the network."""
    datasets = package("datasets", f"text = {name!r}")
    here = f"text = {name!r}: no file or folder of that name here, and"
    # The libraries below this call raise errors of many kinds, none of which is a bug of this project.
    try:
        rows = iter(datasets.load_dataset(name, subset, split=split, streaming=True))
    except FileNotFoundError as error:
        raise UserError(f"{here} no such dataset on the Hugging Face hub ({reason(error)})") from error
    except ConnectionError as error:
        raise UserError(
            f"{here} the Hugging Face hub cannot be reached ({reason(error)}); give a file, a folder or 'stdlib'"
        ) from error
    except Exception as error:
        raise UserError(f"text = {name!r}, split = {split!r}, subset = {subset!r}: {reason(error)}") from error
    numbered = enumerate(stream(rows, f"text = {name!r}"))
    return (_text_of(row, field, f"text = {name!r}: row {number}") for number, row in numbered)


class Reader(NamedTuple):
    """Reads the documents of one kind of file."""

    read: Callable[[Path, str], Iterator[str]]  # takes the file and the field of the text in a row
    package: str | None = None  # optional package that it needs


# A new kind of text is a function above and an entry here.
READERS = {
    ".txt": Reader(_read_txt),
    ".jsonl": Reader(_read_jsonl),
    ".jsonl.gz": Reader(_read_jsonl),
    ".jsonl.zst": Reader(_read_zstd, "zstandard"),
    ".parquet": Reader(_read_parquet, "pyarrow"),
}
NAMED: dict[str, Callable[[], Iterator[str]]] = {"stdlib": _standard_library}  # texts that are always there
