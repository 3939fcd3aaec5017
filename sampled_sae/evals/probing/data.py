"""Labelled texts, and how they are read from a file with the columns text and label."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sampled_sae.data.foreign import package, reason
from sampled_sae.errors import UserError

SPLITS = ("train", "test")
LONGEST_FIELD = 2**31 - 1
"""Of a .csv file; the default of 128 KiB is too small for documents, and larger numbers do not fit everywhere."""


@dataclass(slots=True)
class Labelled:
    """One dataset: texts with their labels, those without any text left out."""

    name: str
    texts: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    splits: list[str] | None = None
    """train or test for each text; none for a dataset that is still to be split."""
    groups: list[str] | None = None
    """A second label, over which the texts of a class are drawn evenly; none for a dataset without."""
    blank: int = 0
    """Texts that were left out because there is nothing in them."""
    repeated: int = 0
    """Texts that were left out because the same text was there before: a split must not put one on both sides."""
    other_split: int = 0
    """Texts that were left out because they belong to neither train nor test."""
    _seen: set[str] = field(default_factory=set)

    def add(self, text: str, label: str, split: str | None = None, group: str | None = None) -> None:
        """One more text, or one more that is left out. Splits and groups are given for all texts or for none."""
        if not text or text.isspace():
            self.blank += 1
        elif split is not None and split not in SPLITS:
            self.other_split += 1
        elif split is None and text in self._seen:
            self.repeated += 1
        else:
            self.texts.append(text)
            self.labels.append(label)
            if split is None:
                self._seen.add(text)
            else:
                self.splits = [] if self.splits is None else self.splits
                self.splits.append(split)
            if group is not None:
                self.groups = [] if self.groups is None else self.groups
                self.groups.append(group)

    @property
    def classes(self) -> list[str]:
        """The labels, sorted."""
        return sorted(set(self.labels))


def load_file(source: str, characters: int) -> Labelled:
    """A .parquet, .jsonl or .csv file with the columns text and label and, if there is one, split.

    Of long texts only the first `characters` are kept.
    """
    path = Path(source).expanduser()
    if not path.is_file():
        raise UserError(f"datasets = {source!r}: no such file")
    reader, found = READERS[path.suffix.lower()], Labelled(path.stem)
    parted: bool | None = None
    for where, row in _rows(reader, path):
        for column in ("text", "label"):
            if column not in row:
                there = ", ".join(map(str, row)) or "none"
                raise UserError(f"{where}: has no column {column!r}; its columns are {there}")
        parted = "split" in row if parted is None else parted
        if ("split" in row) != parted:
            raise UserError(f"{where}: a split must be given for all rows or for none")
        split = _word(row["split"], "split", where) if parted else None
        found.add(_text(row["text"], where)[:characters], _word(row["label"], "label", where), split)
    return found


def _rows(reader: Callable[[Path], Iterator[Mapping[str, Any]]], path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows of a file, each with the words that name it; what cannot be read gets one line."""
    rows = reader(path)
    number = 0
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except UserError:
            raise
        # Damage shows as errors of many families: those of the system, of json, of csv and of pyarrow.
        except (OSError, ValueError, csv.Error, RecursionError) as error:
            raise UserError(f"{path}: cannot be read after row {number} ({reason(error)})") from None
        number += 1
        if not isinstance(row, Mapping):
            raise UserError(f"{path}: row {number} is a {type(row).__name__}: must be an object with text and label")
        yield f"{path}: row {number}", row


def _text(value: Any, where: str) -> str:
    """A text; null is one with nothing in it."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{where}: 'text' is a {type(value).__name__}: must be text")
    return value


def _word(value: Any, column: str, where: str) -> str:
    """A label or a split as a word; numbers are words too."""
    if isinstance(value, bool | int | float | str) and str(value):
        return str(value)
    given = "missing" if value is None or value == "" else f"a {type(value).__name__}"
    raise UserError(f"{where}: {column!r} is {given}: must be a word or a number")


def _read_jsonl(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield json.loads(line)


def _read_csv(path: Path) -> Iterator[Mapping[str, Any]]:
    csv.field_size_limit(LONGEST_FIELD)
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, strict=True)
        for row in rows:
            # A row that is too long or too short has None among its keys or values.
            if None in row or None in row.values():
                raise UserError(f"{path}: line {rows.line_num} has not as many fields as the header")
            yield row


def _read_parquet(path: Path) -> Iterator[Mapping[str, Any]]:
    parquet = package("pyarrow.parquet", f"datasets = {str(path)!r}")
    with parquet.ParquetFile(path) as file:
        wanted = [name for name in file.schema_arrow.names if name in ("text", "label", "split")]
        if not {"text", "label"} <= set(wanted):
            # Nothing of it is read, but its first row says what is missing.
            wanted = file.schema_arrow.names
        for batch in file.iter_batches(batch_size=1024, columns=wanted):
            yield from batch.to_pylist()


READERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
}
