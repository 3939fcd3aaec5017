"""The page of an SAE's latents: everything known about them, written as one HTML file with data files beside it."""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from sampled_sae.browser.collect import BrowseConfig, Progress, collect
from sampled_sae.browser.files import MEANINGS, Page, data_files
from sampled_sae.browser.neuronpedia import NeuronpediaConfig, write_neuronpedia
from sampled_sae.browser.serve import TextReader, check_port, serve
from sampled_sae.config import Bound, Config, read_file, write_file
from sampled_sae.data.contexts import TextConfig, contexts
from sampled_sae.data.text import TextList, TextSource
from sampled_sae.evals.results import FIRING, Density, fingerprint, read_density, read_explanations, read_unique
from sampled_sae.evals.session import layer_of, named
from sampled_sae.formats import hub, results_folder
from sampled_sae.hooks import Where, hook_title, saved_hook
from sampled_sae.models import load
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.reporting import palette
from sampled_sae.reporting.collect import BROWSER
from sampled_sae.reporting.pages import render, trusted
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import check_writable, make_folder, new_folder, remove_leftovers, write_text
from sampled_sae.utils.measures import number, shown
from sampled_sae.utils.progress import Stages
from sampled_sae.utils.system import usable_device

CODE = ("data.js", "marks.js", "table.js", "latent.js", "pair.js", "text.js", "browse.js")
HERE = Path(__file__).parent


def html_page(title: str, summary: str, data_folder: str, served: bool = False) -> str:
    """The whole page as text; `data_folder` is the name of the folder beside it with its data.

    A page that is `served` may send texts to its server.
    """
    tips = HERE.parent / "reporting"
    styles = (palette.css(), *(path.read_text(encoding="utf-8") for path in (HERE / "browse.css", tips / "tips.css")))
    scripts = (path.read_text(encoding="utf-8") for path in (tips / "tips.js", *(HERE / name for name in CODE)))
    parts = {"css": trusted("\n" + "".join(styles)), "code": trusted('\n"use strict";\n' + "".join(scripts))}
    return render("browser.html", HERE, title=title, summary=summary, data_folder=data_folder, served=served, **parts)


FOLDER = re.compile(r"data-[0-9a-f]{12}")  # how folders of data are called: by what is in them
DATA = Bound("must be the name of a folder of data", lambda name: FOLDER.fullmatch(name) is not None)

LIMIT = Bound("must be a finite number", lambda value: 0 <= value < math.inf)


@dataclass(frozen=True, slots=True)
class Record(Config):
    """browser.json beside a page: what a report links it by, and what a server needs to know of it."""

    sae: str  # folder of the SAE, relative to the page's
    weights: str  # fingerprint of the SAE
    title: str
    summary: str
    data: Annotated[str, DATA]  # folder of the data
    limit: Annotated[float, LIMIT] | None = None  # norm above which tokens were left out; None for none


def read_record(out: Path, folder: Path) -> Record:
    """The record of the page of the SAE in `folder` that lies in `out`."""
    path = out / BROWSER
    if not path.exists():
        raise UserError(f"out = {str(out)!r}: holds no page of latents; name a text with --text to make one")
    record = Record.from_dict(read_file(path, "browser"), path)
    if not (out / record.data).is_dir():
        raise UserError(f"{out / record.data}: no such folder; name a text with --text to make the page again")
    if record.weights != fingerprint(folder):
        raise UserError(f"out = {str(out)!r}: holds the page of another SAE, {record.title}")
    return record


