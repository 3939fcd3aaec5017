"""A trained sparse autoencoder: parameters, inference by threshold, and its folder on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sampled_sae.method.config import SAEConfig
from sampled_sae.utils.errors import UserError


class SAE(nn.Module):
    """x [..., d] -> codes [..., m] -> x_hat [..., d]; a token's codes depend on that token alone.

    A latent's activation z is kept where z > threshold, strictly. `config` says how it was trained and
    `metadata` where it came from (model, hook, run); both are saved with it.
    """

    W_enc_rows: Tensor
    b_enc: Tensor
    W_dec: Tensor
    b_dec: Tensor
    threshold: Tensor
    threshold_ema: Tensor

    def __init__(self, d: int, m: int, *, config: SAEConfig | None = None, dtype: torch.dtype = torch.float32):
        super().__init__()
        # The encoder is stored with latents as rows, as the decoder is: both are read one latent at a time.
        self.W_enc_rows = nn.Parameter(torch.zeros(m, d, dtype=dtype))
        self.b_enc = nn.Parameter(torch.zeros(m, dtype=dtype))
        self.W_dec = nn.Parameter(torch.zeros(m, d, dtype=dtype))
        self.b_dec = nn.Parameter(torch.zeros(d, dtype=dtype))
        self.register_buffer("threshold", torch.zeros((), dtype=torch.float32))
        # The moving average of training; nan where training was too short to have one.
        self.register_buffer("threshold_ema", torch.full((), torch.nan, dtype=torch.float32))
        self.config = config
        self.metadata: dict[str, Any] = {}

    @property
    def W_enc(self) -> Tensor:
        """[d, m], a view."""
        return self.W_enc_rows.T

    @property
    def d_in(self) -> int:
        """Input width."""
        return self.W_dec.shape[1]

    @property
    def d_sae(self) -> int:
        """Number of latents."""
        return self.W_dec.shape[0]

    @property
    def device(self) -> torch.device:
        return self.W_dec.device

    @property
    def dtype(self) -> torch.dtype:
        return self.W_dec.dtype

    def pre_activations(self, x: Tensor) -> Tensor:
        """x [..., d] -> post-ReLU activations [..., m], before the threshold."""
        if x.shape[-1] != self.d_in:
            raise UserError(f"x has width {x.shape[-1]}: this SAE takes activations of width {self.d_in}")
        return torch.relu((x.to(self.dtype) - self.b_dec) @ self.W_enc + self.b_enc)

    def encode(self, x: Tensor) -> Tensor:
        """x [..., d] -> codes [..., m]."""
        z = self.pre_activations(x)
        return z * (z > self.threshold)

    def decode(self, codes: Tensor) -> Tensor:
        """codes [..., m] -> x_hat [..., d]."""
        if codes.shape[-1] != self.d_sae:
            raise UserError(f"codes have {codes.shape[-1]} latents: this SAE has {self.d_sae}")
        return codes @ self.W_dec + self.b_dec

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d] -> x_hat [..., d]."""
        return self.decode(self.encode(x))

    @torch.no_grad()
    def rescale_(self, c: float) -> SAE:
        """Make an SAE trained on x/c take x, in place: biases and thresholds grow by c, directions stay."""
        for tensor in (self.b_enc, self.b_dec, self.threshold, self.threshold_ema):
            tensor.mul_(c)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SAE:
        """Where `to`, `cuda`, `bfloat16` and the like end up: thresholds move along, but stay in float32."""
        kept = {name: getattr(self, name) for name in ("threshold", "threshold_ema")}
        super()._apply(fn, recurse)
        for name, value in kept.items():
            setattr(self, name, value.to(getattr(self, name).device))
        return self

    def save(self, folder: str | Path) -> Path:
        """Write a SAELens v6 folder with our own configuration beside it; returns the folder."""
        from sampled_sae.formats import saelens

        return saelens.save(self, Path(folder))

    @classmethod
    def load(cls, folder: str | Path, device: str | torch.device = "cpu") -> SAE:
        """Read what `save` wrote, or a SAELens v6 folder of the same kind made elsewhere."""
        from sampled_sae.formats import saelens

        return saelens.load(Path(folder)).to(device)

    def __repr__(self) -> str:
        threshold = float(self.threshold.mean())
        return f"SAE(d_in={self.d_in}, d_sae={self.d_sae}, threshold={threshold:.4g}, config={self.config})"
