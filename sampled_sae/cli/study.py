"""`sampled-sae study`: a declared comparison of methods, run stage by stage, and its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import tyro


@dataclass(frozen=True)
class StudyCommand:
    """Compare methods by a design that was written down before: train, measure, paired differences, verdicts."""

    design: tyro.conf.Positional[Path]
    """JSON file with tokens, batch_size, settings, methods, stages and claims."""
    do: Literal["plan", "run", "autointerp", "tables"] = "plan"
    """plan: print stages and estimated GPU minutes; run: train and measure what is not finished; autointerp: judge the
    latents that run has kept for it; tables: write the page with the results."""
    out: Path = Path("runs/study")
    """Folder of results.jsonl."""
    page: Path | None = None
    """tables: Markdown page whose tables are replaced. Default: results.md in --out."""
    figures: Path | None = None
    """tables: folder for figures as PNG. Default: no figures."""
    train_text: str | None = None
    """run: text of training."""
    select_text: str | None = None
    """run: text that learning rates and thresholds are chosen on."""
    report_text: str | None = None
    """run: text that core metrics are reported on."""
    tokens: int = 131_072
    """run: tokens of each of these two, taken evenly from the whole text."""
    probing: tuple[str, ...] = ()
    """run: datasets of the measure probing."""
    stages: tuple[str, ...] = ()
    """run: stages to run. Default: all."""
    words: int | None = None
    """run: words of absorption. Default: all."""
    until: float | None = None
    """run: seconds after which nothing begins that would not be finished. Default: no limit."""
    embedder: str | None = None
    """autointerp: sentence embeddings of the judge: a hub name, a folder, or minilm. Default: all-mpnet-base-v2."""
    device: str | None = None
    """Device, such as cpu or cuda:1. Default: the GPU, if there is one."""

    GROUPS: ClassVar[Mapping[str, Sequence[str]]] = {
        "Study": ("design", "do", "out", "embedder", "device"),
        "Run": ("train_text", "select_text", "report_text", "tokens", "probing", "stages", "words", "until"),
        "Tables": ("page", "figures"),
    }
    EXAMPLES: ClassVar[Sequence[str]] = (
        "design.json",
        "design.json --do run --train-text a.jsonl --select-text b.jsonl --report-text c.jsonl --out runs/study",
        "design.json --do tables --out runs/study --page results.md",
    )

    def run(self) -> None:
        from sampled_sae.experiments import study
        from sampled_sae.experiments.design import load_study, plan
        from sampled_sae.experiments.results import write_results

        declared = load_study(self.design)
        if self.do == "plan":
            found = plan(declared)
            total = [sum(values) for values in zip(*(row[1:] for row in found), strict=True)]
            for name, saes, training, whole in (*found, ("all", *total)):
                print(f"{name:16} {saes:4.0f} SAEs  {training:5.1f} min of training  {whole:5.1f} min in all")
        elif self.do == "tables":
            for path in write_results(declared, self.out, self.page or self.out / "results.md", self.figures):
                print(path)
        else:
            texts = study.given_texts(self.train_text, self.select_text, self.report_text)
            material = study.Material(*texts, tokens=self.tokens, probing=self.probing, words=self.words)
            if self.do == "autointerp":
                print(study.judge_slices(declared, material, self.out, self.embedder))
            else:
                whole = study.run_study(declared, material, self.out, self.stages, self.device, self.until)
                print(self.out / study.RESULTS, "" if whole else "(not finished: the same command continues)")
