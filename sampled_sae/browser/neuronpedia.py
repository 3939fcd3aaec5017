"""Batch files for Neuronpedia: what the browser shows of each latent, as rows of Neuronpedia's database.

A source, which is an SAE there, is a folder MODEL/SOURCE with model.jsonl, release.jsonl, sourceset.jsonl and
source.jsonl, and with features/, activations/ and explanations/ in parts batch-N.jsonl.gz of 1,024 latents.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from sampled_sae.browser.files import Page
from sampled_sae.browser.latents import NONE, TOP, band_of
from sampled_sae.config import Bound, Config
from sampled_sae.evals.reading import token_text
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE
from sampled_sae.utils.files import new_folder

LATENTS_A_FILE = 1024
DEFAULT_CREATOR = "clkht01d40000jv08hvalcvly"
"""User id that Neuronpedia's own scripts give to imported data."""
EMPTY = (
    *("neuron_alignment_indices", "neuron_alignment_values", "neuron_alignment_l1", "correlated_neurons_indices"),
    *("correlated_neurons_pearson", "correlated_neurons_l1", "correlated_features_indices"),
    *("correlated_features_pearson", "correlated_features_l1", "logits_hist_data_bar_heights"),
    *("logits_hist_data_bar_values", "decoder_weights_dist"),
)
"""Lists of a feature that the browser does not compute."""
Id = Annotated[
    str,
    Bound("must be letters, digits, dashes and underscores", lambda text: re.fullmatch(r"[\w-]+", text) is not None),
]


@dataclass(frozen=True, slots=True)
class NeuronpediaConfig(Config):
    """Names and details of the SAE on Neuronpedia."""

    model_id: Id | None = None
    """Neuronpedia's name of the model, such as gemma-2-2b. Default: the last part of the model's own name."""
    source_set: Id | None = None
    """Set that the SAE belongs to, without the layer, such as res-16k. Default: the SAE's folder."""
    release: Id | None = None
    """Release that the set belongs to. Default: as the set."""
    title: str = ""
    """Title of the release and description of the set."""
    creator: str = ""
    """Name of the author or team."""
    url: str = ""
    """Address of the paper or project."""
    hf_repo: str | None = None
    """Repository on the Hugging Face hub that holds the SAE."""
    hf_folder: str | None = None
    """Folder of the SAE in it."""
    explanation_type: str | None = None
    """Neuronpedia's name of the kind of explanation, such as oai_token-act-pair; it must be known there."""
    explanation_model: str | None = None
    """Neuronpedia's name of the explaining model; it must be known there."""
    creator_id: str = DEFAULT_CREATOR
    """Id of the user who owns the data."""
    vectors: bool = False
    """Write each latent's decoder row too."""


def write_neuronpedia(page: Page, sae: SAE, model: LanguageModel, out: Path, config: NeuronpediaConfig) -> Path:
    """Write the batch files of one SAE below `out`, whole or not at all, and return their folder."""
    source = Source(page, sae, model, config)
    with new_folder(out / source.model_id / source.id) as folder:
        for name, row in source.about().items():
            (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
        for kind, rows_of in (
            ("features", source.feature),
            ("activations", source.activations),
            ("explanations", source.explanations),
        ):
            for number, first in enumerate(range(0, sae.d_sae, LATENTS_A_FILE)):
                latents = range(first, min(first + LATENTS_A_FILE, sae.d_sae))
                _write(folder / kind / f"batch-{number}.jsonl.gz", (row for n in latents for row in rows_of(n)))
    return out / source.model_id / source.id


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """A part with these rows; none without rows."""
    path.parent.mkdir(exist_ok=True)
    written = False
    # No time in the header: equal rows are equal files.
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 5, raw, mtime=0) as file:
        for row in rows:
            file.write((json.dumps(row, allow_nan=False) + "\n").encode())
            written = True
    if not written:
        path.unlink()


