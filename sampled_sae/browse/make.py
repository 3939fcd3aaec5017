"""A saved SAE -> its page: what the text shows, what evaluations have left in its folder, and what the page says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from sampled_sae.browse.collect import Browsed, Told, collect
from sampled_sae.browse.config import BrowseConfig
from sampled_sae.browse.files import Page
from sampled_sae.browse.known import Density, Meaning, read_density, read_meanings, read_unique
from sampled_sae.data.layers import LanguageModel
from sampled_sae.evals.firing import FIRING
from sampled_sae.report.text import shown
from sampled_sae.sae import SAE


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
    density, meanings = read_density(folder, sae.m), read_meanings(folder)
    unique = {} if compare is None else read_unique(compare, folder, sae.m)
    other_meanings = {} if other_folder is None else read_meanings(other_folder)
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
        "summary": shown(f"{sae.m:,} latents of {model.name}, layer {layer}"),
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
    of, here = other.metadata.get("layer"), other.metadata.get("model_name")
    return of in (None, layer) and here in (None, sae.metadata.get("model_name"))


def _facts(
    sae: SAE, model: LanguageModel, layer: int, text: str, browsed: Browsed, meanings: dict[int, Meaning]
) -> list[tuple[str, str]]:
    live = int((browsed.firings.fired > 0).sum())
    n, length = browsed.contexts.shape
    return [
        ("Model", f"{model.name}, layer {layer}"),
        ("Latents", f"{sae.m:,}, of width {sae.d:,}"),
        ("Text", text),
        ("Read", f"{browsed.read:,} tokens in {n:,} contexts of {length}"),
        ("Firing there", f"{live:,} latents, {len(browsed.firings.value) / browsed.read:.1f} a token"),
        ("Explained", f"{len(meanings):,} latents"),
    ]


def _notes(browsed: Browsed, meanings: dict[int, Meaning], other: str | None, same: bool) -> list[str]:
    found = []
    if not meanings:
        found.append("No latent is explained yet: sampled-sae eval --evals autointerp explains some of them.")
    if browsed.high_norm:
        found.append(f"{browsed.high_norm:,} tokens of very high norm were left out: they would top most latents.")
    if not same:
        found.append(f"{other} is of another layer or model: its latents were not read on this text.")
    return found
