"""A comparison of SAEs and results of the synthetic experiment, by hand."""

from __future__ import annotations

from typing import Any


def sae(name: str, group: str, seed: int) -> dict[str, Any]:
    return {"name": name, "group": group, "seed": seed}


def pair(a: str, b: str, group_a: str, group_b: str, ways: tuple[float, float], unique: Any = ()) -> dict[str, Any]:
    kind = "seeds" if group_a == group_b else "scores"
    both = {"a_to_b": {"mmcs": ways[0]}, "b_to_a": {"mmcs": ways[1]}}
    return {"kind": kind, "a": a, "b": b, "group_a": group_a, "group_b": group_b, "all": both, "unique": list(unique)}


def unique(of: str, against: str, latents: int = 7) -> dict[str, Any]:
    keys = {"explanation": "x", "match": 9, "match_explanation": "y", "decoder": -0.25, "text": 0.5, "nearest": 0.25}
    table = [{"latent": latent, "overall": latent / 100, **keys} for latent in range(latents)]
    return {"of": of, "against": against, "latents": 20, "others": 30, "equals": 13, "table": table}


COMPARISON = {
    "settings": {"threshold": 0.7, "seeds": "same"},
    "saes": [
        *(sae(f"b{seed}", "batchtopk", seed) for seed in (2, 0, 1)),
        *(sae(f"e{seed}", "entropy-l100", seed) for seed in (0, 1)),
        sae("e3", "entropy-l3", 0),
    ],
    "seeds": [{"group": "batchtopk", "random": 0.1}, {"group": "entropy-l100", "random": 0.1}],
    "pairs": [
        pair("b2", "b0", "batchtopk", "batchtopk", (0.9, 0.2)),
        pair("b2", "b1", "batchtopk", "batchtopk", (0.9, 0.9)),
        pair("b0", "b1", "batchtopk", "batchtopk", (0.4, 0.9)),
        pair("e0", "e1", "entropy-l100", "entropy-l100", (0.5, 0.9)),
        pair("e0", "b0", "entropy-l100", "batchtopk", (0.6, 0.8), [unique("e0", "b0"), unique("b0", "e0")]),
        pair("e1", "b1", "entropy-l100", "batchtopk", (0.6, 0.7), [unique("e1", "b1")]),
        pair("e3", "b0", "entropy-l3", "batchtopk", (0.6, 0.1), [unique("e3", "b0")]),
    ],
}


def synthetic() -> dict[str, Any]:
    bucket = {"features": 3, "p": 0.1, "sigma": 1.0, "mean_activation": 0.8012, "std_activation": None}
    run = {"name": "a-s0", "label": "A", "group": "batchtopk", "l": None, "fve_train": 0.5, "recovery": {"LF": 0.25}}
    data = {"coherence": 0.0833, "expected_l0": 61.52, "observed_l0": 61.51, "noise_db": 20.0}
    return {"data": {**data, "buckets": [{"name": "LF", **bucket}]}, "saes": [run, {**run, "name": "a-s1"}]}
