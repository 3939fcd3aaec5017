"""One layer of a model in memory: its activations on the text of training, and what evaluations share.

Any number of SAEs is trained from them. Nothing is written to disk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sampled_sae import api
from sampled_sae.config import Config, Positive
from sampled_sae.data.contexts import TextConfig, contexts
from sampled_sae.data.source import TensorRows
from sampled_sae.data.stream import ArrayStream
from sampled_sae.data.text import as_text
from sampled_sae.evals import Job, get_evaluation
from sampled_sae.evals.absorption.evaluate import Spoken, evaluate_absorption_many, read_words
from sampled_sae.evals.absorption.schema import AbsorptionConfig
from sampled_sae.evals.core.schema import CoreConfig
from sampled_sae.evals.probing.schema import ProbingConfig
from sampled_sae.evals.similarity.matching import directions, nearest
from sampled_sae.experiments.design import Measure, Setting
from sampled_sae.method.config import SAEConfig
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE
from sampled_sae.training.heldout import by_threshold, calibrated_threshold
from sampled_sae.training.learner import CLOSED
from sampled_sae.utils.errors import UserError

SEVERAL: dict[str, Any] = {"seeds": (0, 1), "train_texts": 500, "test_texts": 200}  # splits of many small datasets
MORE = 1.03  # tokens that are read for one that is trained on: some are left out for their norm
SPREAD = 128  # contexts that are read for each one that is taken
SAME = 0.7  # cosine from which on a latent counts as found in another SAE
AT_ONCE = 2**28  # cosines in memory at one time
EDGES = (0.001, 0.1)  # densities between the bins of latents


Take = Literal["first", "spread", "beginnings"]
"""Contexts of a text: the first ones, evenly spaced ones, or beginnings of documents from all over it."""


@dataclass(frozen=True, slots=True)
class Material(Config):
    """Texts and datasets, which a design does not contain.

    A text may also be token ids [n, context], or a mapping from the name of the model to either of these.
    """

    train: Any  # text of training
    select: Any  # text that thresholds and learning rates are chosen on
    report: Any  # text that core metrics are reported on
    tokens: Positive = 131_072  # tokens of each of the last two, spread over it
    probing: tuple[str, ...] = ()  # datasets of `probing`
    finalists: tuple[str, ...] = ("sae-probes",)  # datasets of `finalists`
    words: Positive | None = None  # words of absorption; none: all
    probing_texts: tuple[Positive, Positive] = (2000, 1000)  # texts of a class's probe, to fit to and to test on
    models: Mapping[str, Any] = field(default_factory=dict)  # folders, or models, of names in the design


def read_tokens(text: Any, model: LanguageModel, named: str, context: int, count: int, take: Take = "first") -> Tensor:
    """[n, context] token ids of a text, at most `count` contexts."""
    if isinstance(text, Mapping):
        if named not in text:
            raise UserError(f"texts: none is for {named}; there are {', '.join(text)}")
        text = text[named]
    if isinstance(text, np.ndarray | Tensor):
        ids = torch.as_tensor(np.asarray(text).astype(np.int64))
        if ids.shape[1] != context:
            if (context % ids.shape[1] and ids.shape[1] % context) or model.bos:
                raise UserError(f"context = {context}: the token ids of {named} are in contexts of {ids.shape[1]}")
            ids = ids.flatten()[: ids.numel() // context * context].view(-1, context)
        return ids[:count] if take == "first" else _evenly(ids, count)
    documents = _beginnings(text, count * context) if take == "beginnings" else as_text(text).documents()
    most = SPREAD * count if take == "spread" else count
    found = list(islice(contexts(iter(documents), model.tokenizer, TextConfig(context, model.bos)), most))
    if not found:
        raise UserError(f"text = {text!r}: holds not one context of {context} tokens")
    return _evenly(torch.stack(found), count)


def _evenly(ids: Tensor, count: int) -> Tensor:
    """At most `count` of the rows, from the first to the last."""
    return ids[torch.linspace(0, len(ids) - 1, min(count, len(ids))).long()]


def _beginnings(text: Any, tokens: int, characters: int = 8_000) -> list[str]:
    """Beginnings of documents, taken evenly from the whole text; enough for so many tokens."""
    documents = [document[:characters] for document in as_text(text).documents()]
    # Six characters per token are more than any text has.
    return documents[:: max(1, sum(map(len, documents)) // (6 * tokens))]


class _Rows(TensorRows):
    """Activations in memory that say where they are from."""

    def __init__(self, activations: Tensor, metadata: dict[str, Any]):
        super().__init__(activations)
        self._metadata = metadata

    @property
    def metadata(self) -> dict[str, Any]:
        return self._metadata


class Layer:
    """Activations after one block, and what measurements there share."""

    def __init__(self, model: LanguageModel, setting: Setting, material: Material):
        self.model, self.layer, self.context, self.material = model, setting.layer, setting.context, material
        self.named, self.paper, self.factor = setting.model, setting.recipe == "paper", setting.high_norm_factor
        self._streams: dict[int, ArrayStream] = {}
        self._train: Tensor | None = None

    @cached_property
    def contexts(self) -> dict[str, Tensor]:
        """[n, context] token ids of the selection and of the report text."""
        count = max(1, self.material.tokens // self.context)
        return {
            name: read_tokens(getattr(self.material, name), self.model, self.named, self.context, count, "spread")
            for name in ("select", "report")
        }

    @cached_property
    def limit(self) -> float:
        """Tokens of a higher norm are left out."""
        if self.paper:
            return float("inf")
        return self.factor * float(_norms(self._read(self.contexts["select"])).median())

    @cached_property
    def tokens(self) -> dict[str, Tensor]:
        """[n, d_in] float32: activations of the selection and of the report text, those of high norm left out."""
        found = {name: self._read(self.contexts[name]) for name in ("select", "report")}
        return {name: x[_norms(x) <= self.limit].float() for name, x in found.items()}

    @torch.no_grad()
    def _read(self, ids: Tensor) -> Tensor:
        """Token ids [n, context] -> activations [n * context, d_in] in the model's dtype."""
        at_once = max(1, (2**16 if self.model.device.type == "cuda" else 2**12) // self.context)
        return torch.cat(
            [self.model.activations(part, [self.layer])[self.layer].flatten(0, 1) for part in ids.split(at_once)]
        )

    def harvest(self, tokens: int) -> None:
        """Read the text of training, so many tokens."""
        count = math.ceil(MORE * tokens / self.context)
        ids = read_tokens(self.material.train, self.model, self.named, self.context, count)
        kept, done = torch.empty(ids.numel(), self.model.width, dtype=self.model.dtype, device=self.model.device), 0
        for some in ids.split(4096):
            x = self._read(some)
            x = x[_norms(x) <= self.limit]
            kept[done : done + len(x)] = x
            done += len(x)
        if done < tokens:
            raise UserError(f"tokens = {tokens}: the text of training has {done} for {self.named}")
        self._train = kept[:done]

    @property
    def is_harvested(self) -> bool:
        return self._train is not None

    def release(self) -> None:
        """Give the activations' memory back."""
        self._train = None
        self._streams.clear()

    def _stream(self, batch_size: int, seed: int) -> ArrayStream:
        """All tokens in the seed's order; thresholds are calibrated on the selection text."""
        if seed not in self._streams:
            assert self._train is not None
            about = {
                "model_name": self.model.name,
                "layer": self.layer,
                "context_size": self.context,
                "prepend_bos": self.model.bos,
                "high_norm_limit": None if self.paper else self.limit,
            }
            self._streams.clear()  # an order takes 8 bytes per token
            stream = ArrayStream(_Rows(self._train, about), batch_size, 0, seed)
            stream.heldout = self.tokens["select"]
            self._streams[seed] = stream
        return self._streams[seed]

    def train(self, config: SAEConfig, tokens: int, batch_size: int) -> SAE:
        """One SAE on the first tokens in the order of its seed."""
        assert config.seed is not None
        steps = tokens // batch_size
        sae: SAE = api.train(
            self._stream(batch_size, config.seed),
            config,
            steps=steps,
            batch_size=batch_size,
            seed=config.seed,
            device=self.model.device,
            log_every=steps,
            progress=False,
            **({"input_norm": "one"} if self.paper else {}),
        )
        if self.paper and not sae.threshold_ema.isnan():
            sae.threshold = torch.where(sae.threshold < CLOSED, sae.threshold_ema, sae.threshold)
        return sae

    # ---- measurements ------------------------------------------------------------------------------------

    @property
    def has_words(self) -> bool:
        return "_spoken" in self.__dict__

    @cached_property
    def _spoken(self) -> Spoken:
        return read_words(self.model, self.layer, self._absorption)

    @property
    def _absorption(self) -> AbsorptionConfig:
        config = AbsorptionConfig(max_words=self.material.words)
        return replace(config, prompts_at_once=512, words_at_once=4096) if self.model.device.type == "cuda" else config

    def read_words(self) -> None:
        """Read the words of absorption."""
        self._spoken  # noqa: B018

    @torch.no_grad()
    def measure(self, measure: Measure, saes: Sequence[SAE]) -> Iterator[dict[str, Any]]:
        """The result of an evaluation for each SAE, as plain JSON."""
        if measure == "absorption":
            found = evaluate_absorption_many(saes, self.model, self.layer, self._absorption, spoken=self._spoken)
            yield from map(get_evaluation("absorption").to_dict, found)
            return
        evaluation = get_evaluation("probing" if measure in ("probing", "finalists") else "core")
        text = self.contexts["select" if measure == "select" else "report"] if evaluation.needs.text else None
        config = evaluation.settings_for(self._config_of(measure), saes[0].cfg, self.model)
        results = evaluation.run(Job(saes, self.model, self.layer, text), config)
        for sae, result in zip(saes, results, strict=True):
            plain = evaluation.to_dict(result)
            yield plain | ({"matched": self.matched(sae)} if measure == "core" else {})

    def matched(self, sae: SAE) -> float | None:
        """FVU on the report tokens with a threshold that gives them exactly K."""
        x, own = self.tokens["report"], sae.threshold.clone()
        theta = calibrated_threshold(sae, x, int(sae.cfg.k or 0))
        sae.threshold.mul_(theta) if own.ndim else sae.threshold.fill_(theta)
        found = by_threshold(sae, x).fvu
        sae.threshold.copy_(own)
        return found

    def frequency(self, sae: SAE) -> Tensor:
        """[d_sae]: share of the report tokens on which each latent fires."""
        return by_threshold(sae, self.tokens["report"]).frequency

    def _config_of(self, measure: Measure) -> Config:
        large: dict[str, Any] = {}
        if self.model.device.type == "cuda":
            large = {"tokens_at_once": 8192}
        if measure in ("probing", "finalists"):
            fit, test = self.material.probing_texts
            given = large | {"train_texts": fit, "test_texts": test, "all_latents": False}
            given |= {"contexts_at_once": 256} if large else {}
            if measure == "probing":
                return ProbingConfig(self.material.probing, **given)
            return ProbingConfig(self.material.finalists, **given | SEVERAL)
        contexts = self.contexts["select" if measure == "select" else "report"]
        return CoreConfig(contexts=len(contexts), resamples=0, **large)


def _norms(x: Tensor) -> Tensor:
    return torch.cat([part.float().norm(dim=1) for part in x.split(2**17)])


# ---- similarity ----------------------------------------------------------------------------------------


@torch.no_grad()
def similarity(saes: Sequence[SAE], layer: Layer) -> dict[str, float]:
    """An SAE, the next seed of its method, the base of the same seed and of the next seed -> MMCS of live latents, and
    the share of its live latents that the base of the next seed has, and that the next seed of its method has; also
    by density (`found_0`: rare latents)."""
    densities = [layer.frequency(sae) for sae in saes]
    own, other, same, next_base = map(_live, saes, densities)
    across, with_same = nearest(own, other, AT_ONCE), nearest(own, same, AT_ONCE)
    with_next = across if saes[1] is saes[3] else nearest(own, next_base, AT_ONCE)
    found = {
        "mmcs_seeds": _mean(across),
        "mmcs_same": _mean(with_same),
        "mmcs_other": _mean(with_next),
        "live": float(len(own)),
    }
    live = densities[0][densities[0] > 0]
    bins = torch.bucketize(live, live.new_tensor(EDGES), right=True)
    for name, best in (("found", with_next[0]), ("found_seeds", across[0])):
        there = (best >= SAME).double()
        found[name] = float(there.mean())
        found |= {f"{name}_{n}": float(there[bins == n].mean()) for n in range(len(EDGES) + 1) if (bins == n).any()}
    return found


def _live(sae: SAE, density: Tensor) -> Tensor:
    """[n, d_in] unit rows of the decoder: latents with a density [d_sae] above 0."""
    return directions(sae.W_dec.detach()[density > 0]).rows


def _mean(both: tuple[Tensor, Tensor]) -> float:
    """The mean of the two directions' MMCS."""
    return sum(float(best.double().mean()) for best in both) / 2
