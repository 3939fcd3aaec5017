"""A study: a declared list of runs, trained and measured stage by stage, with a line of results per SAE and evaluation.

The design is a JSON file with settings, methods, stages and claims (see docs/results/design.json). A stage trains its
methods in each of its settings, once per seed and factor of the default learning rate, and measures them. A stage
without factors uses each method's best one: the lowest FVU on the selection text in an earlier stage.

Activations and SAEs stay in memory. results.jsonl in the output folder has everything that is finished, and is all that
a later call needs to continue: an SAE that has to be measured again is trained again, with the same result.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from sampled_sae import api
from sampled_sae.config import require
from sampled_sae.data.text import as_text
from sampled_sae.experiments.design import (
    PREPARED,
    Budget,
    Measure,
    Stage,
    Study,
    at_once,
    measure_seconds,
    runs_of,
    train_seconds,
)
from sampled_sae.experiments.layer import Layer, Material, similarity
from sampled_sae.experiments.results import RESULTS, judged, line, line_of, read_slice, write_slice
from sampled_sae.method.config import SAEConfig
from sampled_sae.method.presets import paper_recipe, parse_methods
from sampled_sae.method.rate import default_lr
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.reporting.study import BASE, Row, Run, read_rows
from sampled_sae.sae import SAE
from sampled_sae.utils import system
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import alone_in, make_folder, remove_leftovers, writing
from sampled_sae.utils.progress import say

SLICES = "slices"
SLICES_AT_ONCE = 24  # slices that share one reading of the text
LONGEST = 2**20  # bytes that no line exceeds
ROOM = 24 * 2**30  # bytes of the GPU that stay free of SAEs that are kept


Waiting = dict[Measure, dict[Run, SAE | None]]
"""By measure: trained SAEs that are to be measured together."""


class OutOfTime(Exception):
    """Nothing more would be finished in time."""


def run_study(
    study: Study,
    material: Material,
    out: Path,
    only: Sequence[str] = (),
    device: str | None = None,
    until: float | None = None,
) -> bool:
    """Train and measure what is not finished, of the named stages in their order or of all; whether all of it is.

    `until`: seconds after which nothing begins that would not be finished.
    """
    known = [stage.name for stage in study.stages]
    for name in only:
        require(name in known, "stages", name, f"must be among {', '.join(known)}")
    require(until is None or until >= 0, "until", until, "must be a number of seconds")
    system.usable_device(device)
    for text in (material.train, material.select, material.report):
        if isinstance(text, str):  # before a model is loaded
            next(as_text(text).documents())
    work = Work(study, material, out, device, Budget(until))
    try:
        with alone_in(out):
            remove_leftovers(out / SLICES)
            for name in only or known:
                work.stage(study.stages[known.index(name)])
    except OutOfTime as reason:
        say(f"{work.budget.spent:7.1f} s  stopped before {reason}: until = {until:g} s; the same call continues")
        return False
    if work.failed:
        say(f"failed, and left out: {', '.join(work.failed)}")
    return not work.failed


@dataclass
class Work:
    """What is in memory while stages are run."""

    study: Study
    material: Material
    out: Path
    device: str | None
    budget: Budget
    model: LanguageModel | None = None
    layer: Layer | None = None
    here: tuple[Any, ...] = ()  # what decides the layer's activations
    kept: dict[tuple[Run, int], SAE | None] = field(default_factory=dict)  # by run and tokens; None: there is none
    failed: list[str] = field(default_factory=list)  # what ended with an error: the rest must not wait for it

    @property
    def path(self) -> Path:
        return self.out / RESULTS

    def rows(self) -> list[Row]:
        """What is finished."""
        return read_rows(self.path, self.study.settings)

    def stage(self, stage: Stage) -> None:
        """One stage; SAEs of a setting are measured in groups, each as soon as it is complete."""
        runs = runs_of(self.study, stage, self.rows())
        single = [measure for measure in stage.measure if measure != "similarity"]
        done = {(row.run, row.measure) for row in self.rows()}
        for setting, group in _grouped(runs).items():
            tokens = self.study.tokens_of(setting, stage)
            waiting: Waiting = {measure: {} for measure in single}
            for run in group:
                measures = [measure for measure in single if (run, measure) not in done]
                if not measures:
                    continue
                if not self._allows(run, tokens, waiting):
                    self._finish(waiting)  # may take less time than estimated
                    if not self._allows(run, tokens, waiting):
                        raise OutOfTime(f"{stage.name}, {run.name}")
                sae = self.sae(run, tokens)
                for measure in measures:
                    waiting[measure][run] = sae
                self._finish({m: saes for m, saes in waiting.items() if len(saes) == at_once(m)})
            self._finish(waiting)
        if "similarity" in stage.measure:
            self._compare(stage, runs)

    def _finish(self, waiting: Waiting) -> None:
        """Measure SAEs that wait for it."""
        for measure, saes in waiting.items():
            if saes:
                self._measure(measure, saes)
                saes.clear()

    # ---- time ----------------------------------------------------------------------------------------------

    def _allows(self, run: Run, tokens: int, waiting: Waiting) -> bool:
        """Whether a run and those that wait can be trained and measured in the time that is left."""
        needed = self._preparation(run.setting, [*waiting]) + self._train_estimate(run, tokens)[1]
        needed += sum(self._measure_estimate(run.setting, m, len(saes) + 1) for m, saes in waiting.items())
        return self.budget.allows(needed)

    def _preparation(self, setting: str, measures: Sequence[Measure]) -> float:
        layer = self.layer if self.layer is not None and self._place(setting) == self.here else None
        there = layer is not None and layer.is_harvested
        seconds = 0.0 if there else self.budget.seconds("harvest", self._harvest(setting))
        if "absorption" in measures and not (layer is not None and layer.has_words):
            seconds += self.budget.seconds("words", PREPARED["absorption"])
        return seconds

    def _harvest(self, setting: str) -> float:
        return PREPARED["harvest"] * self._most_tokens(setting) / 25e6

    def _most_tokens(self, setting: str) -> int:
        """Tokens of the longest training on the activations of a setting, which others may share."""
        place = self._place(setting)
        return max(self.study.tokens_of(name) for name in self.study.settings if self._place(name) == place)

    def _train_estimate(self, run: Run, tokens: int) -> tuple[str, float]:
        """Kind of the work, and its seconds; none for an SAE that is in memory."""
        d_sae, cost = self.study.settings[run.setting].d_sae, self.study.methods[run.method].cost
        kind = f"train {d_sae} {tokens} {cost:g}"
        if (run, tokens) in self.kept:
            return kind, 0.0
        return kind, self.budget.seconds(kind, train_seconds(d_sae, tokens, cost))

    def _measure_estimate(self, setting: str, measure: Measure, saes: int) -> float:
        d_sae = self.study.settings[setting].d_sae
        return self.budget.seconds(f"{measure} {d_sae}", measure_seconds(measure, d_sae, saes))

    # ---- training ------------------------------------------------------------------------------------------

    def _place(self, setting: str) -> tuple[Any, ...]:
        found = self.study.settings[setting]
        return found.model, found.layer, found.context, found.recipe, found.high_norm_factor

    def open(self, setting: str, harvest: bool = True) -> Layer:
        """The layer of a setting, with its activations; another one's are given up, and the SAEs of it."""
        place = self.study.settings[setting]
        if self.layer is None or self._place(setting) != self.here:
            if self.layer is not None:
                self.layer.release()
            self.kept.clear()
            name = self.material.models.get(place.model, place.model)
            if self.model is None or self.layer is None or self.layer.named != place.model:
                self.layer = self.model = None
                with self.budget.timed("load", f"load {name}", 20.0):
                    self.model = api.load_model(name, device=self.device)
            self.layer, self.here = Layer(self.model, place, self.material), self._place(setting)
        if harvest and not self.layer.is_harvested:
            with self.budget.timed("harvest", f"harvest layer {place.layer} of {place.model}", self._harvest(setting)):
                self.layer.harvest(self._most_tokens(setting))
        return self.layer

    def config(self, run: Run, tokens: int) -> SAEConfig:
        """The configuration of a run."""
        place, study, width = self.study.settings[run.setting], self.study, self.open(run.setting).model.width
        base = default_lr(width, place.d_sae, place.k, study.batch_size, tokens // study.batch_size)
        shared: dict[str, Any] = {"lr": base * run.factor} if place.recipe == "default" else paper_recipe()
        spec = study.methods[run.method].spec
        (config,) = parse_methods([spec], d_sae=place.d_sae, k=place.k, seeds=(run.seed,), **shared)
        return replace(config, name=run.name)

    def sae(self, run: Run, tokens: int) -> SAE | None:
        """The SAE of a run, trained if it is not in memory; None if it diverged."""
        layer = self.open(run.setting)
        if (run, tokens) not in self.kept:
            self._make_room(layer)
            config, (kind, _) = self.config(run, tokens), self._train_estimate(run, tokens)
            guess = train_seconds(config.d_sae, tokens, self.study.methods[run.method].cost)
            sae = None
            with self.budget.timed(kind, what := f"train {run.setting} {run.name}", guess):
                try:
                    sae = layer.train(config, tokens, self.study.batch_size)
                except (UserError, RuntimeError) as error:
                    say(f"{what}: {error}")
                    if "try a lower lr" not in str(error):
                        self.failed.append(what)
            self.kept[run, tokens] = sae
        return self.kept[run, tokens]

    def _diverged(self, run: Run) -> bool:
        """Whether a run has no SAE because it diverged."""
        return f"train {run.setting} {run.name}" not in self.failed

    def _make_room(self, layer: Layer) -> None:
        """Give up the SAEs that were trained first."""
        if layer.model.device.type == "cuda" and (system.available(layer.model.device) or 0) < ROOM:
            torch.cuda.empty_cache()
            while self.kept and (system.available(layer.model.device) or 0) < ROOM:
                del self.kept[next(iter(self.kept))]
                torch.cuda.empty_cache()

    # ---- measuring -----------------------------------------------------------------------------------------

    def _measure(self, measure: Measure, saes: Mapping[Run, SAE | None]) -> None:
        """Measure SAEs and write their lines."""
        lines = [
            line(run, measure, {"diverged": 1.0}) for run, sae in saes.items() if sae is None and self._diverged(run)
        ]
        there = {run: sae for run, sae in saes.items() if sae is not None}
        if there:
            setting = next(iter(there)).setting
            d_sae, layer = self.study.settings[setting].d_sae, self.open(setting)
            if measure == "absorption" and not layer.has_words:
                with self.budget.timed("words", f"words of absorption, {setting}", PREPARED["absorption"]):
                    layer.read_words()
            guess = measure_seconds(measure, d_sae, len(there))
            with self.budget.timed(
                f"{measure} {d_sae}", what := f"{measure}, {len(there)} SAE{'s' * (len(there) > 1)}", guess
            ):
                try:
                    lines += self._measured(measure, there, layer)
                except (UserError, RuntimeError) as error:
                    say(f"{what}: {error}")
                    self.failed.append(f"{what} from {setting} {next(iter(there)).name} on")
        self._write(lines)

    def _measured(self, measure: Measure, saes: Mapping[Run, SAE], layer: Layer) -> list[str]:
        if measure == "rate":
            return [line(run, measure, sae.cfg.metadata["training"]["heldout"]) for run, sae in saes.items()]
        if measure == "slices":
            folder = make_folder(self.out / SLICES)
            return [
                line(run, measure, write_slice(folder, run, sae, layer.frequency(sae))) for run, sae in saes.items()
            ]
        results = zip(saes.items(), layer.measure(measure, list(saes.values())), strict=True)
        return [line_of(run, measure, result, sae) for (run, sae), result in results]

    def _compare(self, stage: Stage, runs: Sequence[Run]) -> None:
        """Similarity of each SAE with the next seed of its method, and with the base of the same and the next seed."""
        by_name = {(run.setting, run.method, run.seed): run for run in runs}
        done = {row.run for row in self.rows() if row.measure == "similarity"}
        for run in [run for run in runs if run not in done]:
            after = stage.seeds[(stage.seeds.index(run.seed) + 1) % len(stage.seeds)]
            keys = [(run.method, run.seed), (run.method, after), (BASE, run.seed), (BASE, after)]
            if after == run.seed or any((run.setting, *key) not in by_name for key in keys):
                raise UserError(f"stage {stage.name!r}: similarity needs {BASE} and two seeds")
            four = [by_name[run.setting, method, seed] for method, seed in keys]
            needed = self._preparation(run.setting, ())
            tokens = self.study.tokens_of(run.setting)
            needed += sum(self._train_estimate(one, tokens)[1] for one in dict.fromkeys(four))
            needed += self._measure_estimate(run.setting, "similarity", 1)
            if not self.budget.allows(needed):
                raise OutOfTime(f"{stage.name}, similarity of {run.name}")
            saes = [self.sae(one, tokens) for one in four]
            there = [sae for sae in saes if sae is not None]
            if len(there) < len(saes):
                gone = [one for one, sae in zip(four, saes, strict=True) if sae is None]
                self._write([line(run, "similarity", {"diverged": 1.0})] if all(map(self._diverged, gone)) else [])
                continue
            layer, d_sae = self.open(run.setting), self.study.settings[run.setting].d_sae
            guess = measure_seconds("similarity", d_sae, 1)
            with self.budget.timed(f"similarity {d_sae}", f"similarity of {run.setting} {run.name}", guess):
                self._write([line(run, "similarity", similarity(there, layer))])

    def _write(self, lines: Sequence[str]) -> None:
        """Append lines; they are on disk when this returns. A line that was cut off is overwritten."""
        with writing(self.path), self.path.open("ab+") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LONGEST))
            file.truncate(size - len(file.read().rpartition(b"\n")[2]))
            file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())


