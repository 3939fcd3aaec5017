"""Small SAEs on disk, and cosines the slow way."""

from pathlib import Path

import torch

from sampled_sae.evals.results import Explanation, Liveness
from sampled_sae.evals.similarity.members import UNKNOWN, Member, described
from sampled_sae.method import presets
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.method.config import SAEConfig
from sampled_sae.sae import SAE
from sampled_sae.utils.files import make_folder, write_json


def made(rows: torch.Tensor, config: SAEConfig | None = None, **metadata) -> SAE:
    """An SAE of this decoder [m, d]."""
    sae = SAE(InferenceConfig(rows.shape[1], rows.shape[0], training=config))
    with torch.no_grad():
        sae.W_dec.copy_(rows)
    sae.cfg.metadata.update(metadata)
    return sae


def member_of(
    sae: SAE, name: str, live: Liveness | None = None, explained: dict[int, Explanation] | None = None
) -> Member:
    """An SAE in memory as a member."""
    facts = described(sae.cfg.training, sae.cfg.metadata) | {"live": live or UNKNOWN, "explained": explained or {}}
    return Member(name, sae.d_sae, sae.d_in, lambda: sae.W_dec.detach(), **facts)


def rows(m: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(m, d, generator=torch.Generator().manual_seed(seed))


def seeded(m: int = 12, d: int = 6, seed: int = 0, score: str | None = None, **metadata) -> SAE:
    """BatchTopK, or Sampled-SAE by a score; every seed has other rows."""
    config = presets.batchtopk(m, 2, seed=seed) if score is None else presets.sampled(m, 2, score, 2, seed=seed)
    return made(rows(m, d, 100 * len(score or "") + seed), config, **metadata)


def slow_best(a: torch.Tensor, b: torch.Tensor) -> list[float]:
    """For each row the largest cosine, one pair at a time, in float64."""
    a, b = a.double(), b.double()
    return [max(float(x @ y / (x.norm() * y.norm())) for y in b) for x in a]


def explain(folder: Path, texts: dict[int, str], scores: dict[int, float] | None = None) -> None:
    make_folder(folder / "evals")
    latents = {str(i): {"explanation": text, "score": (scores or {}).get(i)} for i, text in texts.items()}
    write_json(folder / "evals" / "explanations.json", {"latents": latents})
