"""The paper's tables out of comparisons: agreement across seeds and scores, features that only one score finds."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from typing import Any

from sampled_sae.reporting.compare_terminal import OLD_UNIQUE, unique_note
from sampled_sae.reporting.paper_tables_format import Head, Missing, PaperTable, best
from sampled_sae.utils.measures import number

BASE = "batchtopk"
SCORES = ("entropy", "squared_l2", "l2", "uniform")
"""The paper's four, in the order of its tables."""
TITLES = {
    "batchtopk": "BatchTopK",
    "topk": "TopK",
    "l2": "L2-norm",
    "squared_l2": "Squared-l",
    "entropy": "Entropy",
    "uniform": "Uniform",
}
ROWS = 5
"""Features in a table of unique ones."""
Content = dict[str, Any]


def kind_of(label: str) -> tuple[str, float | None]:
    """Score and l of a configuration's label as `presets.label` makes it; for other members its first word."""
    word = label.split(" ", 1)[0]
    found = re.fullmatch(r"([\w.]+)-l([\d.]+(?:e[+-]?\d+)?)", word)
    return (found[1], float(found[2])) if found else (word, None)


def title_of(label: str) -> str:
    """A configuration in the paper's words."""
    score, l = kind_of(label)
    rest = ([] if l is None else [f"l = {l:g}"]) + label.split(" ", 1)[1:]
    return TITLES.get(score, score) + (f" ({', '.join(rest)})" if rest else "")


def compared(content: Content, after: str) -> list[PaperTable | Missing]:
    """The tables of one compare.json; `after` is added to their names."""
    return [_seeds(content, after), _scores(content, after), *(_unique(content, score, after) for score in SCORES)]


def nothing_compared() -> list[PaperTable | Missing]:
    """The same tables where there is no comparison."""
    why = "no compare.json was found; run sampled-sae compare"
    named = [("paper-mmcs", SEEDS), ("paper-mmcs-scores", ACROSS)]
    named += [(f"paper-unique-{score}", _unique_title(score)) for score in SCORES]
    return [Missing(name, title, why) for name, title in named]


def _dicts(content: Any, name: str) -> list[Content]:
    found = content.get(name) if isinstance(content, dict) else None
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


# ---- MMCS ----------------------------------------------------------------------------------------------

SEEDS = "MMCS across seeds"
ACROSS = "MMCS of BatchTopK's features with those of each other SAE"


def _seeds(content: Content, after: str) -> PaperTable | Missing:
    """One row for each configuration of several seeds: the first seed against the others."""
    name = f"paper-mmcs{after}"
    rows = []
    for agreement in _dicts(content, "seeds"):
        label = str(agreement.get("group"))
        values, base = _from_base(content, label)
        if values:
            deviation = statistics.stdev(values) if len(values) > 1 else None
            chance = number(agreement.get("random"))
            rows.append([title_of(label), statistics.fmean(values), deviation, len(values), base, chance])
    if not rows:
        return Missing(name, SEEDS, "no configuration was compared in two seeds; train with --seeds 0 1 2")
    heads = [Head("Sampling method"), Head("MMCS", 3), Head("std", 3), Head("n"), Head("base seed"), Head("chance", 3)]
    note = (
        "Mean over the base seed's latents of the largest cosine with any latent of another seed, mean over the n "
        "other seeds. Chance is what random directions of the same number and width give."
    )
    marked = best([row[1] for row in rows], 3)
    return PaperTable(name, SEEDS, note, heads, rows, frozenset((place, 1) for place in marked))


def _from_base(content: Content, label: str) -> tuple[list[float], Any]:
    """MMCS from the lowest seed of a configuration to each other one, and which seed that is."""
    seeds = {str(sae.get("name")): sae.get("seed") for sae in _dicts(content, "saes") if sae.get("group") == label}
    known = {name: seed for name, seed in seeds.items() if isinstance(seed, int)}
    if not known:
        return [], None
    base = min(known, key=lambda name: (known[name], name))
    found = []
    for pair in _dicts(content, "pairs"):
        if pair.get("kind") == "seeds" and pair.get("group_a") == label and base in (pair.get("a"), pair.get("b")):
            found.append(_mmcs(pair, "a_to_b" if pair.get("a") == base else "b_to_a"))
    return [value for value in found if value is not None], known[base]


