"""The recipes on the small SynthSAEBench: their rows and sentences on docs/synthetic.md, and the claims in words."""

import functools
import json
import statistics
from pathlib import Path

from sampled_sae.utils.paired import Difference, paired

DOCS = Path(__file__).parents[2] / "docs"
TEXT = " ".join((DOCS / "synthetic.md").read_text(encoding="utf-8").split())


def recipes() -> dict[str, list[dict]]:
    """The small SynthSAEBench: the measurements of each recipe."""
    runs = json.loads((DOCS / "synthetic/synthsaebench.json").read_text())["runs"]
    return {name: [run for run in runs if run["recipe"] == name] for name in dict.fromkeys(r["recipe"] for r in runs)}


def ends(name: str, steps: int = 10_000) -> list[dict]:
    """The last measurement of each run of a recipe, by seed."""
    runs = [run for run in recipes()[name] if run["step"] == run["steps"] == steps]
    return sorted(runs, key=lambda run: run["seed"])


def at_end(name: str, key: str, steps: int = 10_000) -> float:
    return statistics.fmean(run[key] for run in ends(name, steps))


def by_seed(name: str, steps: int) -> str:
    return " / ".join(f"{run['mcc']:.3f}" for run in ends(name, steps))


def leaves(name: str, steps: int = 20_000) -> tuple[float, float]:
    """Of the latents matched with leaves: the mean cosine, and the mean coefficient of the parent."""
    runs = ends(name, steps)
    cosine = statistics.fmean(run["levels"]["depth 3"][1] for run in runs)
    return cosine, statistics.fmean(run["leaf"][1] for run in runs)


SHORT = {
    "saelens": "SAELens, published settings",
    "saelens-own": "the same, on its own generator",
    "preset": "paper recipe (the preset)",
    "defaults-early": "default recipe",
}
LONG = {
    "saelens": "SAELens, published settings",
    "saelens, b_dec mean": "SAELens, b_dec starts at the mean",
    "saelens, b_dec mean, unit rows": "the same, decoder rows start with norm 1, so that all latents fire",
    "preset-early": "paper recipe",
    "preset-early, b_dec 0": "paper recipe, b_dec starts at 0",
    "preset-early, few active": "paper recipe, 82% of the latents do not fire at first",
    "preset-early, few active, b_dec 0": "paper recipe, both",
    "defaults-early": "default recipe",
    "defaults-early, b_dec 0": "default recipe, b_dec starts at 0",
    "defaults-early, few active": "default recipe, 82% of the latents do not fire at first",
}
"""The rows of the two tables of recipes."""
MATRYOSHKA_POOL = "released:score=l2,prefixes=8+24+56+120+256"
METHODS = {
    MATRYOSHKA_POOL: "`matryoshka` and `released:score=l2` together",
    "matryoshka": "`matryoshka`",
    "released:score=l2": "`released:score=l2`",
    "released:score=entropy": "`released:score=entropy`",
    "defaults-early": "`batchtopk`",
    "topk_then_batchtopk": "`topk_then_batchtopk`, the default",
    "sampled:score=l2,l=20": "`sampled:score=l2,l=20`",
    "topk_then_batchtopk:until=0.7": "`topk_then_batchtopk:until=0.7`",
    "topk": "`topk`",
    "released": "`released`",
    "sampled:score=entropy,l=20": "`sampled:score=entropy,l=20`",
    "sampled:score=uniform,l=20": "`sampled:score=uniform,l=20`",
    "sampled:score=prefix,l=20": "`sampled:score=prefix,l=20`",
    "sampled:score=l2,l=5": "`sampled:score=l2,l=5`",
}
"""The rows of the table of methods."""


@functools.cache
def full_size() -> dict:
    """The runs at the published size."""
    return json.loads((DOCS / "synthetic/synthsaebench-full.json").read_text())


QUARTER = ", rate x 0.25"
POOL = "released:score=l2"
FULL_SIZE = {
    "saelens": "SAELens, published settings",
    "batchtopk": "`batchtopk`, default rate",
    f"defaults-early{QUARTER}": "`batchtopk`",
    f"topk_then_batchtopk{QUARTER}": "`topk_then_batchtopk`, the default method",
    f"{POOL}{QUARTER}": f"`{POOL}`",
    f"matryoshka{QUARTER}": "`matryoshka`",
}
"""The rows of the table at the published size: all but the first two at a quarter of the learning rate."""
PUBLISHED = {"BatchTopK": (0.7923, 0.7574, 0.7316, 0.9837), "Matryoshka": (0.7792, 0.7927, 0.8793, 0.9987)}
"""FVE, MCC, F1 and uniqueness of SAELens's documentation, mean of five seeds, L0 of 25, 200M samples."""


