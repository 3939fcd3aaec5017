"""All undamaged files, and all that reads them: one module per area."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz import data, formats, results, study, sweeps, training
from tests.fuzz.target import File, Target

AREAS = (training, results, data, sweeps, study)


def build(root: Path) -> None:
    """Write all undamaged files into an empty folder."""
    for area in AREAS:
        area.build(root)
    formats.build_formats(root)


def targets() -> list[Target]:
    """All of them."""
    found = [target for area in AREAS for target in area.targets()]
    for name, files in formats.FILES.items():
        damaged = tuple(File(file, formats.damage_of(file), "lenient") for file in files)
        found.append(Target(name, formats.folder_of(name), damaged, formats.read))
    return found
