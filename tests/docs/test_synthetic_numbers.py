"""Every number on docs/synthetic.md is that of the committed data, of the presets, or a public one with its source."""

import functools
import json
import re
import statistics
from pathlib import Path

import pytest

from sampled_sae.config import read_file
from sampled_sae.experiments.synthetic import EXPERIMENTS, grid
from sampled_sae.method import presets
from sampled_sae.method.config import SAEConfig
from sampled_sae.reporting.study_synthetic import synthetic_table
from sampled_sae.reporting.synthetic import load_results
from tests.docs.test_synthsaebench_numbers import (
    full_size,
    rows_of_full_size,
    rows_of_lengths,
    rows_of_recipes,
    sentences_of_full_size,
    sentences_of_recipes,
)

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "synthetic.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())
BASES = ("LF+HA", "HF+HA", "LF+LA", "HF+LA")
OLD = "synthetic/results.json"


@functools.cache
def results(name: str) -> dict:
    found = read_file(DOCS / OLD, "synthetic") if name == OLD else load_results(DOCS / f"results/synthetic/{name}.json")
    for run in found["saes"] if name == OLD else ():
        config = SAEConfig.from_dict(run["config"])
        rate = "" if config.optimizer.lr == 3e-4 else f", lr {config.optimizer.lr:.0e}".replace("e-0", "e-")
        run["label"] = presets.spec(config) + rate + ", dead after 400k" * (config.auxk.dead_after == 400_000)
    return found


@functools.cache
def methods(name: str) -> dict[str, list[dict]]:
    """The runs of each method of a preset."""
    by: dict[str, list[dict]] = {}
    for run in results(name)["saes"]:
        by.setdefault(run["label"], []).append(run)
    return by


def values(name: str, label: str, key: str, bucket: str | None = None) -> list[float]:
    runs = methods(name)[label]
    assert len(runs) == 3, label
    return [run[key] if bucket is None else run[key][bucket] for run in runs]


def mean(*which: str) -> float:
    return statistics.fmean(values(*which))


def ranged(name: str, label: str, digits: int) -> str:
    fves = values(name, label, "fve_heldout_threshold")
    return f"{statistics.fmean(fves):.{digits}f} ({min(fves):.{digits}f} to {max(fves):.{digits}f})"


def named(label: str) -> str:
    spec, comma, rest = label.partition(", lr")
    return f"`{spec}`{comma}{rest}"


def strong(name: str, label: str) -> str:
    return " / ".join(f"{mean(name, label, 'recovery', bucket):.2f}" for bucket in BASES[:2])


def row(name: str, label: str) -> str:
    """A method in the table of results: p = 0.107, and p = 0.20 where it has that."""
    cells = [named(label) + "*" * (name == OLD), f"{mean(name, label, 'fve_heldout'):.3f}", ranged(name, label, 4)]
    verdict = next(one for one in synthetic_table(results(name)).rows if one[0] == label)
    cells.append(f"{verdict[5]:+.4f}, {verdict[7]}" if name != OLD and verdict[5] is not None else "")
    cells += [strong(name, label), f"{mean(name, label, 'dead'):.2f}"]
    other = "paper-table-p20"
    there = label in methods(other)
    cells += [f"{mean(other, label, 'fve_heldout_threshold'):.4f}", strong(other, label)] if there else ["", ""]
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


@functools.cache
def rows_of_methods() -> list[str]:
    found = [row("paper-table", label) for label in methods("paper-table")]
    found += [row(OLD, label) for label in methods(OLD) if label not in methods("paper-table")]
    for label in methods(name := "paper-finite"):
        cells = [f"{mean(name, label, 'fve_train'):.4f}", f"{mean(name, label, 'fve_heldout'):.3f}"]
        cells += [ranged(name, label, 3), f"{mean(name, label, 'dead'):.2f}"]
        found.append(f"| {named(label)} | {' | '.join(cells)} | {mean(name, label, 'recovery', 'HF+HA'):.2f} |")
    return found


def rows_of_examples() -> list[str]:
    ceiling, memory = (
        json.loads((DOCS / f"synthetic/{name}.json").read_text()) for name in ("ceiling", "memorization")
    )
    found = []
    for step in (ceiling["training"][number] for number in (0, 1, -1)):
        fire = " | ".join(f"{step['fire'][name]:.2f}" for name in BASES)
        found.append(f"| {step['step']:,} | {step['fve']:.4f} | {fire} |")
    saes = memory["saes"].values()
    titles = {
        "threshold": "one threshold, calibrated on fresh samples",
        "threshold of training samples": "one threshold, calibrated on the training samples",
        "K per sample": "K largest of each sample",
        "threshold, latents that fire in training": "one threshold, only latents that fire in training",
    }
    trained = " | ".join(f"{sae['fve_train']:.2f}" for sae in saes)
    found.append(f"| training samples, training-time selection | {trained} |")
    for key, title in titles.items():
        cells = [f"{sae[key]['fve']:.2f} ({sae[key]['l0']:.0f}, {sae[key]['l0_max']:,})" for sae in saes]
        found.append(f"| {title} | {' | '.join(cells)} |")
    return found