def at_full_size(name: str, step: int = 5000) -> dict:
    (found,) = (run for run in full_size()["runs"] if run["recipe"] == name and run["step"] == step)
    assert (found["seed"], found["steps"]) == (0, 5000)
    return found


def rows_of_full_size() -> list[str]:
    found = []
    for name, title in FULL_SIZE.items():
        run, early = at_full_size(name), [at_full_size(name, step)["mcc"] for step in (1000, 2500)]
        cells = [run["fve"], *early, run["mcc"], run["f1"], run["uniqueness"]]
        found.append(" | ".join([f"| {title}", *(f"{cell:.3f}" for cell in cells), f"{run['dead']:.0%} |"]))
    for name, (fve, mcc, f1, uniqueness) in PUBLISHED.items():
        found.append(
            f"| *published: {name}, 200M samples* | {fve:.3f} | | | {mcc:.3f} | {f1:.3f} | {uniqueness:.3f} | |"
        )
    return found


def sentences_of_full_size() -> list[str]:
    ours, quarter, theirs = "batchtopk", f"defaults-early{QUARTER}", "saelens"
    early, late, slow = at_full_size(ours, 1000), at_full_size(ours), at_full_size(quarter)
    first, last = at_full_size(theirs, 1000), at_full_size(theirs)
    pool, matryoshka = at_full_size(f"{POOL}{QUARTER}"), at_full_size(f"matryoshka{QUARTER}")
    default = at_full_size(f"topk_then_batchtopk{QUARTER}")
    return [
        f"on {5000 * full_size()['sizes']['batch_size'] / 1e6:.1f}M samples",
        f"Mean L0 is {full_size()['mean_l0']:.1f} (published: about 34)",
        f"an FVE of {early['fve']:.2f} and an MCC of {early['mcc']:.2f} after 1,000 steps, SAELens {first['fve']:.2f} "
        f"and {first['mcc']:.2f}: {first['dead']:.0%} of its latents do not fire yet. After 5,000 steps SAELens has "
        f"{last['fve']:.2f} and {last['mcc']:.2f}",
        f"{late['dead']:.0%} of the latents do not fire at the end. At a quarter of it, {slow['dead']:.0%} do not, and "
        f"MCC is {slow['mcc']:.3f} instead of {late['mcc']:.3f} at about the same FVE",
        f"the default method {default['mcc']:.3f}, Matryoshka {matryoshka['mcc']:.3f}, with the highest F1 "
        f"({matryoshka['f1']:.2f})",
        f"A released l2 pool lowers MCC to {pool['mcc']:.3f}",
    ]


SHORTER = {
    "batchtopk": "`batchtopk`",
    "topk_then_batchtopk": "`topk_then_batchtopk`, the default",
    POOL: f"`{POOL}`",
    "matryoshka": "`matryoshka`",
}
"""The rows of the table of lengths."""


def rows_of_lengths() -> list[str]:
    """MCC by the number of steps of the small version."""
    found = []
    for name, title in SHORTER.items():
        cells = [f"{at_end(name, 'mcc', steps):.3f}" for steps in (1250, 2500, 5000)]
        cells.append(f"{at_end('defaults-early' if name == 'batchtopk' else name, 'mcc', 20_000):.3f}")
        found.append("| " + " | ".join([title, *cells]) + " |")
    return found


def rows_of_recipes() -> list[str]:
    found = []
    for name, title in SHORT.items():
        runs = [run for run in recipes()[name] if run["steps"] == 10_000]
        cells = [f"{at_end(name, 'fve'):.3f}"]
        for step in (1000, 5000, 10_000):
            cells.append(" / ".join(f"{run['mcc']:.3f}" for run in runs if run["step"] == step))
        found.append("| " + " | ".join([title, *cells, f"{at_end(name, 'dead'):.1%}"]) + " |")
    for name, title in LONG.items():
        cells = [f"{at_end(name, 'fve', 20_000):.3f}", by_seed(name, 20_000)]
        cells += [f"{at_end(name, 'mcc', 20_000):.3f}", *(f"{value:.2f}" for value in leaves(name))]
        found.append("| " + " | ".join([title, *cells]) + " |")
    for name, title in METHODS.items():
        cells = [f"{at_end(name, 'fve', 20_000):.3f}", by_seed(name, 20_000), f"{at_end(name, 'mcc', 20_000):.3f}"]
        it = None if name == "defaults-early" else against(name)
        cells.append("" if it is None else f"{it.mean:+.3f}, {it.verdict(MARGIN)}")
        found.append("| " + " | ".join([title, *cells, *(f"{value:.2f}" for value in leaves(name))]) + " |")
    return [row.replace("|  |", "| |") for row in found]


