"""The lines of a training's log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Log = dict[str, list[dict[str, Any]]]  # the log's lines of each run, by its name


def read_log(path: Path) -> tuple[Log, str]:
    """The log's lines by run, and a sentence on what is missing in it."""
    log: Log = {}
    damaged = 0
    if not path.exists():
        return log, f"The curves are missing: there is no {path.name} in the folder."
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        return log, f"The curves are missing: {path.name} cannot be read ({error.strerror})."
    for text in filter(str.strip, lines):
        try:
            line = json.loads(text)
            log.setdefault(str(line["sae"]), []).append(line)
        except (json.JSONDecodeError, TypeError, KeyError):
            damaged += 1  # a run that was stopped may leave half a line
    return log, f"Unreadable lines of {path.name} that were left out: {damaged}." if damaged else ""
