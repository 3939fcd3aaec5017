"""The page itself: its frame, its look and its code in one HTML file; the numbers are in the files beside it."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from sampled_sae.browser.collect import BrowseConfig, Browsed, Told, collect
from sampled_sae.browser.files import Page, data_files
from sampled_sae.evals.results import FIRING, Density, Explanation, read_density, read_explanations, read_unique
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE
from sampled_sae.utils.files import make_folder, new_folder, write_text
from sampled_sae.utils.measures import in_html, shown

CODE = ("data.js", "marks.js", "table.js", "latent.js", "browse.js")
HERE = Path(__file__).parent


def html_page(title: str, summary: str, folder: str) -> str:
    """The whole page as text; `folder` is where its data lies, beside it."""
    base = (HERE.parent / "reporting" / "page.css").read_text(encoding="utf-8")
    css = _inner(_colours(base) + (HERE / "browse.css").read_text(encoding="utf-8"))
    code = _inner('"use strict";\n' + "".join((HERE / name).read_text(encoding="utf-8") for name in CODE))
    # Only this style and this code, and scripts that lie beside the page: nothing from the network, nothing inline.
    policy = (
        f"default-src 'none'; script-src 'self' file: {_hash(code)}; style-src {_hash(css)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return f"""<!doctype html>
<html lang="en" data-folder="{in_html(folder)}"><head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="referrer" content="no-referrer">
<title>{in_html(title)}</title>
<link rel="icon" href="data:,">
<style>{css}</style>
</head><body>
<header>
<div class="name"><h1>{in_html(title)}</h1><p>{in_html(summary)}</p></div>
<form class="controls" role="search">
<input type="search" id="query" placeholder="Search" autocomplete="off" spellcheck="false" aria-label="Search latents"
 aria-describedby="hint" title="Press / to search">
<label>in <select id="scope"><option value="all">all</option><option value="text">explanations</option>
<option value="tokens">tokens</option></select></label>
<label>sorted by <select id="sort"></select></label>
<button type="button" id="turn" aria-label="Turn the order round"></button>
<label class="check"><input type="checkbox" id="silent"> silent ones too</label>
<a href="#about" id="to-about">About</a>
</form>
<p id="hint" hidden>Words of an explanation, a token (chem* for what begins so), or #12 for a latent.</p>
</header>
<main>
<section id="list" aria-label="Latents">
<p id="count" role="status"></p>
<div id="heads" role="presentation"></div>
<div id="rows" role="listbox" tabindex="0" aria-label="Latents"><div id="all"></div><p id="none" hidden></p></div>
</section>
<article id="view" tabindex="-1" aria-live="off"><p class="note" id="wait">Loading …</p></article>
</main>
<noscript><p>This page needs JavaScript: it reads its numbers from the files beside it.</p></noscript>
<script>{code}</script>
</body></html>
"""


def _colours(css: str) -> str:
    """The part of the other pages' style that names colours: all before the first rule of an element."""
    return css[: css.index("* { box-sizing")]


def _inner(text: str) -> str:
    return f"\n{text}"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


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


def make_page(
    folder: Path,
    sae: SAE,
    model: LanguageModel,
    layer: int,
    contexts: Tensor,
    settings: BrowseConfig,
    text: str,
    other_folder: Path | None = None,
    other: SAE | None = None,
    compare: Path | None = None,
    told: Told | None = None,
) -> Page:
    """Read contexts [n, L] of `text` and put together all that is known of the SAE in `folder`."""
    # What lies on disk first: damage there must not be noticed after the work.
    density, meanings = read_density(folder, sae.d_sae), read_explanations(folder, sae.d_sae)
    unique = {} if compare is None else read_unique(compare, folder, sae.d_sae)
    other_meanings = {} if other_folder is None else read_explanations(other_folder)
    same = other is None or _same_place(sae, other, layer)
    browsed = collect(sae, model, layer, contexts, settings, other, same, told)
    counted = density or Density(browsed.firings.fired, browsed.read)
    name = None if other_folder is None else other_folder.resolve().name
    notes = [*browsed.notes, *_notes(browsed, meanings, name, same)]
    if compare is not None and not unique:
        why = "explanations of both SAEs or an embedder were missing, or each explained latent has an equal"
        notes.append(f"The comparison lists no unique latents: {why}.")
    facts = _facts(sae, model, layer, text, browsed, meanings)
    facts.append(("Density", f"by {FIRING}, {counted.tokens:,} tokens" if density else "counted in the same text"))
    about: dict[str, Any] = {
        "title": shown(folder.resolve().name),
        "summary": shown(f"{sae.d_sae:,} latents of {model.name}, layer {layer}"),
        "facts": [[title, shown(value)] for title, value in facts],
        "notes": [shown(note) for note in notes],
        "read": browsed.read,
        "densityTokens": counted.tokens,
        "bands": settings.bands,
        "other": None if name is None else shown(name),
    }
    return Page(browsed, counted, about, meanings, other_meanings, unique)


def _same_place(sae: SAE, other: SAE, layer: int) -> bool:
    """Whether the other SAE reads the same activations, as far as it says."""
    of, here = other.cfg.metadata.get("layer"), other.cfg.metadata.get("model_name")
    return of in (None, layer) and here in (None, sae.cfg.metadata.get("model_name"))


def _facts(
    sae: SAE, model: LanguageModel, layer: int, text: str, browsed: Browsed, meanings: dict[int, Explanation]
) -> list[tuple[str, str]]:
    live = int((browsed.firings.fired > 0).sum())
    n, length = browsed.contexts.shape
    return [
        ("Model", f"{model.name}, layer {layer}"),
        ("Latents", f"{sae.d_sae:,}, of width {sae.d_in:,}"),
        ("Text", text),
        ("Read", f"{browsed.read:,} tokens in {n:,} contexts of {length}"),
        ("Firing there", f"{live:,} latents, {len(browsed.firings.value) / browsed.read:.1f} a token"),
        ("Explained", f"{len(meanings):,} latents"),
    ]


def _notes(browsed: Browsed, meanings: dict[int, Explanation], other: str | None, same: bool) -> list[str]:
    found = []
    if not meanings:
        found.append("No latent is explained yet: sampled-sae eval --evals autointerp explains some of them.")
    if browsed.high_norm:
        found.append(f"{browsed.high_norm:,} tokens of very high norm were left out: they would top most latents.")
    if not same:
        found.append(f"{other} is of another layer or model: its latents were not read on this text.")
    return found
