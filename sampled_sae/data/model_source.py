"""A language model and a text -> a source of activations: one stream of batches for each hook point."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sampled_sae.config import Config, hints, require
from sampled_sae.data.buffer import (
    SMALLEST,
    HarvestConfig,
    bytes_needed,
    cache_batch,
    cache_buffer,
    enough_buffer,
    worth_compiling,
)
from sampled_sae.data.contexts import warn_without_bos
from sampled_sae.data.harvest import Harvest
from sampled_sae.data.stream import ActivationSource, ActivationStream
from sampled_sae.data.text import Text, TextList, TextSource, as_text
from sampled_sae.hooks import HookPoint
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.models.load import load_model
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.ranks import current
from sampled_sae.utils.system import readable


def model_activations(
    model: LanguageModel | str | Path | tuple[Any, Any],
    text: Text,
    layer: int | Sequence[int] | None = None,
    *,
    hook: str | Sequence[str] | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    progress: bool = True,
    **settings: Any,
) -> ModelActivations:
    """A language model and a text -> a source of activations, at the residual stream after one or several blocks
    (`layer`, counted from 0) or at hook points by name (`hook`); `settings` are fields of `HarvestConfig`.

    A model that is given by name is loaded, after a look whether the text is there.
    """
    layers = [] if layer is None else list(layer) if isinstance(layer, Iterable) else [layer]
    hooks = [] if hook is None else [hook] if isinstance(hook, str) else list(hook)
    if not layers and not hooks:
        raise UserError("layer: is missing; give the number of a block, or the name of a module as hook")
    for name, given in (("layer", layers), ("hook", hooks)):
        require(len(set(given)) == len(given), name, given, "must name each one once")
    try:
        config = HarvestConfig(hooks=(*layers, *hooks), **settings)
    except TypeError:
        known = set(hints(HarvestConfig)) - {"hooks"}
        wrong = next(iter(settings.keys() - known), "hooks")
        raise UserError(f"{wrong}: is no setting of activations; must be one of {', '.join(sorted(known))}") from None
    source = as_text(text)
    source.documents()
    if not isinstance(model, LanguageModel):
        model = load_model(model, device, dtype, layers)
    return ModelActivations(model, source, config, progress)


@dataclass(frozen=True, slots=True)
class ModelOrigin(Config):
    """A language model by name, and a text."""

    model: str
    dtype: str
    text: TextSource
    source: HarvestConfig

    def reopen(self, device: str) -> ModelActivations:
        dtype = getattr(torch, self.dtype, None)
        self.text.documents()
        layers = [hook for hook in self.source.hooks if isinstance(hook, int)]
        return ModelActivations(load_model(self.model, device, dtype, layers), self.text, self.source, progress=True)


@dataclass(frozen=True)
class ModelActivations(ActivationSource):
    """The activations of a language model on a text; all hook points come from the same passes through the model."""

    model: LanguageModel
    text: TextSource | TextList
    config: HarvestConfig
    progress: bool = False
    """Whether to print how far the collection is before the first step, if that takes long."""

    def __post_init__(self) -> None:
        for hook in self.config.hooks:
            self.model.hook_point(hook)

    def open(
        self, batch_size: int, heldout_tokens: int, seed: int, steps: int | None = None
    ) -> dict[str, HarvestStream]:
        """One stream for each hook point. With `steps`, no more tokens are held than these steps take."""
        model, config = self.model, self.config
        if config.bos == "auto":
            config = replace(config, bos=model.bos)
        config = replace(config, rolling=config.rolling is not False)
        size = enough_buffer(model, config, batch_size, steps)
        size = int(current().all.gather(torch.tensor(size)).min())  # ranks may have more or less free memory
        config = replace(config, buffer_tokens=size)
        if config.compile == "auto":
            tokens = None if steps is None else steps * batch_size
            config = replace(config, compile=worth_compiling(model, config, tokens))
        if self.progress and current().first:
            need = f"{readable(model.bytes)} for the model, {readable(bytes_needed(model, config))} for its activations"
            print(f"{model.name}: {need}, on {model.device}", file=sys.stderr)
        if not config.bos and current().first:
            warn_without_bos(model)
        shown = self.progress and current().first
        harvest = Harvest(model, self.text.documents(), config, batch_size, heldout_tokens, seed, steps, shown)
        return {hook.name: HarvestStream(harvest, hook, self.text) for hook in harvest.hooks}

    @property
    def origin(self) -> ModelOrigin | None:
        if not isinstance(self.text, TextSource):
            return None
        return ModelOrigin(self.model.name, str(self.model.dtype).removeprefix("torch."), self.text, self.config)

    def as_begun(self, record: Mapping[str, Any]) -> ModelActivations:
        """The buffer's order as in the record of a run or cache, if it is not set, and its size, if that is no larger
        than what is set: a run holds no more than its steps need, and an extension has more of them."""
        config, size = self.config, record.get("buffer_tokens")
        if not isinstance(size, int):
            return self
        rolling = record.get("rolling", False) if config.rolling == "auto" else config.rolling
        return replace(
            self, config=replace(config, buffer_tokens=min(config.buffer_tokens or size, size), rolling=rolling)
        )

    def for_cache(self, tokens: int) -> ModelActivations:
        """With a buffer that such a cache fills. One that rolls would send more tokens through the model, to mix what
        is shuffled again when it is read."""
        config = replace(self.config, rolling=self.config.rolling is True)
        return replace(self, config=replace(config, buffer_tokens=cache_buffer(self.model, config, tokens)))

    @property
    def cache_batch(self) -> int:
        """Tokens per batch when the activations are written to a cache."""
        return cache_batch(self.config, self.config.buffer_tokens or SMALLEST)


class HarvestStream(ActivationStream):
    """One hook point of a harvest."""

    def __init__(self, harvest: Harvest, hook: HookPoint, text: TextSource | TextList):
        self.harvest, self.hook, self.text = harvest, hook, text
        self.batch_size = harvest.batch_size
        self.heldout, self.limit = harvest.heldout[hook], harvest.limits[hook]
        self.d_in = self.heldout.shape[1]

    def leave_out(self) -> None:
        self.harvest.left_out.add(self.hook)

    def end_at(self, steps: int) -> None:
        rounds = self.harvest.rounds
        if rounds.parts == 1:  # else the last round hands out what would have gone into the next one
            self.harvest.rounds = replace(rounds, number=-(-steps // rounds.batches))

    def memory_estimate(self) -> int:
        """Its share of the harvest's bytes on the model's device."""
        return bytes_needed(self.harvest.model, self.harvest.config) // len(self.harvest.hooks)

    def batch(self, index: int) -> Tensor:
        """Batch number `index` [batch_size, d_in], in the model's dtype and on its device."""
        number, place = divmod(index, self.harvest.rounds.batches)
        block = self.harvest.round(number, self.hook)
        rows = block[self.hook] if self.hook in block else torch.empty(0, self.d_in)
        return rows[place * self.batch_size : (place + 1) * self.batch_size]

    def close(self) -> None:
        self.harvest.close()

    @property
    def identity(self) -> dict[str, Any]:
        config, factor = self.harvest.config, self.harvest.config.high_norm_factor
        return {
            "model_name": self.harvest.model.name,
            **self._where(),
            "text": self.text.name,
            "part": self.text.part,
            "context": config.context,
            "bos": config.bos,
            "skip_first": config.skip_first,
            "end_of_text": config.end_of_text,
            "high_norm_factor": None if factor == torch.inf else factor,
            "buffer_tokens": config.buffer_tokens,
            **({"rolling": True} if config.rolling else {}),  # runs of earlier versions have no such field
            "seed": self.harvest.seed,
        }

    @property
    def metadata(self) -> dict[str, Any]:
        """Names as SAELens has them, and our own."""
        model, config = self.harvest.model, self.harvest.config
        return {
            "model_name": model.name,
            "hook_name": model.saelens_hook_name(self.hook),
            "hook_module": self.hook.module,
            **self._where(),
            "context_size": config.context,
            "prepend_bos": config.bos,
            "skip_first": config.skip_first,
            "text": self.text.name,
            "heldout_contexts": self.harvest.held_contexts,
            "high_norm_limit": self.limit if self.limit < torch.inf else None,
        }

    def _where(self) -> dict[str, Any]:
        """The layer for the residual stream after a block, else the hook point's name."""
        return {"hook_point": self.hook.name} if self.hook.layer is None else {"layer": self.hook.layer}
