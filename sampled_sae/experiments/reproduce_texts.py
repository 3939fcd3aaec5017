"""Labelled texts that are always there: pieces of Python's standard library, to be told by their package.

A stand-in for real probing datasets where there is no network. Which words a package uses is far easier to tell than
sentiment or a profession, so accuracies on it compare SAEs of one run and nothing else.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from sampled_sae.errors import UserError
from sampled_sae.files import make_folder, write_text

PACKAGES = ("asyncio", "email", "multiprocessing", "unittest", "xml")
LINES = 12
"""Lines of a piece, blank ones not counted."""
FEWEST = 20
"""Pieces that a package must have."""


def write_labelled(path: Path, each: int) -> Path:
    """Write rows with text, label and split, at most `each` of a package: every fifth file is there to test."""
    rows = [row for package in PACKAGES for row in _rows(package, each)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    make_folder(path.parent)
    # A file that was written anew would count as another dataset.
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)
    return path


def _rows(package: str, each: int) -> list[dict[str, str]]:
    folder = Path(sysconfig.get_paths()["stdlib"]) / package
    files = sorted(path for path in folder.rglob("*.py") if not {"test", "tests"} & set(path.parts))
    # Pieces of one file are alike: none may be on both sides.
    parts = {"test": files[::5], "train": [path for number, path in enumerate(files) if number % 5]}
    rows = []
    for split, chosen in parts.items():
        pieces = [piece for path in chosen for piece in _pieces(path)]
        most = each // 5 if split == "test" else each - each // 5
        step = max(1, len(pieces) // max(1, most))
        rows += [{"text": piece, "label": package, "split": split} for piece in pieces[::step][:most]]
    if len(rows) < min(FEWEST, each):
        raise UserError(f"datasets: {folder} has {len(rows)} pieces of text: is this Python without its library?")
    return rows


def _pieces(path: Path) -> Iterator[str]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError):  # a few files of the library are in other encodings on purpose
        return
    for start in range(0, len(lines) - LINES + 1, LINES):
        yield "\n".join(lines[start : start + LINES])
