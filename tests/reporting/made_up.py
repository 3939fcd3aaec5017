"""Small made-up results."""

from __future__ import annotations

from typing import Any

BUCKETS = ("LF+HA", "HF+HA", "LF+LA", "HF+LA")


def sae(label: str, seed: int = 0, **numbers: Any) -> dict[str, Any]:
    return {
        "name": f"{label}-s{seed}",
        "label": label,
        "group": "l2",
        "seed": seed,
        "fve_train": 0.8,
        "fve_heldout": 0.75,
        "fve_heldout_threshold": 0.7,
        "l0_threshold": 60.0,
        "dead": 0.1,
        "fidelity": None,
        "recovery": {"LF+HA": 1.0, "HF+HA": 0.5, "LF+LA": 0.0, "HF+LA": 0.0},
        **numbers,
    }


def results(*saes: dict[str, Any]) -> dict[str, Any]:
    part = {"features": 256, "p": 0.02, "sigma": 1.0, "mean_activation": 0.801, "std_activation": 0.605}
    buckets = [{"name": name, **part} for name in BUCKETS]
    data = {"coherence": 0.0625, "expected_l0": 65.0, "observed_l0": 65.1, "noise_db": 20.0, "buckets": buckets}
    return {"data": data, "train": {"steps": 5000, "batch_size": 4096}, "saes": list(saes)}
