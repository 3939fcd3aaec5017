"""Labelled datasets of the PyPI package sae-probes, read where it is installed; the package is not imported."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sampled_sae.utils.errors import UserError
from sampled_sae.utils.third_party import package, packaged_file, reason

NAME = "sae-probes"
KINDS = {"Binary Classification": "binary", "Multiclass Classification": "multiclass"}  # regression is left out
LIST = "probing_datasets_MASTER.csv.zst"
WIKIDATA = "wikidata"  # wikidatasex_or_gender, wikidata_occupation_isactor, ...
COMPOUND = "compound-words"  # high-school, living-room, ...: texts with such a word, all drawn in the same way


def belongs(source: str) -> bool:
    """Whether a name of a dataset is one of these: `sae-probes`, or `sae-probes:` and more."""
    return source.partition(":")[0] == NAME


def expanded(sources: Sequence[str]) -> list[str]:
    """The sources with `sae-probes`, `sae-probes:binary` and `sae-probes:multiclass` replaced by single datasets."""
    found: list[str] = []
    for source in sources:
        kind = source.partition(":")[2]
        if belongs(source) and kind in ("", *KINDS.values()):
            found += [f"{NAME}:{tag}" for tag, (_, own) in listed(source).items() if kind in ("", own)]
        else:
            found.append(source)
    return list(dict.fromkeys(found))


def listed(source: str) -> dict[str, tuple[Path, str]]:
    """For each dataset with classes its file and kind; `source` is named in errors."""
    path = packaged_file(NAME, LIST, f"datasets = {source!r}")
    rows = [row for row in read_rows(path) if row.get("Data type") in KINDS]
    return {
        row["Dataset Tag"]: (path.parent / f"{row['Dataset save name']}.zst", KINDS[row["Data type"]]) for row in rows
    }


def texts(source: str) -> Iterator[tuple[str, str]]:
    """Texts and labels of one dataset."""
    tag = source.partition(":")[2]
    known = listed(source)
    if tag not in known:
        some = ", ".join(f"{NAME}:{name}" for name in ("binary", "multiclass", *list(known)[:2]))
        raise UserError(f"datasets = {source!r}: must be {NAME}, {some} or another name of that package")
    path = known[tag][0]
    for number, row in enumerate(read_rows(path), start=1):
        if not row.get("prompt") or not row.get("target"):
            raise UserError(f"{path}: row {number} has no prompt or no target")
        yield row["prompt"], row["target"]


def read_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """The rows of a .csv.zst file."""
    zstandard = package("zstandard", f"datasets = {NAME!r}")
    csv.field_size_limit(2**31 - 1)
    try:
        frame = zstandard.ZstdDecompressor().decompressobj()
        text = frame.decompress(path.read_bytes()).decode("utf-8")
        if not frame.eof:
            raise ValueError("the end of the file is missing")
        yield from csv.DictReader(io.StringIO(text, newline=""))
    except (OSError, ValueError, csv.Error, zstandard.ZstdError) as error:
        raise UserError(f"{path}: cannot be read ({reason(error)})") from None


def source_of(source: str) -> str:
    """Collection that a dataset was made of: the first word of its name, but for a few.

    Datasets of one collection share texts or labels, so their results are not independent.
    """
    tag = source.partition(":")[2]
    if tag.startswith(WIKIDATA):
        return f"{NAME}:{WIKIDATA}"
    return f"{NAME}:{COMPOUND if '-' in tag and '_' not in tag else tag.partition('_')[0]}"
