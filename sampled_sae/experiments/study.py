"""A study: a declared list of runs, trained and measured stage by stage, with a line of results per SAE and evaluation.

The design is a JSON file with settings, methods, stages and claims (see docs/results/design.json). A stage trains its
methods in each of its settings, once per seed and factor of the default learning rate, and measures them. A stage
without factors uses each method's best one: the lowest FVU on the selection text in an earlier stage. SAEs of earlier
stages are used again, and finished measurements are not repeated: results.jsonl in the output folder has them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sampled_sae import api
from sampled_sae.config import Config
from sampled_sae.data.contexts import TextConfig, contexts
from sampled_sae.data.text import as_text
from sampled_sae.evals import get_evaluation
from sampled_sae.evals.absorption.schema import AbsorptionConfig
from sampled_sae.evals.core.schema import CoreConfig
from sampled_sae.evals.probing.schema import ProbingConfig
from sampled_sae.experiments.design import Measure, Setting, Study, runs_of
from sampled_sae.method.config import SAEConfig
from sampled_sae.method.presets import paper_recipe, parse_methods
from sampled_sae.method.rate import default_lr
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.reporting.study import (
    METRICS,
    Results,
    Run,
    fill_page,
    forest,
    read_rows,
    tables,
)
from sampled_sae.reporting.write import write_figures
from sampled_sae.sae import SAE
from sampled_sae.training.heldout import calibrated_threshold
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import make_folder
from sampled_sae.utils.measures import find

EVALUATIONS: dict[str, str] = {"select": "core", "finalists": "probing"}  # others have the evaluation's own name
RESULTS = "results.jsonl"
CALIBRATED = "calibrated"  # empty file in the folder of an SAE whose threshold is that of the selection text


@dataclass(frozen=True)
class Material:
    """Texts and datasets, which a design does not contain."""

    train: Any  # text of training
    select: Any  # text that thresholds and learning rates are chosen on
    report: Any  # text that core metrics are reported on
    tokens: int = 131_072  # tokens of each of the last two, spread over it
    probing: tuple[str, ...] = ()  # datasets of `probing`
    finalists: tuple[str, ...] = ("sae-probes",)  # datasets of `finalists`
    words: int | None = None  # words of absorption; none: all
    harvest: dict[str, Any] = field(default_factory=dict)  # further settings of the harvest
    keep: bool = True  # whether SAEs stay on disk after they are measured; a later stage trains missing ones again


def run_study(study: Study, material: Material, out: Path, only: Sequence[str] = (), device: str | None = None) -> Path:
    """Train and measure what is not finished, of the named stages or of all; returns the path of the results."""
    path = make_folder(out) / RESULTS
    texts = {name: spread(getattr(material, name), material.tokens) for name in ("select", "report")}
    loaded: dict[str, LanguageModel] = {}
    for stage in study.stages:
        if only and stage.name not in only:
            continue
        for (setting, seed), group in _grouped(runs_of(study, stage, read_rows(path))).items():
            done = {(row.run, row.measure) for row in read_rows(path)}
            if all((run, measure) in done for run in group for measure in stage.measure):
                continue
            place = study.settings[setting]
            if place.model not in loaded:
                loaded = {place.model: api.load_model(place.model, device=device)}
            part = Part(study, place, material, texts, loaded[place.model], out / stage.name / f"{setting}-s{seed}")
            folders = part.trained(group)
            for measure in stage.measure:
                rest = {run: folder for run, folder in folders.items() if (run, measure) not in done}
                lines = [line(run, measure, result) for run, result in part.measure(measure, rest)]
                with path.open("a", encoding="utf-8") as file:
                    file.writelines(lines)
            if not material.keep:
                shutil.rmtree(part.folder, ignore_errors=True)
    return path


def _grouped(runs: Iterable[Run]) -> dict[tuple[str, int], list[Run]]:
    groups: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.setting, run.seed), []).append(run)
    return groups


@dataclass(frozen=True)
class Part:
    """The SAEs of one setting and seed, trained on the same batches."""

    study: Study
    setting: Setting
    material: Material
    texts: Mapping[str, list[str]]
    model: LanguageModel
    folder: Path

    def config(self, run: Run) -> SAEConfig:
        """The configuration of a run."""
        place, study = self.setting, self.study
        steps = study.tokens // study.batch_size
        base = default_lr(self.model.width, place.d_sae, place.k, study.batch_size, steps)
        shared: dict[str, Any] = {"lr": base * run.factor} if place.recipe == "default" else paper_recipe()
        spec = study.methods[run.method].spec
        (config,) = parse_methods([spec], d_sae=place.d_sae, k=place.k, seeds=(run.seed,), **shared)
        return replace(config, name=run.name)

    def trained(self, runs: Sequence[Run]) -> dict[Run, Path]:
        """Folders of the SAEs, with thresholds calibrated on the selection text; those that are missing are trained."""
        found = {
            run: next(iter(self.folder.parent.parent.glob(f"*/{self.folder.name}/saes/{run.name}")), None)
            for run in runs
        }
        if missing := [run for run, folder in found.items() if folder is None]:
            self._train(missing)
        folders = {run: folder or self.folder / "saes" / run.name for run, folder in found.items()}
        fresh = [folder for folder in folders.values() if not (folder / CALIBRATED).exists()]
        x = self.tokens("select") if fresh else None
        for folder in fresh:
            sae = SAE.load(folder, self.model.device)
            if self.setting.recipe == "paper" and not sae.threshold_ema.isnan():
                sae.threshold.fill_(sae.threshold_ema)
            elif x is not None:
                theta = calibrated_threshold(sae, x, self.setting.k)
                sae.threshold.copy_(sae.threshold * theta if sae.threshold.ndim else torch.tensor(theta))
            sae.save(folder)
            (folder / CALIBRATED).touch()
        return folders

    def _train(self, runs: Sequence[Run]) -> None:
        place, paper = self.setting, self.setting.recipe == "paper"
        more: dict[str, Any] = {"high_norm_factor": float("inf")} if paper else {}
        acts = api.activations(
            self.model, self.material.train, place.layer, context=place.context, **more, **self.material.harvest
        )
        api.train(
            acts,
            [self.config(run) for run in runs],
            tokens=self.study.tokens,
            batch_size=self.study.batch_size,
            seed=runs[0].seed,
            out=self.folder,
            resume=(self.folder / "run.json").exists(),
            keep=False,
            # A part takes minutes, and the checkpoints of its SAEs more disk space than the SAEs themselves.
            checkpoint_every=self.study.tokens,
            **({"input_norm": "one"} if paper else {}),
        )

    @torch.no_grad()
    def tokens(self, text: str) -> Tensor:
        """[n, d_in]: activations of a text, those of high norm left out unless the paper's recipe keeps them."""
        cut = TextConfig(self.setting.context, self.model.bos)
        count = max(1, self.material.tokens // self.setting.context)
        found = torch.stack(list(islice(contexts(iter(self.texts[text]), self.model.tokenizer, cut), count)))
        layer = self.setting.layer
        x = torch.cat([self.model.activations(part, [layer])[layer].flatten(0, 1).cpu() for part in found.split(16)])
        norm = x.float().norm(dim=1)
        return (x if self.setting.recipe == "paper" else x[norm <= 10 * norm.median()]).float()

    def measure(self, measure: Measure, folders: Mapping[Run, Path]) -> Iterator[tuple[Run, dict[str, Any]]]:
        """Results of one evaluation."""
        if not folders:
            return
        config = self._config_of(measure)
        text = self.texts["select" if measure == "select" else "report"]
        results = api.evaluate(list(folders.values()), self.model, config, text=text)
        name = EVALUATIONS.get(measure, measure)
        yield from zip(folders, (result[name] for result in results), strict=True)

    def _config_of(self, measure: Measure) -> Config:
        if measure == "absorption":
            return AbsorptionConfig(max_words=self.material.words)
        if measure == "probing":
            return ProbingConfig(self.material.probing, all_latents=False)
        if measure == "finalists":
            names = self.material.finalists
            return ProbingConfig(names, seeds=(0, 1, 2), train_texts=1000, test_texts=400, all_latents=False)
        return CoreConfig(contexts=max(1, self.material.tokens // self.setting.context))


def spread(text: Any, tokens: int, characters: int = 8_000) -> list[str]:
    """Beginnings of documents, taken evenly from the whole text; enough for so many tokens."""
    documents = [document[:characters] for document in as_text(text).documents()]
    # Six characters per token are more than any text has.
    return documents[:: max(1, sum(map(len, documents)) // (6 * tokens))]


def line(run: Run, measure: Measure, result: Mapping[str, Any]) -> str:
    """A result as one line of results.jsonl: metrics, and those of single datasets or letters."""
    evaluation = get_evaluation(EVALUATIONS.get(measure, measure))
    found = {metric.name: find(metric, result) for metric in evaluation.metrics}
    values = {name: round(value.value, 6) for name, value in found.items() if value is not None}
    row = {**run._asdict(), "measure": measure, "values": values, "units": _units(measure, result)}
    return json.dumps({name: value for name, value in row.items() if value != {}}, separators=(",", ":")) + "\n"


def _units(measure: Measure, result: Mapping[str, Any]) -> dict[str, Any]:
    """For each dataset or letter its source and its metrics."""
    if measure == "absorption":
        return {
            letter["letter"]: [
                "",
                {"absorption": round(letter["fraction"], 4), "absorption_f1": round(_main_f1(letter), 4)},
            ]
            for letter in result["letters"]
            if letter["why_not"] is None and letter["fraction"] is not None
        }
    if EVALUATIONS.get(measure, measure) != "probing":
        return {}
    return {
        one["name"]: [
            one["source"],
            {f"probing_{k}": round(s["accuracy"]["mean"], 4) for k, s in one["summary"]["top"].items()},
        ]
        for one in result["datasets"]
    }


def _main_f1(letter: Mapping[str, Any]) -> float:
    main = len(letter["main"])
    return float(letter["sparse_f1"][main - 1]) if main else 0.0


def given_texts(*texts: str | None) -> tuple[str, str, str]:
    """The three texts; an error names the flag of a missing one."""
    for name, text in zip(("train", "select", "report"), texts, strict=True):
        if text is None:
            raise UserError(f"{name}_text: must name a text; run trains, selects and reports on three different ones")
    train, select, report = (str(text) for text in texts)
    return train, select, report


def write_results(study: Study, out: Path, page: Path, figures: Path | None = None) -> list[Path]:
    """Write the tables of `out`/results.jsonl into a page, and figures into a folder; returns the files."""
    rows = read_rows(out / RESULTS)
    if not rows:
        raise UserError(f"{out / RESULTS}: holds no results; run the study first")
    results = Results(rows, {name: setting.model for name, setting in study.settings.items()})
    fill_page(page, list(tables(results, study.claims, {name: method.role for name, method in study.methods.items()})))
    if figures is None:
        return [page]
    drawn = [
        (f"{setting}-{metric}", figure)
        for setting in results.settings
        for metric in METRICS
        if (figure := forest(results, setting, metric)) is not None
    ]
    return [page, *(path for path in write_figures(drawn, make_folder(figures)) if path.suffix == ".png")]
