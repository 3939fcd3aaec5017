"""Labelled texts: from files with the columns text and label, of SAEBench (from the hub), and of sae-probes."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from sampled_sae.utils.errors import UserError
from sampled_sae.utils.third_party import package, packaged_file, reason, stream

SPLITS = ("train", "test")
LONGEST_FIELD = 2**31 - 1  # of a .csv file; the default, 128 KiB, is too small for documents


@dataclass(slots=True)
class Labelled:
    """One dataset: texts with their labels, those without any text left out."""

    name: str
    source: str = ""  # collection that it was made of, for datasets that are not independent; its name by default
    texts: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    splits: list[str] | None = None  # train or test for each text; none for a dataset that is still to be split
    groups: list[str] | None = None  # a second label, over which the texts of a class are drawn evenly
    blank: int = 0  # texts that were left out because there is nothing in them
    repeated: int = 0  # texts left out because the same text was there before: it could be on both sides of a split
    other_split: int = 0  # texts that were left out because they belong to neither train nor test
    _seen: set[str] = field(default_factory=set)

    def add(self, text: str, label: str, split: str | None = None, group: str | None = None) -> bool:
        """Add a text, or count it as left out; whether it was added. All texts or none have splits and groups."""
        before = len(self.texts)
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
        return len(self.texts) > before

    @property
    def classes(self) -> list[str]:
        """The labels, sorted."""
        return sorted(set(self.labels))


# ---- files ------------------------------------------------------------------------------------------


def check_files(sources: Iterable[str]) -> None:
    """Raise an error for the first file that is not there; other names are those of hub datasets."""
    for source in sources:
        if Path(source).suffix.lower() in READERS and not Path(source).expanduser().is_file():
            raise UserError(f"datasets = {source!r}: no such file")


def load_file(source: str, characters: int) -> Labelled:
    """A .parquet, .jsonl or .csv file with the columns text and label and, if there is one, split.

    Of long texts only the first `characters` are kept.
    """
    check_files([source])
    path = Path(source).expanduser()
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
        text = "" if row["text"] is None else row["text"]
        if not isinstance(text, str):
            raise UserError(f"{where}: 'text' is a {type(text).__name__}: must be text")
        split = _word(row["split"], "split", where) if parted else None
        found.add(text[:characters], _word(row["label"], "label", where), split)
    return found


def _rows(reader: Callable[[Path], Iterator[Mapping[str, Any]]], path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows of a file, each with the words that name it; what cannot be read gets one line."""
    number = 0
    try:
        for number, row in enumerate(reader(path), start=1):
            if not isinstance(row, Mapping):
                kind = type(row).__name__
                raise UserError(f"{path}: row {number} is a {kind}: must be an object with text and label")
            yield f"{path}: row {number}", row
    except UserError:
        raise
    # Damage shows as errors of many families: those of the system, of json, of csv and of pyarrow.
    except (OSError, ValueError, csv.Error, RecursionError) as error:
        raise UserError(f"{path}: cannot be read after row {number} ({reason(error)})") from None


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
            # Nothing of it is read, but the error for its first row names what is missing.
            wanted = file.schema_arrow.names
        for batch in file.iter_batches(batch_size=1024, columns=wanted):
            yield from batch.to_pylist()


READERS = {".parquet": _read_parquet, ".jsonl": _read_jsonl, ".csv": _read_csv}


# ---- the hub ----------------------------------------------------------------------------------------

CODE_SKIPPED = 150  # characters at the start of a code file that are left out: often a licence
CODE_SHORTEST = CODE_SKIPPED + 3 * 128  # code files that are not longer than this are left out
CODE_ENDINGS = {".c": "C", ".h": "C", ".html": "HTML", ".java": "Java", ".py": "Python"} | dict.fromkeys(
    (".php", ".php3", ".php4", ".php5", ".phps", ".phpt"), "PHP"
)
"""Language by file name ending, as that dataset determines it."""


@dataclass(frozen=True, slots=True)
class Columns:
    """A dataset with a train and a test split, which are read whole."""

    source: str
    classes: tuple[str, ...]
    text: str
    label: str
    group: str | None = None  # column over which the texts of a class are drawn evenly