def judge_slices(
    study: Study,
    material: Material,
    out: Path,
    embedder: str | None,
    tokens: int = 250_000,
    device: str | None = None,
) -> Path:
    """Automated interpretability of the slices in `out`, with an embedding model as the judge; adds their lines."""
    system.usable_device(device)
    work = Work(study, material, out, device, Budget())
    rows = work.rows()
    done = {row.run for row in rows if row.measure == "autointerp"}
    live = {row.run: [row.values.get(f"live_{n}", 0.0) for n in range(3)] for row in rows if row.measure == "slices"}
    files: dict[str, list[Path]] = {}
    for path in sorted((out / SLICES).glob("*.safetensors")):
        run, _ = read_slice(path, torch.device("cpu"))
        if run in live and run not in done:
            files.setdefault(run.setting, []).append(path)
    for setting, paths in files.items():
        layer = work.open(setting, harvest=False)
        for some in (paths[i : i + SLICES_AT_ONCE] for i in range(0, len(paths), SLICES_AT_ONCE)):
            saes = dict(read_slice(path, layer.model.device) for path in some)
            for run, values in judged(saes, layer, live, tokens, embedder):
                work._write([line(run, "autointerp", values)])
    return work.path


def _grouped(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Runs by setting; those of one seed follow each other, because they share the order of the tokens."""
    groups: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        groups.setdefault(run.setting, []).append(run)
    return groups
