"""Stage the docs site: copy docs/, add the generated pages, and check every relative link and anchor.

    python tools/build_docs.py            # stage into build/docs; `make docs` then builds the site from it
    python tools/build_docs.py --finish   # after that: the site loads nothing from the network

Pages are plain Markdown that also reads well on a code host, so they link to files of the repository by relative paths.
In the staged copy these links point to pages that are part of the site (CHANGELOG.md, CONTRIBUTING.md, ...) or to
copies of the files.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from sampled_sae import cli
from sampled_sae.cli.help import Group, Option, groups, titled

ROOT = Path(__file__).parents[1]
DOCS, STAGE, SITE = ROOT / "docs", ROOT / "build" / "docs", ROOT / "site"
SHIM = "https://unpkg.com/iframe-worker/shim"
"""What the theme loads on pages that are opened from disk, for the search."""
PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
"""Files outside of docs/ that are pages of the site."""
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")


def stage() -> list[str]:
    """Write the staged copy; returns the broken links."""
    shutil.rmtree(STAGE, ignore_errors=True)
    shutil.copytree(DOCS, STAGE)
    problems = []
    for page in sorted(DOCS.rglob("*.md")):
        relative = page.relative_to(DOCS)
        problems += write_page(page, STAGE / relative)
    for name, target in PAGES.items():
        problems += write_page(ROOT / name, STAGE / target)
    (STAGE / "cli.md").write_text(cli_reference(), encoding="utf-8")
    return problems


def write_page(source: Path, target: Path) -> list[str]:
    """Copy a page with links that hold in the staged copy; returns those that lead nowhere."""
    text, problems = source.read_text(encoding="utf-8"), []
    depth = len(target.relative_to(STAGE).parts) - 1

    def moved(found: re.Match[str]) -> str:
        before, link, after = found.groups()
        if re.match(r"[a-z]+:|#", link):
            return found[0]
        path, _, anchor = link.partition("#")
        file = (source.parent / path).resolve()
        if not file.exists() and file != DOCS / "cli.md":
            problems.append(f"{source.relative_to(ROOT)}: {link}: no such file")
            return found[0]
        return f"{before}{'../' * depth}{inside(file)}{'#' + anchor if anchor else ''}{after}"

    parts = re.split(r"((?:^```|^~~~).*?^(?:```|~~~))", text, flags=re.M | re.S)  # code is left as it is
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(part if n % 2 else LINK.sub(moved, part) for n, part in enumerate(parts)), "utf-8")
    return problems


def inside(file: Path) -> str:
    """The path of a file in the staged copy; files that are not part of docs/ are copied."""
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS).as_posix()
    name = file.relative_to(ROOT).as_posix()
    if name in PAGES:
        return PAGES[name]
    if name == "README.md":
        return "index.md"
    copy = STAGE / "files" / name
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(file, copy, dirs_exist_ok=True) if file.is_dir() else shutil.copy(file, copy)
    return f"files/{name}"


# ---- CLI reference -----------------------------------------------------------------------------------


def cli_reference() -> str:
    """The page of all commands, from their parsers."""
    lines = ["# CLI reference", "", "Made from the parsers; `sampled-sae COMMAND --help-all` prints the same.", ""]
    for name, listed in cli.COMMANDS.items():
        command = cli.load(name)
        default = command.defaults([]) if hasattr(command, "defaults") else None
        own, *others = groups(command, default)
        lines += [f"## {name}", "", f"{own.text} {own.details}".strip().replace("[", "\\["), "", "```sh"]
        lines += [f"sampled-sae {name} {line}" for line in command.EXAMPLES]
        lines.append("```")
        for title, options in titled(own, getattr(command, "GROUPS", {})):
            lines += ["", f"**{title}**", "", *table(options)]
        for group in others:
            lines += ["", f"### {name}: {group.name}", "", paragraphs(group), "", *table(group.options)]
        lines.append("")
        assert listed.summary
    return "\n".join(lines)


def paragraphs(group: Group) -> str:
    return "\n\n".join(filter(None, (group.text, group.details))).replace("[", "\\[")


def table(options: Sequence[Option]) -> list[str]:
    """Flags with their descriptions."""
    rows = ["| option | meaning |", "|---|---|"]
    for option in options:
        flag = f"{option.flag} {option.metavar}".strip()
        rows.append(f"| `{flag.replace('|', ' or ')}` | {plain(option.text)} |")
    return rows


def plain(text: str) -> str:
    """Text that Markdown shows as it is, in a cell of a table."""
    return re.sub(r"([|\[\]<])", r"\\\1", text)


def finish() -> list[str]:
    """Replace the theme's one script from the network by our own; returns the pages that still name another."""
    problems = []
    for page in sorted(SITE.rglob("*.html")):
        depth = len(page.relative_to(SITE).parts) - 1
        text = page.read_text(encoding="utf-8").replace(SHIM, f"{'../' * depth}assets/file-worker.js")
        page.write_text(text, encoding="utf-8")
        loaded = re.findall(r"""<(?:script|link|img)[^>]+(?:src|href)=["']?(https?://[^"' >]+)""", text)
        problems += [f"{page.relative_to(SITE)}: loads {address}" for address in loaded]
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--finish", action="store_true", help="make the built site independent of the network")
    problems = finish() if parser.parse_args().finish else stage()
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