def test_tables():
    shown = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| |")]
    expected = rows_of_methods() + rows_of_examples() + rows_of_benchmark()
    for line in expected:
        assert line in shown, line
    others = [line for line in shown if line not in expected]
    assert [line.split("|")[1].strip() for line in others] == [  # headers
        "step",
        "5,000 steps",
        "10,000 steps",
        "20,000 steps",
        "20,000 steps",
        "steps",
    ]


def rows_of_benchmark() -> list[str]:
    return rows_of_recipes() + rows_of_full_size() + rows_of_lengths()


def sentences() -> list[str]:
    """The sentences of the page that state results, with the numbers of the data."""
    table, twenty, finite = "paper-table", "paper-table-p20", "paper-finite"

    def fve(label: str, name: str = table) -> float:
        return mean(name, label, "fve_heldout_threshold")

    def rare(label: str, name: str = table) -> float:
        return mean(name, label, "recovery", "LF+HA")

    gains = [fve(f"{score}-l20-released70") - fve(f"sampled:score={score},l=20") for score in ("l2", "entropy")]
    half = [f"released:score={score}" for score in ("l2", "entropy")]
    leaders = ("topk", "topk_then_batchtopk:until=0.7", "released")
    l0 = {label: mean(table, label, "l0_threshold") for label in methods(table)}
    ema = {label: mean(table, label, "l0_ema") for label in methods(table)}
    fast = [fve(f"{name}, lr 3e-3{rest}", OLD) for name, rest in (("batchtopk", ", dead after 400k"), ("topk", ""))]
    assert f"{fast[0]:.3f}" == f"{fast[1]:.3f}", "TopK reaches the same"
    assert all(fve("batchtopk") < fve(label) < fve("topk") for label in half)
    data = results(table)["data"]
    both = [f"{fve(label):.4f} and {fve(label, OLD):.4f}" for label in ("batchtopk", "topk", "released")]
    return [
        f"an FVE of {mean(finite, 'batchtopk', 'fve_train'):.4f} on the training samples and "
        f"{fve('batchtopk', finite):.3f} on fresh ones, and recovers no feature",
        f"4,096 latents it reaches {fve('batchtopk'):.3f}, and",
        f"(l2 {fve('sampled:score=l2,l=20'):.3f}, entropy {fve('sampled:score=entropy,l=20'):.3f}), but a *fixed* set "
        f"of 1,200 latents (`prefix`) is better than both ({fve('sampled:score=prefix,l=20'):.3f})",
        f"reaches {fve('released'):.4f} and recovers {rare('released'):.0%} of the rare and "
        f"{mean(table, 'released', 'recovery', 'HF+HA'):.0%} of the frequent strong features",
        f"changes little: {gains[0]:+.4f} (l2) and {gains[1]:+.4f} (entropy)",
        f"reach {fve(half[0]):.3f} and {fve(half[1]):.3f}, more than BatchTopK and less than TopK, and "
        f"recover {rare(half[0]):.0%} and {rare(half[1]):.0%} of the rare",
        f"**TopK comes close without any pool:** {fve('topk'):.3f}, with {rare('topk'):.0%} of the rare strong",
        f"BatchTopK reaches {fast[0]:.3f}, as TopK does at that rate (version 0.1)",
        f"coherence {data['coherence']:.4f} (the paper: 0.0833), {data['observed_l0']:.1f} active features per sample",
        f"({results(twenty)['data']['observed_l0']:.1f} active features)",
        f"(BatchTopK {both[0]}, TopK {both[1]}, released {both[2]})",
        f"L0 is {ema['sampled:score=uniform,l=5']:.0f} for `uniform` with l = 5, "
        f"{ema['sampled:score=uniform,l=20']:.0f} with l = 20, {ema['sampled:score=entropy,l=5']:.0f} for entropy with "
        f"l = 5. The calibrated threshold gives {min(l0.values()):.1f} to {max(l0.values()):.1f} for every SAE",
        f"but only {mean(table, 'released', 'dead'):.0%} of the latents do not fire after the release",
        f"of the {results(twenty)['data']['observed_l0']:.1f} active features are strong",
        f"give up the rare features ({min(rare(n, twenty) for n in leaders):.0%} to "
        f"{max(rare(n, twenty) for n in leaders):.0%} recovered)",
        f"TopK with its own selection has {mean(finite, 'topk', 'fve_heldout'):.3f} in the table above",
        *sentences_of_full_size(),
        *sentences_of_recipes(),
        *sentences_of_examples(),
    ]


