"""Synthetic activations with known features: sparse codes times a dictionary of low coherence, plus noise.

Each feature j fires with probability p_j, on its own, with a coefficient of size sigma_j. The features fall
into four buckets: rare or frequent (LF, HF), times high or low amplitude (HA, LA).

Every draw follows from the seed of the config and the arguments, never from earlier draws, so a run that
resumes at step 1,000 sees the batch that it would have seen. CPU and GPU draw different numbers;
the dictionary and the buckets are the same on both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from sampled_sae.config import Bound, Config, Positive, PositiveNumber, PositiveShare, at_least, require
from sampled_sae.data.frames import coherence, low_coherence
from sampled_sae.data.stream import Endless

BUCKETS = ("LF+HA", "HF+HA", "LF+LA", "HF+LA")
Split = Literal["train", "heldout"]
_CHUNK = 1024  # samples made at one time for the fixed data set
_STREAMS = {"train": 0, "heldout": 1, "fixed": 2, "buckets": 3}


@dataclass(frozen=True, slots=True)
class SyntheticConfig(Config):
    """Features and noise of synthetic data; the defaults follow the paper."""

    d: Annotated[int, at_least(2)] = 256
    """Width of a sample."""
    features: Positive = 1024
    """Number of true features; more than `d` of them means superposition."""
    p_low: PositiveShare = 0.02
    """Probability that a rare (LF) feature is active in a sample."""
    p_high: PositiveShare = 0.107
    """Probability that a frequent (HF) feature is active in a sample."""
    sigma_low: PositiveNumber = 0.2
    """Scale of the coefficients of a low-amplitude (LA) feature."""
    sigma_high: PositiveNumber = 1.0
    """Scale of the coefficients of a high-amplitude (HA) feature."""
    buckets: Literal["equal", "random"] = "equal"
    """How features fall into the four buckets: in equal shares, or each drawn on its own."""
    coefficients: Literal["signed", "non_negative"] = "signed"
    """Coefficients drawn from N(0, sigma^2), or their absolute values."""
    noise_db: Annotated[float, Bound("must be at least -100 decibels, or inf", lambda db: db >= -100)] = 20.0
    """Signal power over noise power in decibels; `inf` means no noise."""
    seed: Annotated[int, Bound("must be an integer from 0 to 2^63 - 1", lambda seed: seed >= 0)] = 0
    """Decides the dictionary, the buckets and every sample."""

    @property
    def bucket_p(self) -> tuple[float, float, float, float]:
        """Firing probability of each bucket, in the order of BUCKETS."""
        return (self.p_low, self.p_high, self.p_low, self.p_high)

    @property
    def bucket_sigma(self) -> tuple[float, float, float, float]:
        """Coefficient scale of each bucket, in the order of BUCKETS."""
        return (self.sigma_high, self.sigma_high, self.sigma_low, self.sigma_low)

    def expected_l0(self, counts: Sequence[int]) -> float:
        """Expected number of active features per sample, with `counts` features in the four buckets."""
        return sum(count * p for count, p in zip(counts, self.bucket_p, strict=True))


PRESETS: dict[str, SyntheticConfig] = {
    # The paper reports an expected L0 of 61.52. With its bucket counts that needs p_high = 0.107 (61.5);
    # the same p_high in equal buckets gives 65.
    "l0-61": SyntheticConfig(p_high=0.107),
    # The paper's text has p = 0.20, which gives an L0 of 105.3 with its counts, 112.6 in equal buckets.
    "p-20": SyntheticConfig(p_high=0.20),
}


class SyntheticData(Endless):
    """Samples of a `SyntheticConfig`, without end.

    dictionary [features, d] unit rows; bucket [features] index into BUCKETS; p and sigma [features];
    noise_std is the standard deviation of the noise on each coordinate.
    """

    names = BUCKETS

    def __init__(self, config: SyntheticConfig, device: torch.device | str = "cpu") -> None:
        self.config = config
        self.device = torch.device(device)
        self.dictionary = low_coherence(config.d, config.features, config.seed).to(self.device)
        self.bucket = _assign_buckets(config).to(self.device)
        self.p = torch.tensor(config.bucket_p, device=self.device)[self.bucket]
        self.sigma = torch.tensor(config.bucket_sigma, device=self.device)[self.bucket]
        self.noise_std = self._noise_std()

    @property
    def identity(self) -> dict[str, Any]:
        return {"synthetic": self.config.to_dict()}

    def codes(self, n: int, generator: torch.Generator) -> Tensor:
        """Coefficients of n samples, zero where a feature is not active; [n, features]."""
        shape = (n, self.config.features)
        active = torch.rand(shape, generator=generator, device=self.device) < self.p
        values = torch.randn(shape, generator=generator, device=self.device).mul_(self.sigma)
        if self.config.coefficients == "non_negative":
            values.abs_()
        return values.mul_(active)

    def sample_with_codes(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """n samples, codes times dictionary plus noise, and their codes; [n, d] and [n, features]."""
        codes = self.codes(n, generator)
        noise = torch.randn((n, self.config.d), generator=generator, device=self.device)
        return torch.addmm(noise.mul_(self.noise_std), codes, self.dictionary), codes

    def batch(self, index: int, size: int, split: Split = "train") -> Tensor:
        """Fresh samples number `index`; [size, d]. Decided by the config's seed and the arguments alone."""
        require(split in ("train", "heldout"), "split", split, "must be 'train' or 'heldout'")
        require(size >= 1, "size", size, "must be at least 1 sample")
        return self.sample_with_codes(size, self._generator(split, index))[0]

    def fixed(self, n: int) -> Tensor:
        """The fixed data set of n samples; [n, d]. A smaller one is the beginning of a larger one."""
        return torch.cat([x for x, _ in self._fixed_chunks(n)])

    def statistics(self, n: int = 10_000) -> dict[str, Any]:
        """Statistics of the data, measured on `fixed(n)`; ready for JSON, None where undefined.

        mean_activation and std_activation of a bucket are over the |coefficients| of its active entries.
        """
        # For each bucket: active entries, sum of |coefficient|, sum of squares.
        sums = torch.zeros(len(BUCKETS), 3, dtype=torch.float64, device=self.device)
        signal_energy = noise_energy = 0.0
        for x, codes in self._fixed_chunks(n):
            size = codes.abs().double()
            by_feature = torch.stack([(size > 0).sum(dim=0), size.sum(dim=0), size.square().sum(dim=0)], dim=1)
            sums.index_add_(0, self.bucket, by_feature)
            signal = codes @ self.dictionary
            signal_energy += signal.square().sum().item()
            noise_energy += (x - signal).square().sum().item()
        counts = torch.bincount(self.bucket, minlength=len(BUCKETS)).tolist()
        noisy = self.noise_std > 0 and signal_energy > 0
        rows = []  # of the paper's table
        for bucket, (active, total, squares) in enumerate(sums.tolist()):
            mean = total / active if active else None
            row = {"name": BUCKETS[bucket], "features": counts[bucket]}
            row |= {"p": self.config.bucket_p[bucket], "sigma": self.config.bucket_sigma[bucket]}
            std = None if mean is None else math.sqrt(max(0.0, squares / active - mean**2))
            rows.append(row | {"mean_activation": mean, "std_activation": std})
        return {
            "samples": n,
            "coherence": coherence(self.dictionary),
            "expected_l0": self.config.expected_l0(counts),
            "observed_l0": sums[:, 0].sum().item() / n,
            "noise_db": 10 * math.log10(signal_energy / noise_energy) if noisy else None,
            "buckets": rows,
        }

    def _fixed_chunks(self, n: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Samples and codes of the fixed data set, piece by piece: codes take features / d times the room."""
        require(n >= 1, "n", n, "must be at least 1 sample")
        for start in range(0, n, _CHUNK):
            # Always a whole chunk, cut afterwards, so that the samples do not depend on n.
            x, codes = self.sample_with_codes(_CHUNK, self._generator("fixed", start // _CHUNK))
            yield x[: n - start], codes[: n - start]

    def _noise_std(self) -> float:
        """Noise per coordinate that puts the signal `noise_db` above it, from the expected signal energy."""
        p, sigma, rows = self.p.double(), self.sigma.double(), self.dictionary.double()
        mean = torch.zeros_like(p)
        if self.config.coefficients == "non_negative":
            mean = p * sigma * math.sqrt(2 / math.pi)
        # E||s A||^2 = ||E[s] A||^2 + sum_j Var(s_j) ||a_j||^2, because the codes are independent.
        variance = p * sigma.square() - mean.square()
        energy = (mean @ rows).square().sum() + (variance * rows.square().sum(dim=1)).sum()
        return math.sqrt(energy.item() / self.config.d * 10 ** (-self.config.noise_db / 10))

    def _generator(self, stream: str, index: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(stream_seed(self.config.seed, stream, index))


def stream_seed(seed: int, stream: str, index: int) -> int:
    """Seed of piece `index` of a named stream: 63 well-mixed bits.

    The CPU generator of torch looks at the low 32 bits only. With random low bits, two of 65,000 batches
    would be likely to coincide, so the low bits are a one-to-one function of (stream, index) for each seed.
    """
    require(0 <= index < 2**30, "index", index, "must be from 0 to 2^30 - 1")
    key = _splitmix64(seed)
    place = index * len(_STREAMS) + _STREAMS[stream]
    high = _splitmix64(key ^ place) >> 33
    return high << 32 | _mix32(place ^ key & 0xFFFFFFFF)


def _splitmix64(x: int) -> int:
    """The splitmix64 step: neighbouring integers become unrelated 64-bit integers."""
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return x ^ x >> 31


def _mix32(x: int) -> int:
    """The last step of MurmurHash3: a one-to-one mixing of 32-bit integers."""
    x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ x >> 16


def _assign_buckets(config: SyntheticConfig) -> Tensor:
    """Bucket of each feature, drawn on the CPU so that it does not depend on the device; [features] long."""
    generator = torch.Generator().manual_seed(stream_seed(config.seed, "buckets", 0))
    if config.buckets == "random":
        return torch.randint(len(BUCKETS), (config.features,), generator=generator)
    return torch.randperm(config.features, generator=generator) % len(BUCKETS)