BIOS, REVIEWS = "LabHC/bias_in_bios", "canrager/amazon_reviews_mcauley_1and5"
CODE, EUROPARL = "codeparrot/github-code", "Helsinki-NLP/europarl"
COLUMNS = {
    f"{BIOS}_class_set1": Columns(BIOS, ("0", "1", "2", "6", "9"), "hard_text", "profession", "gender"),
    f"{BIOS}_class_set2": Columns(BIOS, ("11", "13", "14", "18", "19"), "hard_text", "profession", "gender"),
    f"{BIOS}_class_set3": Columns(BIOS, ("20", "21", "22", "25", "26"), "hard_text", "profession", "gender"),
    REVIEWS: Columns(REVIEWS, ("1", "2", "3", "5", "6"), "text", "category", "rating"),
    f"{REVIEWS}_sentiment": Columns(REVIEWS, ("1.0", "5.0"), "text", "rating"),
    "fancyzhx/ag_news": Columns("fancyzhx/ag_news", ("0", "1", "2", "3"), "text", "label"),
}
CODE_CLASSES = ("C", "Python", "HTML", "Java", "PHP")
PAIRS = {"en": "en-fr", "fr": "fr-it", "de": "de-en", "es": "es-fr", "nl": "nl-pt"}  # the subset of each language


def _load_columns(name: str, texts_a_class: int, characters: int) -> Labelled:
    known = COLUMNS[name]
    found = Labelled(name, known.source)
    for split in ("train", "test"):
        for row in _stream(name, known.source, split=split):
            label = _cell(row, known.label, name)
            if label in known.classes:
                group = None if known.group is None else _cell(row, known.group, name)
                found.add(_cell(row, known.text, name)[:characters], label, split, group)
    return found


def _load_code(name: str, texts_a_class: int, characters: int) -> Labelled:
    found, counts = Labelled(name), Counter[str]()
    # Newer versions of `datasets` do not run the script that it comes with; its files are plain parquet.
    for row in _stream(name, "parquet", data_files=f"hf://datasets/{name}/data/train-*.parquet", split="train"):
        label = CODE_ENDINGS.get(PurePosixPath(_cell(row, "path", name)).suffix, "")
        code = _cell(row, "content", name)
        if label in CODE_CLASSES and counts[label] < texts_a_class and len(code) > CODE_SHORTEST:
            counts[label] += found.add(code[CODE_SKIPPED:][:characters], label)
            if all(counts[language] >= texts_a_class for language in CODE_CLASSES):
                break
    return found


def _load_europarl(name: str, texts_a_class: int, characters: int) -> Labelled:
    found, counts = Labelled(name), Counter[str]()
    for language, pair in PAIRS.items():
        for row in _stream(name, name, pair, split="train"):
            counts[language] += found.add(_cell(row["translation"], language, name)[:characters], language)
            if counts[language] >= texts_a_class:
                break
    return found


HUB = {**dict.fromkeys(COLUMNS, _load_columns), CODE: _load_code, EUROPARL: _load_europarl}
"""SAEBench's datasets by their name there.

Code and europarl have no split and are far larger than needed: their first `texts_a_class` texts of a class are taken,
as in SAEBench."""


def _cell(row: Any, column: str, name: str) -> str:
    if column not in row:
        raise UserError(f"datasets = {name!r}: the hub's rows have no {column!r} any more; they have {', '.join(row)}")
    return "" if row[column] is None else str(row[column])


def _stream(name: str, *args: Any, **options: Any) -> Iterator[Any]:
    """The rows of a dataset, as they come over the network."""
    datasets = package("datasets", f"datasets = {name!r}")
    # The libraries below this call raise errors of many families, none of which is a bug of ours.
    try:
        rows = iter(datasets.load_dataset(*args, streaming=True, **options))
    except Exception as error:
        raise UserError(
            f"datasets = {name!r}: cannot be opened on the Hugging Face hub ({reason(error)}); "
            "files with the columns text and label need no hub"
        ) from error
    yield from stream(rows, f"datasets = {name!r}")


# ---- sae-probes -------------------------------------------------------------------------------------
# Datasets of the PyPI package sae-probes, read where it is installed; the package is not imported.

SAE_PROBES = "sae-probes"
KINDS = {"Binary Classification": "binary", "Multiclass Classification": "multiclass"}  # regression is left out
LIST = "probing_datasets_MASTER.csv.zst"
WIKIDATA = "wikidata"  # wikidatasex_or_gender, wikidata_occupation_isactor, ...
COMPOUND = "compound-words"  # high-school, living-room, ...: texts with such a word, all drawn in the same way


