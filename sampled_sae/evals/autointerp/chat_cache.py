"""Answers of chat endpoints on disk: one line of JSON each, added as they come."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

from sampled_sae.files import make_folder, writing

NAME = "answers.jsonl"


class AnswerCache:
    """What was asked of which endpoint -> what it answered. Several processes may add to one folder."""

    def __init__(self, folder: Path | None):
        """Without a folder, answers are kept in memory alone."""
        self._answers: dict[str, str] = {}
        self._lock = threading.Lock()
        self._path = None if folder is None else make_folder(folder) / NAME
        if self._path is not None and self._path.exists():
            self._answers.update(_read(self._path))

    def __len__(self) -> int:
        return len(self._answers)

    def find(self, body: dict[str, Any], url: str) -> str | None:
        """The answer to a request's body, if it was ever given."""
        return self._answers.get(_key(body, url))

    def keep(self, body: dict[str, Any], url: str, text: str) -> None:
        """Add an answer, at once."""
        key = _key(body, url)
        with self._lock:
            self._answers[key] = text
            if self._path is not None:
                line = json.dumps({"key": key, "model": body["model"], "answer": text})
                # The newline comes first too: a line that a crash cut short then spoils no other.
                with writing(self._path), self._path.open("a", encoding="utf-8") as file:
                    file.write(f"\n{line}\n")


def _key(body: dict[str, Any], url: str) -> str:
    asked = json.dumps([url.rstrip("/"), body], sort_keys=True)
    return hashlib.sha256(asked.encode()).hexdigest()


def _read(path: Path) -> dict[str, str]:
    """All whole lines; one that was cut short is an answer that has to be asked for again."""
    answers: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            plain = json.loads(line)
            answers[str(plain["key"])] = str(plain["answer"])
        except (ValueError, LookupError, TypeError):
            continue
    return answers
