"""The browser's folder: index.html and, beside it, the folder of its data; a new one takes the old one's place."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

from sampled_sae.browse.collect import Told
from sampled_sae.browse.files import Page, data_files
from sampled_sae.browse.page import html_page
from sampled_sae.files import make_folder, new_folder, write_text

FOLDER = re.compile(r"data-[0-9a-f]{12}")
"""How folders of data are called: by what is in them."""


def write_browser(page: Page, tokenizer: Any, out: Path, told: Told | None = None) -> Path:
    """Write the page into `out` and return its path.

    The data lies whole in a folder of its own before the page that names it takes the place of an older one. Only
    then is the older one's data removed; nothing else in `out` is touched.
    """
    make_folder(out)
    tell = told or (lambda what, done, total: None)
    files = data_files(page, tokenizer)
    name, text = next(files)
    folder = f"data-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    with new_folder(out / folder) as temporary:
        (temporary / f"{name}.js").write_text(text, encoding="ascii")
        for done, (name, text) in enumerate(files):
            (temporary / f"{name}.js").write_text(text, encoding="ascii")
            tell("writing: files", min(done, page.chunks), page.chunks)
    tell("writing: files", page.chunks, page.chunks)
    write_text(out / "index.html", html_page(page.about["title"], page.about["summary"], folder))
    for old in out.iterdir():
        if old.name != folder and FOLDER.fullmatch(old.name) and old.is_dir() and not old.is_symlink():
            shutil.rmtree(old, ignore_errors=True)
    return out / "index.html"