def _of_sae_probes(source: str) -> bool:
    """Whether a name of a dataset is one of these: `sae-probes`, or `sae-probes:` and more."""
    return source.partition(":")[0] == SAE_PROBES


def expanded(sources: Sequence[str]) -> list[str]:
    """The sources with `sae-probes`, `sae-probes:binary` and `sae-probes:multiclass` replaced by single datasets."""
    found: list[str] = []
    for source in sources:
        kind = source.partition(":")[2]
        if _of_sae_probes(source) and kind in ("", *KINDS.values()):
            found += [f"{SAE_PROBES}:{tag}" for tag, (_, own) in _list_sae_probes(source).items() if kind in ("", own)]
        else:
            found.append(source)
    return list(dict.fromkeys(found))


def _list_sae_probes(source: str) -> dict[str, tuple[Path, str]]:
    """For each dataset with classes its file and kind; `source` is named in errors."""
    path = packaged_file(SAE_PROBES, LIST, f"datasets = {source!r}")
    rows = [row for row in _read_csv_zst(path) if row.get("Data type") in KINDS]
    return {
        row["Dataset Tag"]: (path.parent / f"{row['Dataset save name']}.zst", KINDS[row["Data type"]]) for row in rows
    }


def _load_sae_probes(source: str, characters: int) -> Labelled:
    tag = source.partition(":")[2]
    known = _list_sae_probes(source)
    if tag not in known:
        some = ", ".join(f"{SAE_PROBES}:{name}" for name in ("binary", "multiclass", *list(known)[:2]))
        raise UserError(f"datasets = {source!r}: must be {SAE_PROBES}, {some} or another name of that package")
    found, path = Labelled(source, source_of(source)), known[tag][0]
    for number, row in enumerate(_read_csv_zst(path), start=1):
        if not row.get("prompt") or not row.get("target"):
            raise UserError(f"{path}: row {number} has no prompt or no target")
        found.add(row["prompt"][:characters], row["target"])
    return found


def _read_csv_zst(path: Path) -> Iterator[Mapping[str, Any]]:
    """The rows of a .csv.zst file."""
    zstandard = package("zstandard", f"datasets = {SAE_PROBES!r}")
    csv.field_size_limit(LONGEST_FIELD)
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
        return f"{SAE_PROBES}:{WIKIDATA}"
    return f"{SAE_PROBES}:{COMPOUND if '-' in tag and '_' not in tag else tag.partition('_')[0]}"


# ---- all datasets -----------------------------------------------------------------------------------


def load(sources: Sequence[str], texts_a_class: int, characters: int) -> list[Labelled]:
    """The datasets, each with a name of its own; of long texts only the first `characters` are kept.

    `texts_a_class` bounds what is read of datasets that are too large to be read whole.
    """
    sources = expanded(sources)
    datasets = [_load(source, texts_a_class, characters) for source in sources]
    names = [dataset.name for dataset in datasets]
    for dataset, source in zip(datasets, sources, strict=True):
        # Files of the same name in two folders.
        if names.count(dataset.name) > 1:
            dataset.name = source
        dataset.source = dataset.source or dataset.name
    return datasets


def _load(source: str, texts_a_class: int, characters: int) -> Labelled:
    if source in HUB:
        found = HUB[source](source, texts_a_class, characters)
    elif source.lower().endswith(tuple(READERS)):
        found = load_file(source, characters)
    elif _of_sae_probes(source):
        found = _load_sae_probes(source, characters)
    else:
        known = ", ".join((SAE_PROBES, *HUB))
        raise UserError(f"datasets = {source!r}: must be a file ending in {', '.join(READERS)}, or one of {known}")
    here = f"datasets = {source!r}"
    if not found.texts:
        raise UserError(f"{here}: holds no text ({found.blank} blank, {found.other_split} of other splits)")
    if len(found.classes) < 2:
        raise UserError(f"{here}: all labels are {found.classes[0]!r}; must have at least two classes")
    for split in SPLITS:
        if found.splits is not None and split not in found.splits:
            raise UserError(f"{here}: column 'split' has no {split!r}; must have train and test, or leave it out")
    return found
