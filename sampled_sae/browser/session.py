"""From a saved SAE, a model and a text to the page of its latents."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.browser.collect import BrowseConfig
from sampled_sae.browser.files import Page
from sampled_sae.browser.neuronpedia import NeuronpediaConfig, write_neuronpedia
from sampled_sae.browser.serve import TextReader, serve
from sampled_sae.browser.write import make_page, read_record, write_browser
from sampled_sae.data.contexts import TextConfig, contexts
from sampled_sae.data.text import TextList, TextSource
from sampled_sae.evals.results import read_unique
from sampled_sae.evals.session import layer_of, named
from sampled_sae.formats import hub, results_folder
from sampled_sae.models import load
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import check_writable
from sampled_sae.utils.progress import Stages
from sampled_sae.utils.system import usable_device


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
        serve(record, out, TextReader(sae, lm, lm.where(position), record.limit), port)
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