class Source:
    """One SAE as Neuronpedia has it."""

    def __init__(self, page: Page, sae: SAE, model: LanguageModel, config: NeuronpediaConfig):
        self.page, self.sae, self.model, self.config = page, sae, model, config
        folder = "sae" if sae.folder is None else sae.folder.resolve().name
        self.hook = str(sae.cfg.metadata.get("hook_name") or "")
        self.layer = next(iter(re.findall(r"\.(\d+)(?:\.|$)", self.hook)), str(sae.cfg.metadata.get("layer", 0)))
        self.model_id = config.model_id or _id(model.name.rstrip("/").rpartition("/")[2]).lower()
        self.set = config.source_set or _id(folder)
        self.id = f"{self.layer}-{self.set}"
        self.time = datetime.now(timezone.utc).isoformat()
        self.key = {"modelId": self.model_id, "layer": self.id}
        browsed = page.browsed
        firings, windows = browsed.firings, browsed.windows
        self.maximum = firings.maximum
        self.begin = torch.searchsorted(windows.latent, torch.arange(sae.d_sae + 1))
        bands, latent = page.about["bands"], firings.latent.long()
        band = latent * bands + band_of(firings.value, self.maximum[latent], bands)
        self.in_band = torch.bincount(band, minlength=sae.d_sae * bands).view(sae.d_sae, bands)
        used = [browsed.contexts.flatten()]
        used += [browsed.output.promoted.flatten(), browsed.output.suppressed.flatten()] if browsed.output else []
        self.words = {n: token_text(n, model.tokenizer) for n in torch.cat(used).unique().tolist() if n != NONE}

    def about(self) -> dict[str, dict[str, Any]]:
        """Rows of the files that describe the model and the SAE."""
        config, base = self.config, {"creatorId": self.config.creator_id, "createdAt": self.time}
        release, title = config.release or self.set, config.title or self.set
        n, length = self.page.browsed.contexts.shape
        public = {"visibility": "PUBLIC"}
        return {
            "model": {
                "id": self.model_id,
                "displayNameShort": self.model_id,
                "displayName": self.model_id,
                "instruct": False,
                "layers": self.model.layers,
                "neuronsPerLayer": 0,
                "dimension": self.model.width,
                "owner": config.creator,
                "updatedAt": self.time,
                **public,
                **base,
            },
            "release": {
                "name": release,
                "description": title,
                "descriptionShort": title,
                "urls": [config.url] if config.url else [],
                "creatorName": config.creator,
                "creatorNameShort": config.creator,
                **public,
                **base,
            },
            "sourceset": {
                "modelId": self.model_id,
                "name": self.set,
                "description": title,
                "creatorName": config.creator,
                "releaseName": release,
                "urls": [config.url] if config.url else [],
                **public,
                **base,
            },
            "source": {
                "id": self.id,
                "modelId": self.model_id,
                "setName": self.set,
                "dataset": dict(self.page.about["facts"]).get("Text"),
                "num_prompts": n,
                "num_tokens_in_prompt": length,
                "hfRepoId": config.hf_repo,
                "hfFolderId": config.hf_folder,
                "hasDashboards": True,
                "inferenceEnabled": False,
                **public,
                **base,
            },
        }

    def feature(self, latent: int) -> Iterator[dict[str, Any]]:
        """The row of a latent."""
        browsed, maximum = self.page.browsed, float(self.maximum[latent])
        bins = browsed.histogram.shape[1] if maximum > 0 else 0
        near = browsed.near.latent[latent] != NONE
        row = {
            **self.key,
            "index": str(latent),
            "creatorId": self.config.creator_id,
            "createdAt": self.time,
            "maxActApprox": _number(maximum),
            "frac_nonzero": float(self.page.density.fired[latent]) / self.page.density.tokens,
            "freq_hist_data_bar_heights": browsed.histogram[latent, :bins].tolist(),
            "freq_hist_data_bar_values": [_number((n + 0.5) * maximum / bins) for n in range(bins)],
            "topkCosSimIndices": browsed.near.latent[latent][near].tolist(),
            "topkCosSimValues": _numbers(browsed.near.cosine[latent][near]),
            "hasVector": self.config.vectors,
            "vector": _numbers(self.sae.W_dec[latent]) if self.config.vectors else [],
            "vectorLabel": None,
            "vectorDefaultSteerStrength": _number(maximum),
            "hookName": self.hook or None,
            **{name: list[Any]() for name in EMPTY},
        }
        for name, kind in (("pos", "promoted"), ("neg", "suppressed")):
            tokens = [] if browsed.output is None else getattr(browsed.output, kind)[latent].tolist()
            effects = [] if browsed.output is None else _numbers(getattr(browsed.output, f"{kind}_by")[latent])
            row |= {f"{name}_str": [self.words[token] for token in tokens], f"{name}_values": effects}
        yield row

    def activations(self, latent: int) -> Iterator[dict[str, Any]]:
        """One row for each context that the browser shows of a latent, with the activation at each of its tokens."""
        browsed, bands = self.page.browsed, self.page.about["bands"]
        firings, windows, length = browsed.firings, browsed.windows, browsed.firings.shape[1]
        maximum = float(self.maximum[latent])
        for window in range(int(self.begin[latent]), int(self.begin[latent + 1])):
            place, band = int(firings.position[windows.center[window]]), int(windows.band[window])
            inside = slice(int(windows.first[window]), int(windows.last[window]))
            values = torch.zeros(length)
            values[firings.position[inside].long() % length] = firings.value[inside]
            # Neuronpedia's marks of the top activations: no lower end, no share of the tokens.
            low, high, share = -1.0, maximum, -1.0
            if band != TOP:
                low, high = band * maximum / bands, (band + 1) * maximum / bands
                share = int(self.in_band[latent, band]) / browsed.read
            yield {
                **self.key,
                "id": self._unique(f"{latent}/{place}"),
                "index": str(latent),
                "creatorId": self.config.creator_id,
                "createdAt": self.time,
                "tokens": [self.words[token] for token in browsed.contexts[place // length].tolist()],
                "values": _numbers(values),
                "maxValue": _number(float(values.max())),
                "maxValueTokenIndex": int(values.argmax()),
                "minValue": _number(float(values.min())),
                "binMin": _number(low),
                "binMax": _number(high),
                "binContains": share,
                "qualifyingTokenIndex": place % length,
                "dataIndex": None,
                "dataSource": None,
                "dfaValues": [],
                "dfaTargetIndex": None,
                "dfaMaxValue": None,
                "lossValues": [],
                "logitContributions": None,
            }

    def explanations(self, latent: int) -> Iterator[dict[str, Any]]:
        """The row of a latent's explanation, if it has one."""
        meaning = self.page.meanings.get(latent)
        if meaning is None:
            return
        scores = {"score": meaning.score} if meaning.score is not None else {}
        yield {
            **self.key,
            "id": self._unique(f"{latent}/{meaning.text}"),
            "index": str(latent),
            "description": meaning.text,
            "authorId": self.config.creator_id,
            "createdAt": self.time,
            "embedding": None,
            "typeName": self.config.explanation_type,
            "explanationModelName": self.config.explanation_model,
            "notes": json.dumps({**scores, **meaning.scores}) if scores or meaning.scores else None,
        }

    def _unique(self, text: str) -> str:
        """An id of 25 characters, as Neuronpedia's are; the same for the same content."""
        return "c" + hashlib.sha256(f"{self.model_id}/{self.id}/{text}".encode()).hexdigest()[:24]


def _id(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-") or "unnamed"


def _number(value: float) -> float:
    """Six digits: the values are of 32 bits."""
    return float(f"{value:.6g}")


def _numbers(values: Tensor) -> list[float]:
    return [_number(value) for value in values.float().tolist()]