def sentences_of_examples() -> list[str]:
    ceiling, memory = (
        json.loads((DOCS / f"synthetic/{name}.json").read_text()) for name in ("ceiling", "memorization")
    )
    leak = ceiling["interference"]
    first, pool = memory["saes"]["batchtopk"], memory["saes"]["sampled:score=l2,l=20"]
    one = first["threshold"]
    return [
        f"A weak coefficient has size {leak['LF+LA']['own']:.2f}, the leak {leak['LF+LA']['others']:.2f}; a strong one "
        f"has size {leak['LF+HA']['own']:.2f} against the same {leak['LF+HA']['others']:.2f}",
        f"up to {one['l0_max']} latents of BatchTopK fire on one sample, the reconstructions have {one['norm']:.1f} "
        f"times the norm of the samples, and the tenth of the samples with the largest norms has "
        f"{one['error_of_largest_tenth']:.0%} of the error",
        f"the same SAE has an FVE of {first['K per sample']['fve']:.2f}",
        f"{pool['firings_of_others']:.0%} of the firings at the threshold are of latents that never fire in training",
    ]


@pytest.mark.parametrize("sentence", sentences())
def test_sentences(sentence):
    assert sentence in TEXT


def test_claims_in_words():
    small = [label for label in (*methods("paper-table"), *methods(OLD)) if label.endswith("l=5")]
    where = {label: OLD if label in methods(OLD) else "paper-table" for label in small}
    assert len(small) == 4 and "no score recovers more than 4% of a bucket" in TEXT
    assert all(round(mean(where[one], one, "recovery", b), 2) <= 0.04 for one in small for b in BASES)
    every = [run for name in ("paper-table", "paper-table-p20", "paper-finite", OLD) for run in results(name)["saes"]]
    assert {run["recovery"][bucket] for run in every for bucket in ("LF+LA", "HF+LA")} == {0.0}
    finite = methods("paper-finite")["batchtopk"]
    assert {share for run in finite for share in run["recovery"].values()} == {0.0}
    fves = [
        mean("paper-table-p20", n, "fve_heldout_threshold")
        for n in ("topk", "topk_then_batchtopk:until=0.7", "released")
    ]
    verdicts = {one[0]: one[7] for one in synthetic_table(results("paper-table-p20")).rows}
    assert verdicts["released:score=l2"] == "better" and "only l2 with half of the latents, released, is better" in TEXT
    assert {verdicts[f"sampled:score={score},l=20"] for score in ("l2", "entropy")} == {"undecided"}
    keys = ("fve_heldout", "fve_heldout_threshold")
    most = max(run[key] for run in every if run["fve_train"] < 0.99 for key in keys)
    assert most < 0.915 and "no SAE exceeds 0.915" in TEXT
    assert "are within 0.001 of each other" in TEXT and max(fves) - min(fves) < 0.001
    assert methods(OLD).keys() - methods("paper-table").keys(), "marked as version 0.1"


def test_the_recipe():
    for name in ("paper-table", "paper-table-p20", "paper-finite"):
        experiment, stored = EXPERIMENTS[name], results(name)
        assert stored["train"] == {key: getattr(experiment, key) for key in stored["train"]}
        assert stored["data"]["config"] == experiment.data.to_dict() and not experiment.normalize
        config = grid(experiment)[0].config
        assert config.optimizer == presets.PAPER_OPTIMIZER and config.init == presets.PAPER_INIT
        optimizer, dead = config.optimizer, config.auxk.dead_after
        assert (
            f"Adam with learning rate {optimizer.lr:.0e} and beta2 {optimizer.beta2}, ".replace("e-04", "e-4")
            + f"gradient clipped at norm {optimizer.clip:g}, warm-up over {optimizer.warmup_steps:,} steps, decay over "
            + f"the last {optimizer.decay:.0%}, AuxK for latents that have not fired for {dead:,} samples"
        ) in TEXT


def test_the_recipe_of_the_benchmark():
    experiment = EXPERIMENTS["synthsaebench"]
    assert full_size()["data"] == experiment.data.to_dict()
    assert full_size()["sizes"] == {"latents": experiment.d_sae, "k": experiment.k, "batch_size": experiment.batch_size}
    config = grid(experiment)[0].config
    assert config.optimizer == presets.PAPER_OPTIMIZER and config.auxk.dead_after == 1000 * experiment.batch_size
    assert "with AuxK for latents that have not fired for 1,000 steps of 1,024 samples" in TEXT


STATED = {
    *(
        "0.02",
        "0.107",
        "0.20",
        "0.2",
        "0.0833",
        "0.0625",
        "0.7",
        "0.5",
        "0.4",
        "0.0005",
        "0.1",
        "0.99",
        "0.001",
        "0.999",
    ),
    *("0.00", "0.915", "2602.14687"),
}
"""Settings of the data, the paper's and public numbers, and what `test_claims_in_words` covers."""


def test_no_other_number():
    left = TEXT
    for known in [
        *sentences(),
        *(" ".join(line.split()) for line in rows_of_methods() + rows_of_examples() + rows_of_benchmark()),
    ]:
        left = left.replace(known, " ")
    assert set(re.findall(r"\d+\.\d+", left)) <= STATED
