"""Pages of the docs: every relative link and anchor leads somewhere, every page is in the navigation."""

import importlib.util
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / name for name in ("README.md", "CHANGELOG.md"))]
PAGES += [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
GENERATED = {"cli.md", "changelog.md", "contributing.md", "security.md"}


def without_code(text: str) -> str:
    return re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub and Zensical make them."""
    titles = re.findall(r"^#+ (.*)$", without_code(page.read_text(encoding="utf-8")), re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", title).lower() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if target == ROOT / "docs" / "cli.md":
            continue
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_paragraphs_are_wrapped_and_none_becomes_a_list(page):
    lines = without_code(page.read_text(encoding="utf-8")).splitlines()
    for before, line in pairwise(lines):
        # A number and a period at the start of a line begin a list, also in the middle of a sentence.
        assert not re.match(r"\s*\d+[.)] ", line) or re.search(r"(^|[.:;)*|>])\s*$", before), line
    if "results" not in page.relative_to(ROOT).as_posix():  # these are generated
        assert max(len(line) for line in lines if not re.match(r"\s*(\||<!--)", line)) <= 200


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"[\w/.-]+\.md\b", text[text.index("nav:") :]))
    there = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert listed == there | GENERATED
    assert yaml.safe_load(text)["nav"]


def test_cells_of_the_readmes_tables_are_short():
    rows = [row for row in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if row.startswith("|")]
    shown = [re.sub(r"\]\([^)]*\)", "]", cell).strip() for row in rows for cell in row.split("|")]
    assert max(map(len, shown)) <= 90, max(shown, key=len)


def test_the_cli_reference_has_all_commands():
    spec = importlib.util.spec_from_file_location("build_docs", ROOT / "tools" / "build_docs.py")
    assert spec is not None and spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    sys.modules["build_docs"] = build
    spec.loader.exec_module(build)
    page = build.cli_reference()
    for heading in ("## train", "### train: optimizer", "## sweep status", "### eval: probing", "## browse"):
        assert f"\n{heading}\n" in page
    assert "| `--d-sae INT` | Latents of each SAE. Default: 16384. |" in page
