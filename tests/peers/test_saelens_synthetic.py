"""SynthSAEBench's specification here against SAELens's own generator. Runs in that peer's environment."""

import pytest
import torch
from sae_lens.synthetic import (
    FoldedNormalMagnitudeConfig,
    HierarchyConfig,
    LinearMagnitudeConfig,
    LowRankCorrelationConfig,
    SyntheticModel,
    SyntheticModelConfig,
    ZipfianFiringProbabilityConfig,
)
from sae_lens.synthetic.evals import (
    compute_classification_metrics,
    feature_uniqueness,
    mean_correlation_coefficient,
)
from sae_lens.synthetic.feature_dictionary import orthogonalize_embeddings
from torch.nn.functional import normalize

from sampled_sae.data.synth_sae_bench import SynthSAEBench, SynthSAEBenchConfig, orthogonalized
from sampled_sae.evals.similarity.detection import Detection
from sampled_sae.evals.similarity.matching import match
from sampled_sae.method.codes import SparseCodes

OURS = SynthSAEBenchConfig(d=64, features=2048, roots=16, orthogonalization=0)
SAMPLES, PARTS = 32_768, 8


def theirs() -> SyntheticModel:
    config = SyntheticModelConfig(
        num_features=OURS.features,
        hidden_dim=OURS.d,
        firing_probability=ZipfianFiringProbabilityConfig(
            exponent=OURS.exponent, max_prob=OURS.p_max, min_prob=OURS.p_min
        ),
        hierarchy=HierarchyConfig(
            total_root_nodes=OURS.roots,
            branching_factor=OURS.branching,
            max_depth=OURS.depth,
            mutually_exclusive_portion=1.0,
            mutually_exclusive_min_depth=0,
            compensate_probabilities=True,
            scale_children_by_parent=True,
        ),
        correlation=LowRankCorrelationConfig(rank=OURS.rank, correlation_scale=OURS.correlation),
        mean_firing_magnitudes=LinearMagnitudeConfig(start=OURS.mean_first, end=OURS.mean_last),
        std_firing_magnitudes=FoldedNormalMagnitudeConfig(mean=OURS.std_mean, std=OURS.std_std),
        seed=42,
    )
    return SyntheticModel(config, device="cpu")


def by_level(draw, bucket: torch.Tensor) -> list[dict[str, float]]:
    """Mean frequency and mean and root mean square of the active magnitudes at each level."""
    fired, total, squares = torch.zeros(3, OURS.features, dtype=torch.float64)
    for _ in range(PARTS):
        codes = draw(SAMPLES // PARTS).double()
        fired, total, squares = fired + (codes > 0).sum(0), total + codes.sum(0), squares + codes.square().sum(0)
    sums = [[float(one[bucket == level].sum()) for one in (fired, total, squares)] for level in range(5)]
    return [
        {"fired per sample": n / SAMPLES, "mean": mean / n, "root mean square": (square / n) ** 0.5}
        for n, mean, square in sums
    ]


@torch.no_grad()
def test_frequencies_and_magnitudes_by_level_are_those_of_saelens():
    torch.manual_seed(0)
    data, generator = SynthSAEBench(OURS), torch.Generator().manual_seed(0)
    own = by_level(lambda n: data.codes(n, generator).dense(), data.bucket)
    other = by_level(theirs().activation_generator.sample, data.bucket)
    for level, (ours, peers) in enumerate(zip(own, other, strict=True)):
        assert ours["fired per sample"] == pytest.approx(peers["fired per sample"], rel=0.03), data.names[level]
        assert ours["mean"] == pytest.approx(peers["mean"], rel=0.01), data.names[level]
        # Each has drawn its own spread of magnitudes.
        assert ours["root mean square"] == pytest.approx(peers["root mean square"], rel=0.03), data.names[level]


def test_directions_are_those_of_saelens():
    rows = torch.randn(512, 128, generator=torch.Generator().manual_seed(0))
    other = orthogonalize_embeddings(normalize(rows, dim=1), num_steps=100, lr=3e-4)
    # Adam turns the sign of a gradient of about 0 into a full step, so that single entries may differ.
    assert float((orthogonalized(rows, 100) * other).sum(1).min()) > 1 - 1e-5


def test_detection_is_that_of_saelens():
    torch.manual_seed(0)
    decoder, true = torch.randn(12, 8), torch.randn(30, 8)
    latents, features = (
        torch.rand(200, 12) * (torch.rand(200, 12) < 0.1),
        torch.rand(200, 30) * (torch.rand(200, 30) < 0.2),
    )
    latents[:, 3] = 0
    other = compute_classification_metrics(latents, features, decoder, true)
    own = Detection(decoder, true)
    for part, active in zip(latents.split(80), features.split(80), strict=True):
        own.add(SparseCodes.from_dense(part), active > 0)
    wanted = {"precision": other.precision, "recall": other.recall, "f1": other.f1_score}
    assert own.result() == pytest.approx(wanted | {"uniqueness": feature_uniqueness(decoder, true)})
    assert float(match(decoder, true).similarity.sum()) / 12 == pytest.approx(
        mean_correlation_coefficient(decoder, true), abs=1e-6
    )
