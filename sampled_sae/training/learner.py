"""One SAE in training: counters, threshold, measurements; which step path it takes."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sampled_sae import kernels
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.method.config import SAEConfig
from sampled_sae.method.jumprelu import thresholds
from sampled_sae.method.latents import WHOLE, Shard, check_divided
from sampled_sae.method.parameters import JumpReLUParameters, Parameters, Weights, fit_to_batch_, start_parameters
from sampled_sae.method.pools import churn, highest
from sampled_sae.method.rate import encoder_scale, with_lr
from sampled_sae.method.scores import get_score
from sampled_sae.method.selection import Dead, Selection
from sampled_sae.sae import SAE
from sampled_sae.training.jumprelu import JumpReLUPath, start_thresholds_
from sampled_sae.training.optimizer import learning_rate
from sampled_sae.training.step import PlainPath, StepPath
from sampled_sae.utils.measures import Better, Metric


def open_path(
    weights: Weights, config: SAEConfig, steps: int, generator: torch.Generator, shard: Shard = WHOLE
) -> StepPath:
    """The fastest step path for the weights' device and dtype. SAMPLED_SAE_PATH=plain forces the plain one."""
    device, dtype = weights.b_dec.device, weights.b_dec.dtype
    fast = os.environ.get("SAMPLED_SAE_PATH") != "plain" and kernels.usable(device, dtype, config, shard.number)
    if isinstance(weights, JumpReLUParameters):
        if fast:
            from sampled_sae.kernels.jumprelu import FastJumpReLUPath

            return FastJumpReLUPath(weights, config, steps, generator)
        return JumpReLUPath(weights, config, steps, generator, shard)
    if fast and shard.number > 1:
        from sampled_sae.kernels.ranks import DividedPath

        return DividedPath(weights, config, steps, generator, shard)
    if fast:
        from sampled_sae.kernels.path import FastPath

        return FastPath(weights, config, steps, generator)
    return PlainPath(weights, config, steps, generator, shard)


LOOK_EVERY = 16
"""Steps between two looks at how many latents are dead, or will be until the next look: each waits for the GPU."""


class Stats(NamedTuple):
    """Measurements of one step: tensors on the device from `Learner.step`, floats for callbacks. See METRICS."""

    loss: Any
    fve: Any
    l0: Any
    threshold: Any
    lr: Any
    dead: Any
    churn: Any
    ever_pooled: Any
    gradient_norm: Any
    auxk: Any


def _metric(name: str, title: str, meaning: str, better: Better | None = None, headline: bool = False) -> Metric:
    return Metric(name, title, meaning, better, (name,), headline=headline)


METRICS = (
    _metric("loss", "Loss", "Mean loss per sample, on a logarithmic scale.", "low", True),
    _metric("fve", "FVE", "On the training batches, with training-time selection.", "high", True),
    _metric("l0", "L0", "Mean number of active latents per token of the training batch."),
    _metric(
        "threshold", "Threshold", "Moving average of the smallest kept activation (JumpReLU: of the mean threshold)."
    ),
    _metric("lr", "Learning rate", "Learning rate of the step."),
    _metric(
        "dead",
        "Dead latents",
        "Share of latents that have not fired for longer than the setting dead_after.",
        "low",
        True,
    ),
    _metric(
        "churn", "Pool churn", "Share of the candidate pool that was not in the pool of the previous step.", None, True
    ),
    _metric("ever_pooled", "Ever pooled", "Share of latents that were in a candidate pool at least once."),
    _metric("gradient_norm", "Gradient norm", "Norm of the whole gradient before clipping."),
    _metric("auxk", "AuxK loss", "Auxiliary loss before its weight.", "low"),
)
"""What each number of `Stats` means. The log has all of them, the report draws the curves of the headline ones."""
FINAL_METRICS = tuple(
    metric._replace(evaluation="training")
    for metric in (
        _metric(
            "heldout_fvu",
            "FVU, held out",
            "Fraction of variance unexplained at the inference threshold, on the tokens that calibrated it.",
            "low",
        )._replace(path=("heldout", "fvu"), null=1.0),
        _metric(
            "dead",
            "Dead at the end",
            "Share of latents that had not fired for more than dead_after tokens when training ended.",
            "low",
        ),
        METRICS[Stats._fields.index("ever_pooled")],
        _metric("seconds", "Seconds", "Training time of the whole run, divided by its number of SAEs.")._replace(
            digits=0, unit="s"
        ),
    )
)
"""Numbers of a finished training, in `metadata["training"]` of each SAE."""


