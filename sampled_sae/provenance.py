"""Where results come from: versions, machine, git commit."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

import numpy
import safetensors
import torch


def versions() -> dict[str, str]:
    """Versions of everything that can change a number."""
    try:
        own = metadata.version("sampled-sae")
    except metadata.PackageNotFoundError:
        own = "unknown"
    found = {
        "sampled_sae": own,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "safetensors": safetensors.__version__,
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def git_commit() -> str | None:
    """The commit that the package's code lies on, with a mark if it was changed; none outside of git."""
    here = Path(__file__).parent
    try:
        commit = _git(here, "rev-parse", "HEAD")
        return f"{commit}-dirty" if _git(here, "status", "--porcelain", "--untracked-files=no", ".") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