def write_browser(page: Page, tokenizer: Any, out: Path, progress: Progress | None = None) -> Path:
    """Write the page into `out` and return its path.

    The data is complete in a folder of its own before the page that names it replaces an older one. Only then is the
    older one's data removed; nothing else in `out` is touched.
    """
    remove_leftovers(make_folder(out), "data-*")
    for name in ("index.html", BROWSER):
        remove_leftovers(out, name)
    report = progress or (lambda what, done, total: None)
    files = data_files(page, tokenizer)
    name, text = next(files)
    folder = f"data-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    with new_folder(out / folder) as temporary:
        (temporary / f"{name}.js").write_text(text, encoding="ascii")
        for done, (name, text) in enumerate(files):
            (temporary / f"{name}.js").write_text(text, encoding="ascii")
            if done % 16 == 0:  # files are small
                report("writing: files", min(done, page.chunks), page.chunks)
    report("writing: files", page.chunks, page.chunks)
    title, summary = page.about["title"], page.about["summary"]
    if page.folder is not None:
        sae = Path(os.path.relpath(page.folder.resolve(), out.resolve())).as_posix()
        record = Record(sae, fingerprint(page.folder), title, summary, folder, number(page.browsed.limit))
        write_file(out / BROWSER, "browser", record.to_dict())
    write_text(out / "index.html", html_page(title, summary, folder))
    for old in out.iterdir():
        if old.name != folder and FOLDER.fullmatch(old.name) and old.is_dir() and not old.is_symlink():
            shutil.rmtree(old, ignore_errors=True)
    return out / "index.html"


def make_page(
    sae: SAE,
    model: LanguageModel,
    layer: Where,
    contexts: Tensor,
    config: BrowseConfig,
    *,
    text: str,
    other: SAE | None = None,
    comparison: Path | None = None,
    progress: Progress | None = None,
) -> Page:
    """Read contexts [n, L] of `text` and collect everything known about the latents of an SAE.

    `sae` and `other`, a second SAE of the same width, are loaded from folders, where evaluations left explanations and
    densities. `comparison` is a compare.json, or its folder, that lists unique latents.
    """
    folder = _folder(sae)
    # Files are read first, so that damage is found before the work.
    density, meanings = read_density(folder, sae.d_sae), read_explanations(folder, sae.d_sae)
    unique = {} if comparison is None else read_unique(comparison, folder, sae.d_sae)
    other_meanings = {} if other is None else read_explanations(_folder(other))
    # Whether the other SAE reads the same activations, as far as its metadata shows.
    its = {} if other is None else other.cfg.metadata
    same = saved_hook(its) in (None, layer) and its.get("model_name") in (None, sae.cfg.metadata.get("model_name"))
    browsed = collect(sae, model, layer, contexts, config, other, same, progress)
    counted = density or Density(browsed.firings.fired, browsed.read)
    name = None if other is None else _folder(other).resolve().name
    notes = list(browsed.notes)
    if not meanings:
        notes.append("No latent is explained yet: sampled-sae eval --evals autointerp explains some of them.")
    if browsed.high_norm:
        notes.append(f"{browsed.high_norm:,} high-norm tokens were left out: most latents fire on them.")
    if not same:
        notes.append(f"{name} is of another hook point or model: its latents were not read on this text.")
    if comparison is not None and not unique:
        why = "explanations of both SAEs or an embedder were missing, or each explained latent has an equal"
        notes.append(f"The comparison lists no unique latents: {why}.")
    n, length = browsed.contexts.shape
    live = int((browsed.firings.fired > 0).sum())
    facts = {
        "Model": f"{model.name}, {hook_title(layer)}",
        "Latents": f"{sae.d_sae:,}, of width {sae.d_in:,}",
        "Text": text,
        "Read": f"{browsed.read:,} tokens in {n:,} contexts of {length}",
        "Firing there": f"{live:,} latents, {len(browsed.firings.value) / browsed.read:.1f} per token",
        "Explained": f"{len(meanings):,} latents",
        "Density": f"by {FIRING}, {counted.tokens:,} tokens" if density else "counted in the same text",
    }
    about: dict[str, Any] = {
        "title": shown(folder.resolve().name),
        "summary": shown(f"{sae.d_sae:,} latents of {model.name}, {hook_title(layer)}"),
        "facts": [[title, shown(value)] for title, value in facts.items()],
        "notes": [shown(note) for note in notes],
        "read": browsed.read,
        "densityTokens": counted.tokens,
        "bands": config.bands,
        "meanings": MEANINGS,
        "other": None if name is None else shown(name),
    }
    return Page(browsed, counted, about, meanings, other_meanings, unique, folder)


def _folder(sae: SAE) -> Path:
    if sae.folder is None:
        raise UserError("sae: must be saved in a folder")
    return sae.folder


