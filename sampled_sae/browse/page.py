"""The page itself: its frame, its look and its code in one HTML file; the numbers are in the files beside it."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from sampled_sae.report.text import in_html

CODE = ("data.js", "marks.js", "table.js", "latent.js", "browse.js")
HERE = Path(__file__).parent


def html_page(title: str, summary: str, folder: str) -> str:
    """The whole page as text; `folder` is where its data lies, beside it."""
    base = (HERE.parent / "report" / "page.css").read_text(encoding="utf-8")
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