def _mmcs(pair: Content, way: str) -> float | None:
    everything = pair.get("all")
    agreement = everything.get(way) if isinstance(everything, dict) else None
    return number(agreement.get("mmcs")) if isinstance(agreement, dict) else None


def _scores(content: Content, after: str) -> PaperTable | Missing:
    """BatchTopK against every other configuration, by the same seeds and by different ones as they were asked."""
    name, seeds = f"paper-mmcs-scores{after}", {str(s.get("name")): s.get("seed") for s in _dicts(content, "saes")}
    found: dict[str, list[float]] = {}
    same = True
    for pair in _dicts(content, "pairs"):
        for here, other, way in (("a", "b", "a_to_b"), ("b", "a", "b_to_a")):
            if pair.get("kind") == "scores" and kind_of(str(pair.get(f"group_{here}")))[0] == BASE:
                value = _mmcs(pair, way)
                if value is not None:
                    found.setdefault(str(pair.get(f"group_{other}")), []).append(value)
                    same = same and seeds.get(str(pair.get("a"))) == seeds.get(str(pair.get("b")))
    if not found:
        return Missing(name, ACROSS, "BatchTopK was not compared with another configuration")
    rows = [[title_of(label), statistics.fmean(values), len(values)] for label, values in found.items()]
    shared = (
        "Both SAEs of a pair have the same seed and so the same start values, which keeps them alike whatever they "
        "learn." * same
    )
    note = f"From BatchTopK's latents to the other SAE's, mean over n pairs. {shared}".strip()
    return PaperTable(name, ACROSS, note, [Head("SAE"), Head("MMCS", 3), Head("n")], rows)


def _unique_title(score: str) -> str:
    return f"{TITLES[score]} latents that BatchTopK lacks, with their best explained BatchTopK matches"


def _unique(content: Content, score: str, after: str) -> PaperTable | Missing:
    """The features of one score that have the weakest match in BatchTopK; of its largest pool, the lowest seed."""
    name, title = f"paper-unique-{score}{after}", _unique_title(score)
    found = sorted(_against_base(content, score), key=lambda item: (-item[0], item[1]))
    if not found:
        why = "no SAE of this score was compared with BatchTopK, both with explanations of autointerp"
        return Missing(name, title, why)
    l, seed, item = found[0]
    equals, latents, settings = item.get("equals"), item.get("latents"), content.get("settings")
    threshold = number(settings.get("threshold")) if isinstance(settings, dict) else None
    if not isinstance(equals, int) or not isinstance(latents, int) or threshold is None:
        return Missing(name, title, OLD_UNIQUE)
    keys = ("latent", "explanation", "match", "match_explanation", "overall", "decoder", "text", "nearest")
    rows = [[row.get(key) for key in keys] for row in _dicts(item, "table")[:ROWS]]
    heads = [Head(f"{TITLES[score]} latent"), Head("Explanation", wide=True), Head("Best match")]
    heads += [Head("Its explanation", wide=True), Head("Overall", 3), Head("Decoder", 3), Head("Text", 3)]
    heads.append(Head("Nearest of all", 3))
    note = (
        f"l = {l:g}, seed {seed}. Overall is the mean of the cosines of decoder rows and of embedded explanations. "
        f"Matches are among explained latents, {latents} here and {item.get('others')} of BatchTopK; nearest of all is "
        "the largest decoder cosine with any latent of BatchTopK, explained or not. "
        + unique_note(equals, latents, "BatchTopK", threshold)
    )
    return PaperTable(name, title, note, heads, rows)


def _against_base(content: Content, score: str) -> Iterator[tuple[float, int, Content]]:
    """Tables of unique features of this score against BatchTopK, with l and seed."""
    saes = {str(sae.get("name")): sae for sae in _dicts(content, "saes")}
    for pair in _dicts(content, "pairs"):
        for item in _dicts(pair, "unique"):
            of, against = saes.get(str(item.get("of")), {}), saes.get(str(item.get("against")), {})
            group, l = kind_of(str(of.get("group")))
            base = kind_of(str(against.get("group")))[0] == BASE
            if group == score and l is not None and base and (_dicts(item, "table") or item.get("equals")):
                seed = of.get("seed")
                yield l, seed if isinstance(seed, int) else 0, item