MARGIN = 0.01  # loss of MCC that counts as none


def against(name: str, base: str = "defaults-early", key: str = "mcc") -> Difference:
    """The paired difference from another method, by default BatchTopK with the default recipe, over seeds."""
    own, other = ({(run["seed"],): run[key] for run in ends(it, 20_000)} for it in (name, base))
    found = paired(own, other)
    assert found is not None
    return found


def sentences_of_recipes() -> list[str]:
    def mcc(name: str) -> float:
        return at_end(name, "mcc", 20_000)

    def fve(name: str) -> float:
        return at_end(name, "fve", 20_000)

    long = {run["step"]: run for run in recipes()["saelens"] if run["steps"] == 60_000}
    own, theirs = (leaves(name) for name in ("defaults-early", "saelens"))
    rates = [f"preset-early, b_dec 0{rate}" for rate in ("", ", lr 1e-3", ", lr 2e-3")]
    first = [ends(name, 20_000)[0] for name in rates]
    others = [mcc(f"defaults-early, {name}") for name in ("plain Adam", "no decay", "W_dec rate 0.5")]
    others.append(at_end("defaults-early, rate x 0.25", "mcc"))
    free = at_end("true features", "fve"), at_end("true features", "mcc")
    return [
        f"and a trained encoder, FVE is {fve('true decoder'):.3f}",
        f"FVE rises to {free[0]:.3f} in 10,000 steps and MCC falls from 1 to {free[1]:.3f}; decoder rows of leaves "
        f"then contain {leaves('true features', 10_000)[1]:.2f} of the parent",
        f"from {long[15_000]['mcc']:.3f} after 15,000 steps to {long[60_000]['mcc']:.3f} after 60,000, while its FVE "
        f"rises from {long[15_000]['fve']:.3f} to {long[60_000]['fve']:.3f}",
        f"With 20,000 steps it is lower than SAELens's, with {mcc('defaults-early'):.3f} against {mcc('saelens'):.3f}",
        f"a mean cosine of {own[0]:.2f} instead of {theirs[0]:.2f} and contain more of the parent, {own[1]:.2f} "
        f"instead of {theirs[1]:.2f}",
        f"Without both, SAELens has {mcc('saelens, b_dec mean, unit rows'):.3f}; with both, the paper's recipe has "
        f"{mcc('preset-early, few active, b_dec 0'):.3f} instead of {mcc('preset-early'):.3f}",
        f"({first[0]['mcc']:.3f} at 3e-4, {first[1]['mcc']:.3f} at 1e-3, {first[2]['mcc']:.3f} at 2e-3; FVE "
        f"{first[0]['fve']:.3f}, {first[1]['fve']:.3f}, {first[2]['fve']:.3f}; b_dec starts at 0, seed 0)",
        f"({min(others):.3f} to {max(others):.3f}, one seed each)",
        f"MCC is {mcc('released:score=l2'):.3f} instead of BatchTopK's {mcc('defaults-early'):.3f}, higher in each of "
        f"three seeds, at {-against('released:score=l2', key='fve').mean:.3f} less FVE, and about that of SAELens "
        f"({mcc('saelens'):.3f})",
        f"it raises MCC from {mcc('matryoshka'):.3f} to {mcc(MATRYOSHKA_POOL):.3f}, again in each of three seeds, at "
        f"{against(MATRYOSHKA_POOL, 'matryoshka', 'fve').mean:.3f} more FVE",
        f"**Matryoshka** costs {fve('defaults-early') - fve('matryoshka'):.3f} of FVE",
        f"of the study and a margin of {MARGIN}",
        f"the default has {mcc('topk_then_batchtopk'):.3f}, TopK {mcc('topk'):.3f}",
        f"Seeds of one method or recipe differ by up to {max(spread(name) for name in {**LONG, **METHODS}):.3f} with "
        f"20,000 steps and by up to {max(spread(n, s) for n in SHORTER for s in (1250, 2500, 5000)):.3f} in",
    ]


def spread(name: str, steps: int = 20_000) -> float:
    """Difference of the largest and smallest MCC over seeds."""
    values = [run["mcc"] for run in ends(name, steps)]
    return max(values) - min(values)