class Learner:
    """Trains one SAE, one batch at a time. Random numbers come from its own generator alone."""

    def __init__(
        self,
        config: SAEConfig,
        d_in: int,
        steps: int,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
        extends: int = 0,
        shard: Shard = WHOLE,
    ):
        """Steps before `extends` belong to the training that is extended (see `begin_with`).

        With latents over ranks, `shard` says which of them are here. Every rank makes the same calls.
        """
        self.config, self.steps, self.extends, self.shard, m = config, steps, extends, shard, config.d_sae
        check_divided(config, shard.number)
        get_score(config.pool.score)  # an unknown name is an error now, not at the first step
        self.generator = torch.Generator(device).manual_seed(seed)
        self.weights: Weights = start_parameters(d_in, m, self.generator, dtype, encoder_scale(config), shard)
        if config.jumprelu is not None:
            self.weights = JumpReLUParameters(*self.weights, threshold=torch.zeros_like(self.weights.b_enc))
        # In an extension, sizes of pools stay as in the last step before it.
        self.path = open_path(self.weights, config, extends or steps, self.generator, shard)
        self.tokens_seen, self.most_dead = 0, -1
        self.tokens_since_fired = torch.zeros(m // shard.number, dtype=torch.long, device=device)
        self.threshold = torch.full((), torch.nan, dtype=torch.float32, device=device)
        self.pool = torch.zeros(m, dtype=torch.bool, device=device)
        self.ever_pooled = torch.zeros(m, dtype=torch.bool, device=device)
        self.last_pools = None if config.open_at_inference() == m else torch.zeros(m, dtype=torch.long, device=device)

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self, x: Tensor, step: int, measure: bool = True) -> Stats | None:
        """One optimizer step on x [batch, d_in]; `step` counts from 0. `measure` costs a little time."""
        config = self.config = with_lr(self.config, x.shape[1], len(x), self.steps)
        if step == 0:
            fit_to_batch_(self.weights, x, config.init.decoder, encoder_scale(config), self.generator, self.shard)
            if isinstance(self.weights, JumpReLUParameters):
                start_thresholds_(self.weights, x, config, self.shard)
            self.path.load_state({})  # it may keep copies of the weights
        selection = self.path.select(x, step, self.pool)
        pool_churn = churn(selection.pool, self.pool) if measure else None
        self.pool.copy_(selection.pool)
        self.ever_pooled |= selection.pool
        if self.last_pools is not None and step >= int(LAST_POOLS * self.steps):
            self.last_pools += selection.pool
        self._average_threshold(selection, step)
        dead = self._count(selection, len(x), step)
        lr = learning_rate(config.optimizer, step - self.extends, self.steps - self.extends)
        moved = self.path.update(selection, dead, lr)
        if pool_churn is None:
            return None
        return Stats(
            loss=moved.loss.clone(),  # another learner's step may reuse this memory
            fve=1 - moved.error / (x - x.mean(0)).square().sum(),
            l0=selection.kept() / len(x),
            threshold=self.threshold,
            lr=lr,
            dead=self.dead_share(),
            churn=pool_churn,
            ever_pooled=self.ever_pooled.float().mean(),
            gradient_norm=moved.norm.clone(),
            auxk=moved.auxk.clone(),
        )

    def dead(self) -> Tensor:
        """[d_sae] bool: latents that have not fired for `dead_after` tokens; of this rank's."""
        return self.tokens_since_fired >= self.config.auxk.dead_after

    def dead_share(self) -> Tensor:
        """Share of all latents that are dead."""
        return self.shard.count(self.dead().sum()) / self.config.d_sae

    def closed(self) -> Tensor | None:
        """[d_sae] bool: latents that cannot fire at inference, of this rank's; None: all can, or no pool counts yet."""
        if self.last_pools is None or not bool(self.last_pools.any()):
            return None
        open_ = highest(self.last_pools[None], self.config.open_at_inference())[0]
        return ~open_[self.shard.own(self.config.d_sae)]

    def _average_threshold(self, selection: Selection, step: int) -> None:
        config = self.config.threshold
        if step <= min(config.start_step, self.steps // 2):
            return
        smallest = selection.smallest()
        mixed = config.beta * self.threshold + (1 - config.beta) * smallest
        self.threshold = torch.where(self.threshold.isnan(), smallest, mixed)

    def _count(self, selection: Selection, tokens: int, step: int) -> Dead | None:
        """Update the tokens since each latent fired; returns the dead latents, or None if there are none."""
        self.tokens_since_fired += tokens
        self.tokens_since_fired.masked_fill_(selection.fired, 0)
        self.tokens_seen += tokens
        after = self.config.auxk.dead_after
        if self.config.auxk.alpha == 0 or self.tokens_seen < after:
            return None  # no latent can be dead yet, and checking would synchronize with the GPU
        if step % LOOK_EVERY == 0 or self.most_dead < 0:
            left = LOOK_EVERY - 1 - step % LOOK_EVERY
            dying = (self.tokens_since_fired >= after - left * tokens).sum()
            self.most_dead = int(self.shard.stack(dying).max())
        return Dead(self.dead(), self.most_dead) if self.most_dead else None

    @torch.no_grad()
    def begin_with(self, sae: SAE) -> None:
        """Begin with the weights of an SAE in the units of training; optimizer and counters begin anew."""
        for name, source in Parameters(sae.W_enc.T, sae.b_enc, sae.W_dec, sae.b_dec)._asdict().items():
            own = slice(None) if name == "b_dec" else self.shard.own(self.config.d_sae)
            getattr(self.weights, name).copy_(source[own])
        self.path.load_state({})  # it may keep copies of the weights

    def state(self) -> dict[str, Tensor]:
        """Everything that the next step depends on."""
        named = {f"weights.{name}": value for name, value in self.weights._asdict().items()}
        adam = {f"adam.{name}": value for name, value in self.path.state().items()}
        own = {name: getattr(self, name) for name in _COUNTERS} | self._pool_state()
        counts = {"tokens_seen": torch.tensor(self.tokens_seen), "most_dead": torch.tensor(self.most_dead)}
        return named | adam | own | counts | {"generator": self.generator.get_state()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Inverse of `state`."""
        for name, value in self.weights._asdict().items():
            value.copy_(state[f"weights.{name}"])
        self.path.load_state(
            {key.removeprefix("adam."): value for key, value in state.items() if key.startswith("adam.")}
        )
        for name in _COUNTERS:
            setattr(self, name, state[name].to(self.weights.b_dec.device))
        for name, value in self._pool_state().items():
            value.copy_(state[name])
        self.generator.set_state(state["generator"].cpu())
        self.tokens_seen = int(state["tokens_seen"])
        self.most_dead = int(state.get("most_dead", -1))  # earlier versions looked in every step

    def _pool_state(self) -> dict[str, Tensor]:
        """What the pool's score knows of earlier batches; a recorded step keeps it at one address."""
        used = {
            "memory": self.config.pool.memory is not None,
            "score": "state" in get_score(self.config.pool.score).takes,
        }
        counts = {} if self.last_pools is None else {"pool.last": self.last_pools}
        return counts | {f"pool.{name}": value for name, value in self.path.pool_state._asdict().items() if used[name]}

    def sae(self) -> SAE:
        """A copy of the SAE as it is now, in the units of the training input, with its threshold as it is now.

        With latents over ranks see `joined`.
        """
        return self.joined(self.part())

    @torch.no_grad()
    def part(self) -> SAE:
        """The same with the latents of this rank only."""
        m, settings = len(self.weights.W_dec), self.config.jumprelu
        cfg = self._inference()
        cfg = cfg if m == cfg.d_sae else replace(cfg, d_sae=m, prefixes=())
        sae = SAE(cfg, self.weights.W_dec.dtype, self.weights.W_dec.device)
        targets = Parameters(sae.W_enc.T, sae.b_enc, sae.W_dec, sae.b_dec)
        for name, target in targets._asdict().items():
            target.copy_(getattr(self.weights, name))
        if settings is not None and isinstance(self.weights, JumpReLUParameters):
            sae.threshold = thresholds(self.weights, settings).float().clone()
        else:
            sae.threshold_ema.copy_(self.threshold)
            sae.threshold.copy_(self.threshold.nan_to_num(0.0))
            if (closed := self.closed()) is not None:
                sae.threshold = torch.where(closed, CLOSED, sae.threshold)
        return sae

    @torch.no_grad()
    def joined(self, part: SAE) -> SAE:
        """The SAE from the parts that the ranks have: on the first of them, on the CPU if there are several; on the
        others without weights. All ranks with latents of this SAE call it."""
        shard, m = self.shard, self.config.d_sae
        if shard.number == 1:
            return part
        sae = SAE(self._inference(), part.dtype, "meta" if shard.index else "cpu")
        sae.b_dec.copy_(part.b_dec)
        sae.threshold_ema.copy_(part.threshold_ema)
        sae.threshold = torch.zeros(m if part.threshold.ndim else (), device=sae.device)
        pairs = [(sae.W_enc.T, part.W_enc.T), (sae.b_enc, part.b_enc), (sae.W_dec, part.W_dec)]
        if part.threshold.ndim:
            pairs.append((sae.threshold, part.threshold))
        else:
            sae.threshold.copy_(part.threshold)
        for whole, own in pairs:
            rows = max(1, AT_ONCE // (shard.number * own[0].numel()))
            for first in range(0, len(own), rows):
                found = shard.stack(own[first : first + rows])
                if not shard.index:
                    whole.view(shard.number, *own.shape)[:, first : first + rows] = found.cpu()
        return sae

    def _inference(self) -> InferenceConfig:
        settings = self.config.jumprelu
        return InferenceConfig(
            self.weights.W_dec.shape[1],
            self.config.d_sae,
            k=self.config.k,
            apply_b_dec_to_input=settings is None or settings.variant == "relative",
            prefixes=self.config.prefixes or (),
            training=self.config,
        )


CLOSED = 1e30
"""Threshold of a latent that cannot fire: finite, because saved tensors are."""
LAST_POOLS = 0.9
"""Share of the steps after which pools count for the latents that are open at inference."""
AT_ONCE = 2**24
"""Numbers that ranks exchange at once when they join their parts of an SAE."""
_COUNTERS = ("tokens_since_fired", "threshold", "pool", "ever_pooled")
