"""Saved SAEs, checkpoints, runs, their logs and records, configurations."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import sampled_sae as ss
from sampled_sae.cli.train import Train
from sampled_sae.config import write_file
from sampled_sae.method import presets
from sampled_sae.training import checkpoint
from sampled_sae.training.callbacks import read_log
from sampled_sae.training.folder import read_record
from sampled_sae.training.run import Callback
from sampled_sae.training.settings import TrainConfig
from sampled_sae.training.trainer import checked
from tests.fuzz.mutate import binary_damage, json_damage, lines_damage
from tests.fuzz.target import BATCH, CFG, D_SAE, OWN, STEPS, WEIGHTS, File, Target, rows, sealed, strict

CONFIGS = [ss.batchtopk(D_SAE, 4), ss.sampled(D_SAE, 4, "l2", 2, seed=1)]
NAMES = [str(config.name) for config in presets.named(CONFIGS, 0)]
CHECKPOINT = ("checkpoint.json", "0.safetensors", "1.safetensors")
SETTINGS: dict[str, Any] = {"steps": STEPS, "batch_size": BATCH, "heldout_tokens": 64, "device": "cpu"}
SETTINGS |= {"progress": False, "log_every": 2, "checkpoint_every": 4}


class Stop(Callback):
    """Stops a run after some steps, as Ctrl-C does."""

    def on_step(self, run: Any, learner: Any, step: int, stats: Any) -> None:
        if step == 9 and learner is run.learners[-1]:
            raise KeyboardInterrupt


def build(root: Path) -> None:
    """Write the undamaged files."""
    ss.train(rows(), CONFIGS, out=root / "run", **SETTINGS)
    with contextlib.suppress(KeyboardInterrupt, ss.UserError):
        ss.train(rows(), CONFIGS, out=root / "stopped", callbacks=[Stop()], **SETTINGS)
    (newest,) = sorted((root / "stopped" / "checkpoints").glob("step-*"))[-1:]
    shutil.copytree(newest, root / "checkpoint" / newest.name)
    first = sorted((root / "run" / "saes").iterdir())[0]
    shutil.copytree(first, root / "sae")
    shutil.copytree(first, root / "foreign")
    (root / "foreign" / OWN).unlink()
    (root / "configs").mkdir()
    write_file(root / "configs" / "configs.json", "configs", {"saes": [config.to_dict() for config in CONFIGS]})


def _sae(folder: Path) -> Any:
    sae = ss.SAE.load(folder)
    return sae.cfg, sae.state_dict(), sae.encode(rows(4))


def _resume(folder: Path) -> Any:
    saes = ss.train(rows(), CONFIGS, out=folder, resume=True, **SETTINGS)
    return [sae.state_dict() for sae in saes]


def _checkpoint(folder: Path) -> Any:
    [path] = folder.iterdir()
    return checkpoint.load(path)._asdict()


def _training(folder: Path) -> Any:
    return read_record(folder).to_dict()


def _configs(folder: Path) -> Any:
    configs = Train(folder, configs=folder / "configs.json").sae_configs()
    return [config.to_dict() for config in checked(configs, TrainConfig(10, BATCH))]


def _log(folder: Path) -> Any:
    return read_log(folder / "log.jsonl")


def targets() -> list[Target]:
    """All of them."""
    first = f"saes/{NAMES[0]}"
    free = frozenset({"metadata", "apply_b_dec_to_input", "architecture", "k"})
    stopped = (
        *sealed(*(f"checkpoints/step-000000008/{name}" for name in CHECKPOINT)),
        File("run.json", json_damage, "sealed"),
        File("log.jsonl", lines_damage, "sealed"),
    )
    finished = (File("run.json", json_damage, "sealed"), *sealed(f"{first}/{WEIGHTS}", f"{first}/{OWN}"))
    foreign = (File(CFG, json_damage, "strict", free), File(WEIGHTS, binary_damage, "lenient"))
    return [
        Target("sae", "sae", sealed(CFG, OWN, WEIGHTS), _sae, 3),
        Target("foreign sae", "foreign", foreign, _sae),
        Target("checkpoint", "checkpoint", sealed(*(f"step-000000008/{n}" for n in CHECKPOINT)), _checkpoint, 3),
        Target("resume", "stopped", stopped, _resume, 0.15, copies=True),
        Target("finished run", "run", finished, _resume, 0.3, copies=True),
        Target("record of a training", "run", sealed("train.json"), _training),
        Target("configs", "configs", strict("configs.json"), _configs, 3),
        Target("log", "run", (File("log.jsonl", lines_damage, "lenient"),), _log),
    ]