def test_claims_about_recipes():
    own, others = "defaults-early", ("saelens", "saelens-own", "preset")
    assert all(at_end(own, "fve") > at_end(name, "fve") for name in others)
    assert at_end(own, "fve", 20_000) > max(at_end(name, "fve", 20_000) for name in LONG if "defaults" not in name)
    assert "The default recipe (with BatchTopK) learns fastest and has the highest FVE" in TEXT
    assert "After 10,000 steps its MCC is that of SAELens" in TEXT
    assert abs(at_end(own, "mcc") - at_end("saelens", "mcc")) < 0.005
    reached = [run["mcc"] for run in ends("saelens")]
    assert min(reached) <= at_end("saelens-own", "mcc") <= max(reached)
    assert "the end is the same, within the seeds" in TEXT
    early = [run["mcc"] for run in recipes()[own] if run["step"] == 1000]
    assert min(early) > max(run["mcc"] for name in others for run in recipes()[name] if run["step"] <= 5000)
    first = statistics.fmean(run["dead"] for run in recipes()["saelens"] if run["step"] == 1000)
    assert f"{first:.0%} do not fire after 1,000 steps" in TEXT


def test_claims_about_the_gap_to_saelens():
    def mccs(name: str) -> dict[int, float]:
        return {run["seed"]: run["mcc"] for run in ends(name, 20_000)}

    def differences(name: str, other: str) -> list[float]:
        a, b = mccs(name), mccs(other)
        return [a[seed] - b[seed] for seed in a.keys() & b.keys()]

    assert len(mccs("saelens")) == len(mccs("defaults-early")) == len(mccs("preset-early")) == 3
    assert min(differences("saelens", "defaults-early")) > 0.015 and "in every seed" in TEXT
    assert min(differences("preset-early, few active, b_dec 0", "preset-early")) > 0.01
    assert min(differences("saelens", "saelens, b_dec mean, unit rows")) > 0.01
    start = [mccs("defaults-early, b_dec 0"), mccs("defaults-early, few active")]
    span = mccs("defaults-early").values()
    assert all(abs(statistics.fmean(one.values()) - statistics.fmean(span)) < 0.005 for one in start)
    assert "The default recipe gains from neither" in TEXT
    leaf = (leaves("saelens")[0] - leaves("defaults-early")[0]) * min(
        run["levels"]["depth 3"][0] / 256 for name in ("saelens", "defaults-early") for run in ends(name, 20_000)
    )
    assert leaf > 0.5 * statistics.fmean(differences("saelens", "defaults-early"))
    assert "The difference is mostly in the leaves" in TEXT
    shares = [run["levels"]["depth 3"][0] / 256 for name in LONG for run in ends(name, 20_000)]
    assert min(shares) > 0.45 and max(shares) < 0.53 and "46% to 52% of all" in TEXT


def test_claims_about_methods():
    def mccs(name: str) -> list[float]:
        return [run["mcc"] for run in ends(name, 20_000)]

    short = [at_end(name, "dead", 1250) for name in (POOL, "batchtopk")]
    assert f"after 1,250 steps, {short[0]:.0%} of its latents do not fire, {short[1]:.0%} of BatchTopK's" in TEXT
    both = [[run["mcc"] for run in ends(name, 5000)] for name in (POOL, "batchtopk")]
    assert min(both[0]) < max(both[1]) and "After 5,000 steps the difference is within the seeds" in TEXT
    choosing = " ".join((DOCS / "howto/choose.md").read_text(encoding="utf-8").split())
    rows = [f"{name}{QUARTER}" for name in ("defaults-early", "topk_then_batchtopk", "matryoshka")]
    assert (
        "`batchtopk` has {:.3f}, the default {:.3f}, and `matryoshka` {:.3f}.".format(
            *(at_full_size(row)["mcc"] for row in rows)
        )
        in choosing
    )
    dead = [at_full_size(name)["dead"] for name in (rows[0], "batchtopk")]
    assert f"left {dead[0]:.0%} dead instead of {dead[1]:.0%} at the same FVE (one seed)" in choosing
    assert at_end(POOL, "mcc", 1250) < at_end("batchtopk", "mcc", 1250) and "lowers MCC in short trainings" in TEXT
    sizes = full_size()["sizes"]
    assert 5000 * sizes["batch_size"] / sizes["latents"] == 1250, "samples per latent, as in 1,250 steps here"
    others = [name for name in METHODS if name not in ("matryoshka", MATRYOSHKA_POOL)]
    assert min(mccs("matryoshka")) > max(max(mccs(name)) for name in others)
    for name, base in (("released:score=l2", "defaults-early"), (MATRYOSHKA_POOL, "matryoshka")):
        assert against(name, base).clusters == (3,) and against(name, base).verdict(MARGIN) == "better"
        assert all(one > other for one, other in zip(mccs(name), mccs(base), strict=True))
    assert against("topk_then_batchtopk").verdict(MARGIN) == "worse"
    worse = [name for name in METHODS if name.startswith("sampled:") or name == "released"]
    assert all(against(name).mean < 0 and against(name, key="fve").mean < 0 for name in worse)
