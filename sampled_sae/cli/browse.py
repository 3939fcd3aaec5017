"""`sampled-sae browse`: a page on which one looks at the latents of an SAE."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from torch import Tensor

from sampled_sae.browser.collect import BrowseConfig
from sampled_sae.config import require
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.progress import Stages


@dataclass(frozen=True)
class Browse:
    """Make a page to browse the latents of an SAE: what each fires on, what it does, which are like it."""

    folder: tyro.conf.Positional[Path]
    """Folder of the SAE. Explanations, scores and densities that evaluations have left in it are shown."""
    text: str
    """Hub dataset, a file, a folder of files, or stdlib; text that was not trained on is best."""
    out: Path
    """Folder for index.html and its data."""
    other: Path | None = None
    """Folder of a second SAE of the same width, in which the nearest latents are looked for too."""
    compare: Path | None = None
    """compare.json of `sampled-sae compare`, or its folder: says which latents are unique."""
    tokens: int = 200_000
    """Tokens of the text to read."""
    context: int = 128
    """Tokens a context; each is shown once at most for a latent."""
    text_field: str = "text"
    """Where a document's text is in JSON, parquet and hub datasets."""
    split: str = "train"
    """Split of a hub dataset."""
    subset: str | None = None
    """Configuration of a hub dataset."""
    model: str | None = None
    """Model, if it is not to be found under the name that the SAE carries."""
    layer: int | None = None
    """Layer, for an SAE that does not say."""
    settings: Annotated[BrowseConfig, tyro.conf.arg(name="")] = field(default_factory=BrowseConfig)
    model_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Precision of the model; bfloat16 on a GPU, float32 elsewhere by default."""
    device: str | None = None
    """cpu, cuda, cuda:1 and so on; the GPU if there is one by default."""

    def run(self) -> None:
        from sampled_sae.browser.write import make_page, write_browser
        from sampled_sae.evals.session import layer_of, said
        from sampled_sae.utils.files import make_folder
        from sampled_sae.utils.system import usable_device

        require(self.tokens >= 1, "tokens", self.tokens, "must be at least 1")
        place = usable_device(self.device)
        sae, other = SAE.load(self.folder, place), None if self.other is None else SAE.load(self.other, place)
        name = str(said(sae.cfg, "model_name", self.model, "model", self.folder))
        layer = layer_of(sae.cfg, self.layer, self.folder)
        # A folder that cannot be written to must not be noticed after the work.
        make_folder(self.out)
        model = self._load(name, place)
        told = Stages()
        try:
            page = make_page(
                *(self.folder, sae, model, layer, self._contexts(sae, model), self.settings),
                *(self.text, self.other, other, self.compare, told),
            )
            index = write_browser(page, model.tokenizer, self.out, told)
        except torch.cuda.OutOfMemoryError:
            at_once = self.settings.contexts_at_once, self.settings.tokens_at_once
            raise UserError(
                f"contexts_at_once = {at_once[0]}, tokens_at_once = {at_once[1]}: out of GPU memory; lower them"
            ) from None
        finally:
            told.close()
        for note in page.about["notes"]:
            print(note, file=sys.stderr)
        live = int((page.browsed.firings.fired > 0).sum())
        fire = f"{live:,} of {sae.d_sae:,} latents fire in {page.browsed.read:,} tokens"
        print(f"{fire}; {len(page.meanings):,} are explained")
        print(f"Page: {index}")

    def _load(self, name: str, place: torch.device) -> LanguageModel:
        from sampled_sae.models.load import load_model

        usual = "bfloat16" if place.type == "cuda" else "float32"
        return load_model(name, place, getattr(torch, self.model_dtype or usual))

    def _contexts(self, sae: SAE, model: LanguageModel) -> Tensor:
        """The text's first contexts [n, L]; all there are, where they are fewer than asked for."""
        from sampled_sae.data.contexts import TextConfig, contexts
        from sampled_sae.data.text import documents

        cut = TextConfig(self.context, bool(sae.cfg.metadata.get("prepend_bos")))
        source = documents(self.text, self.text_field, self.split, self.subset)
        count = -(-self.tokens // self.context)
        found = list(islice(contexts(source, model.tokenizer, cut), count))
        if not found:
            raise UserError(f"context = {self.context}: the text has not even one context of so many tokens")
        if len(found) < count:
            there = f"the text holds {len(found) * self.context:,} tokens, which are all read"
            print(f"tokens = {self.tokens:,}: {there}", file=sys.stderr)
        return torch.stack(found)
