"""Results of evaluations, explanations, comparisons, reports, the synthetic experiment, records of stages."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import torch

import sampled_sae as ss
from sampled_sae.browser.write import Record, html_page, read_record
from sampled_sae.config import write_file
from sampled_sae.evals.autointerp.chat import AnswerCache, ChatConfig
from sampled_sae.evals.results import (
    fingerprint,
    load_live,
    read_density,
    read_explanations,
    read_result,
    read_unique,
    save_explanations,
    save_firing,
    write_result,
)
from sampled_sae.evals.similarity.members import open_members
from sampled_sae.experiments.stages import Record as StageRecord
from sampled_sae.experiments.stages import Stage
from sampled_sae.experiments.synthetic import merge
from sampled_sae.reporting.collect import BROWSER, collect
from sampled_sae.reporting.synthetic import load_results, print_results, write_page
from sampled_sae.reporting.write import write_report
from tests.fuzz.mutate import binary_damage, json_damage, lines_damage
from tests.fuzz.target import CFG, D_SAE, OWN, WEIGHTS, File, Target, sealed, strict
from tests.fuzz.training import CONFIGS, NAMES
from tests.reporting import made_up, made_up_compare, made_up_sweep

RESULTS = tuple(f"evals/{name}.json" for name in made_up_sweep.ALL)
STAGE = Stage("train", {"d_sae": 8}, lambda: None, ())


def build(root: Path) -> None:
    """Write the undamaged files; needs those of the trainings."""
    saes = sorted((root / "run" / "saes").iterdir())
    _comparison(root / "compare", saes)  # before there are explanations, which take an embedder to compare
    shutil.copytree(root / "run" / "saes", root / "pair")
    for folder in (root / "pair").iterdir():
        save_firing(folder, torch.arange(D_SAE), 1000)
    for number, folder in enumerate([root / "sae", *saes]):
        config = CONFIGS[0].to_dict()
        for name, make in made_up_sweep.ALL.items():
            write_result(folder, name, {"result": make(), "sae": config, "asked": {"contexts": 8}})
        known = {n: {"explanation": f"words {number} {n}", "score": n / 10} for n in range(5)}
        save_explanations(folder, known, explainer="made up")
        save_firing(folder, torch.arange(D_SAE), 1000)
    made_up_sweep.write_sweep(root / "sweep", scores=("l2",), ls=(2,), seeds=(0,))
    _experiments(root)
    _page(root / "page", root / "sae")
    answers = AnswerCache(ChatConfig(cache=str(root / "answers")))
    for n in range(3):
        answers.keep({"model": "m", "n": n}, f"answer {n}")


def _comparison(folder: Path, saes: list[Path]) -> None:
    content = ss.compare(saes, device="cpu").to_dict()
    names = [sae["name"] for sae in content["saes"]]
    content["pairs"][0]["unique"] = [made_up_compare.unique(*names), made_up_compare.unique(*names[::-1])]
    folder.mkdir()
    write_file(folder / "compare.json", "comparison", content)


def _experiments(root: Path) -> None:
    results = made_up.results(made_up.sae("BatchTopK"), made_up.sae("l2 l=5", l=5.0))
    results["data"]["config"], results["train"] = {"seed": 0}, {"steps": 5}
    for name in ("one", "two"):
        (root / "synthetic" / name).mkdir(parents=True)
        other = results if name == "one" else results | {"saes": [made_up.sae("TopK", 1)]}
        (root / "synthetic" / name / "results.json").write_text(json.dumps(other))
        shutil.copy(root / "run" / "log.jsonl", root / "synthetic" / name)
    record = StageRecord(root, "tiny")
    record.path = root / "reproduce" / "reproduce.json"
    record.path.parent.mkdir()
    record.begin(STAGE)
    record.end(STAGE, 1.0, True)


def _page(folder: Path, sae: Path) -> None:
    record = Record("../sae", fingerprint(sae), "an SAE", "48 latents", "data-0123456789ab", 7.5)
    (folder / record.data).mkdir(parents=True)
    write_file(folder / BROWSER, "browser", record.to_dict())
    (folder / "index.html").write_text(html_page(record.title, record.summary, record.data))


def _results(folder: Path) -> Any:
    found = [read_result(folder, name) for name in made_up_sweep.ALL]
    if None in found:
        raise ss.UserError("not a result: the evaluation is repeated")
    return found, load_live(folder, D_SAE).mask


def _explanations(folder: Path) -> Any:
    return read_explanations(folder, D_SAE)


def _firing(folder: Path) -> Any:
    found = read_density(folder, D_SAE)
    return found and (found.fired, found.tokens), load_live(folder, D_SAE).mask


def _compare(folder: Path) -> Any:
    members = open_members([folder])
    found = ss.compare([folder], device="cpu").to_dict()
    return [member.configuration for member in members], found


def _unique(folder: Path) -> Any:
    sae = next((folder.parent / "run" / "saes").iterdir())
    return read_unique(folder, sae, D_SAE)


def _report(folder: Path) -> Any:
    """The whole report; `notes` in front."""
    found = collect([folder])
    written = write_report([folder], folder / "report", figures=False)
    kept = {path.name: path.read_text() for path in written.tables}
    return [*found.notes, *written.notes, *(run.log_note for run in found.runs)], kept


def _collect(folder: Path) -> Any:
    found = collect([folder])
    known = [(sae.name, sae.config, sae.metadata, sae.width, sae.latents, sae.results) for sae in found.saes]
    return [*found.notes, *(run.log_note for run in found.runs)], known, [run.log for run in found.runs]


def _synthetic(folder: Path) -> Any:
    results = load_results(folder / "results.json")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        print_results(results)
    return printed.getvalue()


def _synthetic_page(folder: Path) -> Any:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        merged = merge([folder / "one", folder / "two"], folder / "out")
        write_page(folder / "out")
        print_results(merged)
    return printed.getvalue()


def _record(folder: Path) -> Any:
    record = StageRecord(folder, "tiny")
    record.check(STAGE)
    done = record.is_done(STAGE)
    record.begin(STAGE)
    record.end(STAGE, 1.0, True)
    return done


def _served(folder: Path) -> Any:
    """What a server knows of a page, and what a report links."""
    record = read_record(folder, folder.parent / "sae")
    return record, html_page(record.title, record.summary, record.data, served=True), collect([folder]).browsers


def _answers(folder: Path) -> Any:
    found = AnswerCache(ChatConfig(cache=str(folder)))
    return [found.find({"model": "m", "n": n}) for n in range(3)]


def targets() -> list[Target]:
    """All of them."""
    swept = f"saes/{made_up_sweep.grid(('l2',), (2,), (0,))[0].name}"
    reported = (
        *strict(*(f"{swept}/{name}" for name in (CFG, OWN, *RESULTS)), "run.json"),
        File("log.jsonl", lines_damage, "lenient"),
    )
    pair = (
        *sealed(*(f"{NAMES[0]}/{name}" for name in (WEIGHTS, CFG, OWN))),
        File(f"{NAMES[0]}/evals/firing.safetensors", binary_damage, "lenient"),
    )
    merged = (*strict("one/results.json"), File("two/log.jsonl", lines_damage, "lenient"))
    noted: Any = {"copies": True, "notes": lambda result: result[0]}
    return [
        Target("results", "sae", strict(*RESULTS), _results, 2),
        Target("explanations", "sae", strict("evals/explanations.json"), _explanations, 2),
        Target("sealed results", "sae", sealed(*RESULTS), _results),
        Target("sealed explanations", "sae", sealed("evals/explanations.json"), _explanations),
        Target("sealed comparison", "compare", sealed("compare.json"), _unique),
        Target("firing counts", "sae", (File("evals/firing.safetensors", binary_damage, "lenient"),), _firing),
        Target("compare", "pair", pair, _compare, 0.5),
        Target("unique latents", "compare", strict("compare.json"), _unique, 2),
        Target("collect", "sweep", reported, _collect, 2, notes=lambda result: result[0]),
        Target("report", "sweep", reported, _report, 0.15, **noted),
        Target("report of a comparison", "compare", strict("compare.json"), _report, 0.15, **noted),
        Target("synthetic", "synthetic/one", strict("results.json"), _synthetic, 1),
        Target("merge", "synthetic", merged, _synthetic_page, 0.15, copies=True),
        Target("record of stages", "reproduce", strict("reproduce.json"), _record, 1, True),
        Target("page of latents", "page", (File(BROWSER, json_damage, "strict", frozenset({"limit"})),), _served),
        Target("answers", "answers", (File("answers.jsonl", lines_damage, "lenient"),), _answers),
    ]
