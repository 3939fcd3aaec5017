"""Specs of sweeps, and the records of their jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sampled_sae.config import write_file
from sampled_sae.sweeps.slurm import RECORD as SLURM
from sampled_sae.sweeps.slurm import read_ids
from sampled_sae.sweeps.spec import read_spec
from sampled_sae.sweeps.store import Sweep, jobs_of
from tests.fuzz.target import D_SAE, File, Target, strict, text_or_bytes

SPEC = {
    **{"activations": ["a.npy"], "methods": ["batchtopk", "sampled:l=2"], "k": [2, 4], "d_sae": D_SAE, "steps": 5},
    **{"evaluations": {}, "slurm": {"partition": "gpu"}},
}
YAML = """
models: [{name: a/b, layers: [1, 2], dtype: bfloat16}, c/d]
hooks: [blocks.0.mlp]
text: {name: t.jsonl, field: body}
methods: [batchtopk, "sampled:score=l2,l=2/3"]
d_sae: [64, 128]
tokens: 100_000
optimizer: {lr: 3e-4}
evaluations: {core: {contexts: 4}}
saes_per_job: 2
slurm: {partition: gpu, minutes: 30, extra: {nice: "100"}}
"""


def build(root: Path) -> None:
    """Write the undamaged files."""
    (root / "jobs").mkdir()
    (root / "jobs" / "spec.json").write_text(json.dumps(SPEC))
    (root / "jobs" / "spec.yaml").write_text(YAML)
    swept = Sweep.start(root / "jobs", read_spec(root / "jobs" / "spec.json"))
    write_file(swept.folder / SLURM, "sweep_slurm", {"ids": {"a": "7_0"}})


def _spec(name: str) -> Any:
    return lambda folder: [job.to_dict() for job in jobs_of(read_spec(folder / name))]


def _jobs(folder: Path) -> Any:
    swept = Sweep(folder)
    jobs = [(entry.job.to_dict(), entry.state.to_dict()) for entry in map(swept.entry, swept.names)]
    return swept.spec.to_dict(), jobs, read_ids(swept)


def targets() -> list[Target]:
    """All of them."""
    return [
        Target("spec of a sweep", "jobs", strict("spec.json"), _spec("spec.json")),
        Target("spec in YAML", "jobs", (File("spec.yaml", text_or_bytes, "lenient"),), _spec("spec.yaml")),
        Target("jobs of a sweep", "jobs", strict("sweep.json", "jobs/a/job.json", SLURM), _jobs),
    ]
