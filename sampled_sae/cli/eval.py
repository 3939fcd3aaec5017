"""`sampled-sae eval`: trained SAEs of a language model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import Tensor

from sampled_sae.config import require, to_dict
from sampled_sae.data.contexts import TextConfig, contexts, find_end_of_text
from sampled_sae.evals.absorption.schema import AbsorptionConfig
from sampled_sae.evals.autointerp.schema import AutointerpConfig
from sampled_sae.evals.core.schema import CoreConfig, PutIn, special_tokens
from sampled_sae.evals.probing.schema import ProbingConfig
from sampled_sae.evals.registry import EVALUATIONS, chosen
from sampled_sae.evals.session import Request, find_saes, open_session
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.utils.errors import UserError

CONTEXTS = 64
INTERP_CONTEXT = 128
"""Tokens a context of autointerp, as in SAEBench."""


@dataclass(frozen=True)
class Eval:
    """Evaluate SAEs; results lie in each one's folder, as evals/NAME.json, and all of them in one table."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of SAEs, or of runs that hold some."""
    evals: tuple[str, ...] = ("core",)
    """core (reconstruction, density, what the model loses), probing, absorption, autointerp."""
    text: str | None = None
    """For core and autointerp: hub dataset, a file, a folder of files, or stdlib. Its first contexts are read: of the
    text that was trained on, core refuses more of them than were held out."""
    text_field: str = "text"
    """Where a document's text is in JSON, parquet and hub datasets."""
    split: str = "train"
    """Split of a hub dataset."""
    subset: str | None = None
    """Configuration of a hub dataset."""
    contexts: int | None = None
    """Contexts that core reads, as long as those of training; 64 by default, or fewer if fewer were held out."""
    interp_tokens: int = 2_000_000
    """Tokens that autointerp reads, in contexts of 128."""
    out: Path | None = None
    """Folder for the table of all and the files for SAEBench's tools; by default evals in the first folder, or in the
    one that holds several SAEs side by side."""
    model: str | None = None
    """Model, if it is not to be found under the name that the SAE carries."""
    layer: int | None = None
    """Layer, for an SAE that does not say."""
    context: int | None = None
    """Tokens a context of core; by default those of training."""
    loss: bool = True
    """Core: measure cross-entropy and KL divergence too, which takes a pass through the model for each SAE."""
    put_in: PutIn | None = None
    """Core: where the reconstruction replaces the stream. By default everywhere but at the tokens of high norm for SAEs
    that were trained without these, and as in SAEBench for others; only then do its files hold the losses."""
    contexts_at_once: int | None = None
    """Contexts of core in one pass through the model; 16 on a GPU, 4 elsewhere by default."""
    probing: ProbingConfig = field(default_factory=ProbingConfig)
    absorption: AbsorptionConfig = field(default_factory=AbsorptionConfig)
    autointerp: AutointerpConfig = field(default_factory=AutointerpConfig)
    model_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Precision of the model; bfloat16 on a GPU, float32 elsewhere by default."""
    redo: bool = False
    """Measure again what was measured in the same way already."""
    device: str | None = None
    """cpu, cuda, cuda:1 and so on; the GPU if there is one by default."""

    def run(self) -> None:
        from sampled_sae.reporting.tables import write_tables
        from sampled_sae.reporting.terminal import print_evals

        requests = [self._request(name) for name in chosen(self.evals)]
        found = find_saes(self.folders)
        open_ = {r.name: [f for f in found if self.redo or not r.is_done(f)] for r in requests}
        todo = [folder for folder in found if any(folder in folders for folders in open_.values())]
        if todo:
            session = open_session(todo, self._load, self._place(), self.model, self.layer)
            for folder in open_.get("core", ()):
                self._check_unseen(session.saes[folder], folder)
            for request in requests:
                if open_[request.name]:
                    session.measure(request, open_[request.name])
        print_evals({request.name: {folder: request.path(folder) for folder in found} for request in requests})
        print(write_tables(found, self.out or self._default_out()))

    def _default_out(self) -> Path:
        """In the first folder; of several SAEs that lie side by side in the one that holds them."""
        first, *others = self.folders
        beside = others and all(folder.resolve().parent == first.resolve().parent for folder in others)
        together = beside and (first / "sae_weights.safetensors").exists()
        return (first.resolve().parent if together else first) / "evals"

    def _place(self) -> torch.device:
        from sampled_sae.utils.system import usable_device

        return usable_device(self.device)

    def _dtype(self) -> str:
        return self.model_dtype or ("bfloat16" if self._place().type == "cuda" else "float32")

    def _load(self, name: str) -> LanguageModel:
        from sampled_sae.models.load import load_model

        return load_model(name, self._place(), getattr(torch, self._dtype()))

    def _request(self, name: str) -> Request:
        """One evaluation as it was asked for, with all that decides its numbers."""
        about: dict[str, Any] = {"model": self.model, "layer": self.layer}
        about |= {"model_dtype": self._dtype(), "device": self._place().type}
        if EVALUATIONS[name].reads_text:
            if self.text is None:
                raise UserError(f"text: is missing; {name} reads one")
            about |= {part: getattr(self, part) for part in ("text", "text_field", "split", "subset")}
            about["files"] = stamps([self.text])
            require(self.contexts is None or self.contexts >= 1, "contexts", self.contexts, "must be at least 1")
        if name == "core":
            about |= {part: getattr(self, part) for part in ("contexts", "context", "loss", "put_in")}
            about["definition"] = 2  # densities once counted the tokens of high norm
            return Request(name, about, self._core_settings, self._first_contexts)
        settings = getattr(self, name, None) or EVALUATIONS[name].settings()
        about |= decisive(to_dict(settings)) if is_dataclass(settings) else {}
        if name == "probing":
            about["files"] = stamps(self.probing.datasets)
        if name != "autointerp":
            read_text = self._first_contexts if EVALUATIONS[name].reads_text else None
            return Request(name, about, lambda sae, model: settings, read_text)
        require(self.interp_tokens >= INTERP_CONTEXT, "interp_tokens", self.interp_tokens, "must be at least 128")
        about["interp_tokens"] = self.interp_tokens
        read = partial(self._contexts, self.interp_tokens // INTERP_CONTEXT, INTERP_CONTEXT, False)
        return Request(name, about, self._autointerp_settings, read)

    def _autointerp_settings(self, sae: InferenceConfig, model: LanguageModel) -> AutointerpConfig:
        """Without the tokens that stand for no text and the first positions, unless it was said which to leave out."""
        settings = self.autointerp
        if not settings.left_out:
            known = {*special_tokens(model.tokenizer), find_end_of_text(model.tokenizer)}
            settings = replace(settings, left_out=tuple(sorted(known)))
        return replace(settings, skip_first=settings.skip_first or int(sae.metadata.get("skip_first") or 0))

    def _core_settings(self, sae: InferenceConfig, model: LanguageModel) -> CoreConfig:
        """As the SAE was trained: without the same positions and norms, cut in batches of the same size."""
        said, limit = sae.metadata, sae.metadata.get("high_norm_limit")
        return CoreConfig(
            skip_first=int(said.get("skip_first") or 0),
            left_out=special_tokens(model.tokenizer),
            norm_limit=None if limit is None else float(limit),
            # An SAE that was trained without the high-norm tokens leaves them as they are.
            put_in=self.put_in or ("saebench" if limit is None else "normal"),
            loss=self.loss,
            cut_batch=int(said.get("training", {}).get("batch_size") or 4096),
            contexts_at_once=self.contexts_at_once or (16 if self._place().type == "cuda" else 4),
        )

    def _count(self, sae: InferenceConfig) -> int:
        """Contexts that core reads: as many as were asked for, or else of the text that was trained on no more than
        were held out."""
        if self.contexts is not None:
            return self.contexts
        held, size = self._held_out(sae)
        return CONTEXTS if held is None else max(1, min(CONTEXTS, held // (self.context or size)))

    def _held_out(self, sae: InferenceConfig) -> tuple[int | None, int]:
        """Tokens at the start of this text that the SAE was not trained on, none for another text; its context."""
        held, size = sae.metadata.get("heldout_contexts"), sae.metadata.get("context_size")
        if held is None or size is None or not same_text(self.text, sae.metadata.get("text")):
            return None, size or 1
        return held * size, size

    def _first_contexts(self, sae: InferenceConfig, model: LanguageModel) -> Tensor:
        return self._contexts(self._count(sae), self.context, True, sae, model)

    def _contexts(
        self, count: int, length: int | None, all_: bool, sae: InferenceConfig, model: LanguageModel
    ) -> Tensor:
        """The text's first contexts [count, L], cut as in training; fewer where there are fewer, if not `all_`."""
        from sampled_sae.data.text import documents

        assert self.text is not None
        size = sae.metadata.get("context_size") if length is None else length
        if size is None:
            raise UserError("an SAE does not say its context; give --context")
        text = TextConfig(int(size), bool(sae.metadata.get("prepend_bos")))
        source = documents(self.text, self.text_field, self.split, self.subset)
        found = list(islice(contexts(source, model.tokenizer, text), count))
        if len(found) < (count if all_ else 1):
            raise UserError(f"contexts = {count}: the text holds {len(found)} of {text.length} tokens")
        if len(found) < count:
            read = f"the text holds {len(found) * text.length:,} tokens, which are all read"
            print(f"interp_tokens = {self.interp_tokens:,}: {read}", file=sys.stderr)
        return torch.stack(found)

    def _check_unseen(self, sae: InferenceConfig, folder: Path) -> None:
        """Refuse to measure on what the SAE was trained on, as far as it says."""
        held, size = self._held_out(sae)
        if held is None:
            return
        length, count = self.context or size, self._count(sae)
        if count * length > held:
            raise UserError(
                f"contexts = {count}: {folder} was trained on this text but for its first {held // size} contexts of "
                f"{size} tokens; give {held // length} at most, or another text"
            )


def same_text(one: str | None, other: str | None) -> bool:
    """Whether two names mean the same text; paths may be written in several ways."""
    if one is None or other is None or one == other:
        return one == other
    return Path(one).exists() and Path(other).exists() and Path(one).samefile(other)


def stamps(names: Sequence[str]) -> list[Any]:
    """Size and time of the files among these names: another content is another question."""
    files = [path for name in names for path in sorted([Path(name), *Path(name).rglob("*")]) if path.is_file()]
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def decisive(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings without those that change how, not what, is measured."""
    free = ("keep_gib", "cache", "concurrency", "timeout", "attempts", "wait", "longest_wait", "key_variable")
    return {
        name: decisive(value) if isinstance(value, dict) else value
        for name, value in settings.items()
        if name not in free and not name.endswith("_at_once")
    }
