"""The tutorials, executed: every block of Python and shell, in order, at the small sizes that the pages name for CI.

`<!-- ci: A => B -->` above a block replaces A by B in that block and in those that follow. `make test-docs` runs this.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
COMBINED = ["language-model", "evaluate-and-browse"]
"""The second uses what the first trained."""
PART = re.compile(r"<!-- ci: (?P<old>.*?) => (?P<new>.*?) -->|^```(?P<kind>python|sh)\n(?P<code>.*?)^```", re.M | re.S)


def script(names: list[str]) -> str:
    """One Python program with all blocks of these pages; shell commands call the command line in the same process."""
    parts, changes = [], {}
    for name in names:
        for found in PART.finditer((TUTORIALS / f"{name}.md").read_text(encoding="utf-8")):
            if found["old"]:
                changes[found["old"]] = found["new"]
                continue
            code = found["code"]
            for old, new in changes.items():
                code = code.replace(old, new)
            parts.append(code if found["kind"] == "python" else f"shell({code!r})\n")
    assert len(parts) >= 4 and all(new in "".join(parts) for new in changes.values())
    return SHELL + "\n".join(parts)


SHELL = """
import shlex
from sampled_sae import cli
from sampled_sae.models import load

loaded, load_model = {}, load.load_model

def load_once(*words, **settings):  # loading takes longer than the rest at these sizes
    key = repr((words, settings))
    if key not in loaded:
        loaded[key] = load_model(*words, **settings)
    return loaded[key]

load.load_model = load_once

def shell(block):
    for line in block.replace("\\\\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        assert words[0] == "sampled-sae", line
        try:
            cli.main(words[1:])
        except SystemExit as stop:
            assert not stop.code, (line, stop.code)

"""


@pytest.mark.parametrize("names", [["own-activations"], COMBINED, ["compare-methods"]], ids=lambda names: names[0])
def test_a_tutorial_runs(names, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", script(names)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    pages = {"own-activations": "runs/own/saes", "compare-methods": "report", "language-model": "browser"}
    assert any((tmp_path / pages[names[0]]).iterdir())


def test_every_tutorial_is_executed():
    assert {path.stem for path in TUTORIALS.glob("*.md")} == {"own-activations", *COMBINED, "compare-methods"}