# ---- from a saved SAE, a model and a text to its page -----------------------------------------------


class Browser(NamedTuple):
    """The page of an SAE's latents."""

    page: Path  # its index.html
    summary: str  # how many latents fire and are explained
    notes: list[str]  # what is missing on it, and why
    neuronpedia: Path | None = None  # folder of the batch files for Neuronpedia, if they were written


def browse_sae(
    folder: Path,
    model: LanguageModel | str | Path | None,
    text: TextSource | TextList | None,
    out: Path,
    *,
    tokens: int,
    context: int,
    position: int | str | None,
    other: Path | None,
    comparison: Path | None,
    config: BrowseConfig | None,
    neuronpedia: Path | None,
    export: NeuronpediaConfig | None,
    device: str | torch.device | None,
    dtype: torch.dtype | None,
    port: int | None = None,
) -> Browser:
    """`api.browse` for SAEs on disk; all that needs no model is checked before it is loaded."""
    record = read_record(out, folder) if text is None else None
    place, settings = usable_device(device), config or BrowseConfig()
    sae, second = SAE.load(folder, place), None if other is None else SAE.load(other, place)
    name = named(sae.cfg, "model_name", model, "model", folder)
    position = layer_of(sae.cfg, position, folder)
    if comparison is not None:
        read_unique(comparison, folder, sae.d_sae)
    for written in (out, *([] if neuronpedia is None else [neuronpedia])):
        check_writable(written)
    if port is not None:
        check_port(port)
    lm = name if isinstance(name, LanguageModel) else load.load_model(name, place, dtype, [position])
    made = Browser(out / "index.html", "" if record is None else record.summary, [])
    if text is not None:
        bars = Stages()
        try:
            page = make_page(
                *(sae, lm, lm.where(position), first_contexts(sae, lm, text, tokens, context), settings),
                text=text.name,
                other=second,
                comparison=comparison,
                progress=bars,
            )
            index = write_browser(page, lm.tokenizer, out, bars)
            batches = None
            if neuronpedia is not None:
                batches = write_neuronpedia(page, sae, lm, neuronpedia, export or NeuronpediaConfig())
        except torch.cuda.OutOfMemoryError:
            sizes = f"contexts_at_once = {settings.contexts_at_once}, tokens_at_once = {settings.tokens_at_once}"
            raise UserError(f"{sizes}: out of GPU memory; lower them") from None
        finally:
            bars.close()
        made = Browser(index, _summary(page), page.about["notes"], batches)
    if port is not None:
        print("\n".join([*made.notes, made.summary]), file=sys.stderr)
        record = read_record(out, folder)
        served = html_page(record.title, record.summary, record.data, served=True)
        serve(served, out, TextReader(sae, lm, lm.where(position), record.limit), port)
    return made


def own_page(sae: SAE | str | Path) -> Path:
    """Folder of the page in an SAE's own folder."""
    own = sae.folder if isinstance(sae, SAE) else sae if hub.parse(sae) is None else None
    if own is None:
        raise UserError("out: must name a folder for the page, because this SAE is in none of yours")
    return results_folder(Path(own)) / "browser"


def _summary(page: Page) -> str:
    """How many latents fire and are explained."""
    firings = page.browsed.firings
    live = int((firings.fired > 0).sum())
    fire = f"{live:,} of {firings.d_sae:,} latents fire in {page.browsed.read:,} tokens"
    return f"{fire}; {len(page.meanings):,} are explained"


def first_contexts(sae: SAE, model: LanguageModel, text: TextSource | TextList, tokens: int, length: int) -> Tensor:
    """The text's first contexts [n, length]; all of them where they have fewer than `tokens` tokens."""
    bos = sae.cfg.metadata.get("prepend_bos")
    cut = TextConfig(length, model.bos if bos is None else bool(bos))
    count = -(-tokens // length)
    found = list(islice(contexts(text.documents(), model.tokenizer, cut), count))
    if not found:
        raise UserError(f"context = {length}: the text has no context of so many tokens")
    if len(found) < count:
        print(f"tokens = {tokens:,}: the text holds {len(found) * length:,}; all of them are read", file=sys.stderr)
    return torch.stack(found)
