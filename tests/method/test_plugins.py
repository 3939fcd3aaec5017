"""What it takes to add a score (one file) and a pool schedule (a class and a preset)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import sampled_sae as ss
from sampled_sae import config as config_module
from sampled_sae.config import Config, Share
from sampled_sae.method import presets, scores
from sampled_sae.method.config import Fraction, PoolConfig, SAEConfig, Schedule

X = torch.randn(600, 8, generator=torch.Generator().manual_seed(0))


def train(config: SAEConfig) -> ss.SAE:
    return ss.train(X, [config], steps=4, batch_size=50, device="cpu", progress=False)[0]


def test_a_score_is_one_file_in_the_folder(tmp_path, monkeypatch):
    (tmp_path / "variance.py").write_text(
        "from sampled_sae.method.scores import register_score\n\n\n"
        "@register_score('variance')\n"
        "def variance(Z):\n"
        "    return Z.var(dim=-2)\n"
    )
    monkeypatch.setattr(scores, "__path__", [*scores.__path__, str(tmp_path)])
    monkeypatch.setattr(scores.SCORES, "_imported", False)
    try:
        config = ss.sampled(32, 2, "variance", l=4)
        assert train(config).d_sae == 32
        assert scores.SCORES["variance"].builtin
        assert presets.label(config) == "variance-l4"
    finally:
        scores.SCORES.pop("variance", None)
        scores.SCORES.builtin.discard("variance")
        sys.modules.pop(f"{scores.__name__}.variance", None)


@dataclass(frozen=True, slots=True)
class Pulsed(Config):
    """All latents in the last part of each tenth of the steps."""

    share: Share = 0.5
    steady: ClassVar[bool] = True

    def size(self, start: int, d_sae: int, done: float) -> int:
        return start if done * 10 % 1 < 1 - self.share else d_sae

    @property
    def label(self) -> str:
        return f"pulsed{100 * self.share:g}"


def test_a_pool_schedule_is_a_class_and_a_preset(monkeypatch):
    monkeypatch.setitem(config_module.hints(PoolConfig), "schedule", Schedule | Pulsed)
    monkeypatch.setattr(presets, "PRESETS", dict(presets.PRESETS))

    @presets.preset
    def pulsed(d_sae: int, k: int, share: float = 0.5, **settings) -> SAEConfig:
        pool = PoolConfig(score="uniform", size=Fraction(0.25), schedule=Pulsed(share))
        return SAEConfig(d_sae, k, pool=pool, **settings)

    (config,) = presets.parse_methods(["pulsed:share=0.2"], d_sae=40, k=2)
    assert SAEConfig.from_dict(config.to_dict()) == config
    assert config.to_dict()["pool"]["schedule"] == {"kind": "pulsed", "share": 0.2}
    assert [config.pool_size_at(step, 100) for step in (0, 7, 8, 9, 10)] == [10, 10, 40, 40, 10]
    assert presets.label(config) == "uniform-25pct-pulsed20"
    assert train(config).cfg.training.pool == config.pool
    with pytest.raises(ss.UserError, match=r"share = 2.0: must be a share in \[0, 1\]"):
        presets.parse_methods(["pulsed:share=2"], d_sae=40, k=2)
