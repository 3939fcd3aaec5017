"""SAEBench's datasets on the Hugging Face hub, streamed; classes, columns and cuts are SAEBench's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from sampled_sae.data.foreign import package, reason, stream
from sampled_sae.errors import UserError
from sampled_sae.evals.probing.data import Labelled

CODE_SKIPPED = 150
"""Characters at the start of a code file that are left out: often a licence."""
CODE_SHORTEST = CODE_SKIPPED + 3 * 128
"""Code files that are not longer than this are left out."""
CODE_ENDINGS = {".c": "C", ".h": "C", ".html": "HTML", ".java": "Java", ".py": "Python"} | dict.fromkeys(
    (".php", ".php3", ".php4", ".php5", ".phps", ".phpt"), "PHP"
)
"""How that dataset tells the language; its files themselves do not say."""


@dataclass(frozen=True, slots=True)
class Columns:
    """A dataset with a train and a test split, which are read whole."""

    source: str
    classes: tuple[str, ...]
    text: str
    label: str
    group: str | None = None
    """Column over which the texts of a class are drawn evenly."""


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
PAIRS = {"en": "en-fr", "fr": "fr-it", "de": "de-en", "es": "es-fr", "nl": "nl-pt"}
"""The subset that each language is taken from."""


def load_hub(name: str, texts_a_class: int, characters: int) -> Labelled:
    """One of SAEBench's datasets by its name there; of long texts only the first `characters` are kept.

    Code and europarl have no split and are far larger than needed: their first `texts_a_class` texts of a class are
    taken, as in SAEBench.
    """
    return HUB[name](name, texts_a_class, characters)


def _load_columns(name: str, texts_a_class: int, characters: int) -> Labelled:
    known, found = COLUMNS[name], Labelled(name)
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
            _add_counted(found, counts, code[CODE_SKIPPED:][:characters], label)
            if all(counts[language] >= texts_a_class for language in CODE_CLASSES):
                break
    return found


def _load_europarl(name: str, texts_a_class: int, characters: int) -> Labelled:
    found, counts = Labelled(name), Counter[str]()
    for language, pair in PAIRS.items():
        for row in _stream(name, name, pair, split="train"):
            _add_counted(found, counts, _cell(row["translation"], language, name)[:characters], language)
            if counts[language] >= texts_a_class:
                break
    return found


HUB: dict[str, Callable[[str, int, int], Labelled]] = {
    **dict.fromkeys(COLUMNS, _load_columns),
    CODE: _load_code,
    EUROPARL: _load_europarl,
}


def _add_counted(found: Labelled, counts: Counter[str], text: str, label: str) -> None:
    """Add a text, and count it only if it was not left out."""
    before = len(found.texts)
    found.add(text, label)
    counts[label] += len(found.texts) - before


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
