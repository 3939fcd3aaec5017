"""Settings of the core evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from torch import Tensor

from sampled_sae.config import Bound, Config, Count, OpenShare, Positive, PositiveNumber, plain
from sampled_sae.evals.bootstrap import Estimate
from sampled_sae.evals.core.fidelity import Density, Fidelity, Trained
from sampled_sae.evals.core.loss import Loss
from sampled_sae.evals.results import saebench_layout

PutIn = Literal["saebench", "measured", "normal", "everywhere"]
NormFactor = Annotated[float, Bound("must be at least 1 (inf for no high norms)", lambda value: value >= 1)]


@dataclass(frozen=True, slots=True)
class CoreConfig(Config):
    """Text, measured positions and batch sizes of the core evaluation.

    The first `skip_first` positions of each context and the tokens in `left_out` are not measured. `put_in` chooses the
    positions at which the reconstruction and the ablations replace the model's activation:

    - saebench: the reconstruction at measured positions, ablations at all, as SAEBench does with special tokens
    - measured: both at measured positions
    - normal: both at measured positions, except for high-norm tokens; for SAEs that were trained without these
    - everywhere: both at all positions

    If all positions are measured, saebench, measured and everywhere are the same.
    """

    contexts: Positive | None = None
    """Contexts that are read. Default: 64, or fewer if fewer were held out from training on the same text."""
    context: Positive | None = None
    """Tokens per context. Default: as in training."""
    skip_first: Count | None = None
    """Positions to exclude at the start of each context. Default: those that training excluded."""
    left_out: tuple[int, ...] | None = None
    """Ids of tokens to exclude; no ids exclude none. Default: the tokenizer's BOS, EOS and PAD, as in SAEBench."""
    norm_factor: NormFactor = 10.0
    """Tokens whose norm is above this many times the median of the measured ones are high-norm tokens. A limit that
    training saved with the SAE replaces 10, but no other factor."""
    norm_limit: PositiveNumber | None = None
    """Absolute norm above which tokens are high-norm tokens; replaces `norm_factor`. Default: the limit that training
    saved."""
    put_in: PutIn | None = None
    """Positions at which the reconstruction and the ablations replace the residual stream. Default: normal for SAEs
    that were trained without high-norm tokens, saebench for others."""
    loss: bool = True
    """Whether to measure cross-entropy and KL divergence, which take a pass through the whole model for each SAE."""
    trained_on_high_norm: bool = False
    """Whether training-time selection includes the high-norm tokens; they may take a large part of its budget."""
    cut_batch: Positive | None = None
    """Tokens per batch in training-time selection. Default: training's batch, or 4096."""
    legacy_batch: Positive = 16
    """Contexts per batch for the legacy explained variance, whose value depends on it."""
    contexts_at_once: Positive | None = None
    """Contexts in one pass through the model; does not affect the results. Default: on a GPU as many as
    a twelfth of its memory has logits of, at most 64; 4 elsewhere."""
    tokens_at_once: Positive = 2048
    """Tokens that an SAE encodes at once; does not affect the results."""
    resamples: Count = 1000
    """Resamples of the bootstrap; 0 for no intervals."""
    level: OpenShare = 0.95
    """Confidence level of the intervals."""
    seed: int = 0
    """Seed of the bootstrap, and of mixing and sampled pools in training-time selection."""

    @property
    def batch(self) -> int:
        """Tokens that share one cut."""
        return self.cut_batch or 4096

    @property
    def at_once(self) -> int:
        """Contexts in one pass."""
        return self.contexts_at_once or 4


def special_tokens(tokenizer: Any) -> tuple[int, ...]:
    """The ids of a tokenizer's BOS, EOS and PAD, those of them that it has: what SAEBench leaves out."""
    ids = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad"))
    return tuple(sorted({token for token in ids if token is not None}))


class CoreResult(NamedTuple):
    """One SAE on one layer of one model; every `Estimate` has a bootstrap interval over contexts."""

    layer: int | str  # the residual stream after this block, counted from 0, or a hook point by name
    contexts: int  # contexts that were read
    median_norm: float  # median norm of the measured tokens
    measured: Fidelity  # over all measured tokens
    normal: Fidelity  # over those without a high norm
    trained: Trained | None  # with training-time selection; none for an SAE without a training configuration
    density: Density  # on tokens without a high norm; at a high-norm token half of all latents may fire
    density_measured: Density  # the same over all measured tokens
    loss: Loss | None  # what the model loses; none if it was not to be measured
    settings: CoreConfig  # how it was measured
    fired: Tensor | None = None  # [d_sae]: tokens without a high norm on which each latent fires; not in `to_dict`

    def to_dict(self) -> dict[str, Any]:
        """The same as plain JSON."""
        return {name: plain(item) for name, item in self._asdict().items() if name != "fired"}


def to_saebench(result: CoreResult, settings: CoreConfig) -> dict[str, Any]:
    """The result as SAEBench's own tools read it: what it measures over all tokens, not without those of high norm.

    Its `explained_variance`, which subtracts another mean, and what is not measured here are None; so are the losses
    unless reconstruction and ablations were put in where SAEBench puts them.
    """
    all_, density = result.measured, result.density_measured
    loss = result.loss if settings.put_in in (None, "saebench") else None

    def value(estimate: Estimate | None) -> float | None:
        return None if estimate is None else estimate.value

    config = {
        "batch_size_prompts": settings.at_once,
        "compute_kl": loss is not None,
        "compute_ce_loss": loss is not None,
        "exclude_special_tokens_from_reconstruction": bool(settings.left_out),
        "put_in": settings.put_in or "saebench",
    }
    metrics = {
        "model_behavior_preservation": {
            "kl_div_score": value(loss and loss.kl_recovered),
            "kl_div_with_ablation": value(loss and loss.kl_zero),
            "kl_div_with_sae": value(loss and loss.kl_sae),
        },
        "model_performance_preservation": {
            "ce_loss_score": value(loss and loss.ce_recovered),
            "ce_loss_with_ablation": value(loss and loss.ce_zero),
            "ce_loss_with_sae": value(loss and loss.ce_sae),
            "ce_loss_without_sae": value(loss and loss.ce_model),
        },
        "reconstruction_quality": {
            "explained_variance": None,
            "explained_variance_legacy": value(all_.explained_variance_legacy),
            "mse": None,
            "cossim": value(all_.cosine),
        },
        "shrinkage": {
            "l2_norm_in": None,
            "l2_norm_out": None,
            "l2_ratio": value(all_.relative_norm),
            "relative_reconstruction_bias": None,
        },
        "sparsity": {"l0": value(all_.l0), "l1": None},
        "token_stats": {
            "total_tokens_eval_reconstruction": all_.tokens,
            "total_tokens_eval_sparsity_variance": all_.tokens,
        },
        "misc_metrics": {
            "freq_over_1_percent": value(density.over_1_percent),
            "freq_over_10_percent": value(density.over_10_percent),
            "frac_alive": density.alive,
        },
    }
    more = {
        "fvu": value(all_.fvu),
        "fvu_without_high_norm_tokens": value(result.normal.fvu),
    }
    return saebench_layout("core", config, metrics, [], more)
