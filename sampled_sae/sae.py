"""A sparse autoencoder for inference: parameters, encoding, decoding, saving and loading."""

from __future__ import annotations

import math
import operator
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sampled_sae.config import require, shown
from sampled_sae.formats import FORMATS, StoredSAE, hub, load, located
from sampled_sae.hooks import Decoder, attach
from sampled_sae.method.architectures import ARCHITECTURES, InferenceConfig
from sampled_sae.method.codes import SparseCodes
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.system import usable_device

THRESHOLDS = ("threshold", "threshold_ema")
LAYER_NORM_EPS = 1e-5  # as in SAELens


def _by_latent(name: str, given: Mapping[int, float] | None) -> dict[int, float]:
    """Values by number of the latent, as `attached` takes them; `name` is that of the argument."""
    require(given is None or isinstance(given, Mapping), name, given, "must give values by latent, such as {42: 5.0}")
    found = {}
    for latent, value in (given or {}).items():
        try:
            found[operator.index(latent)] = float(value)
        except (TypeError, ValueError):
            right = "latents must be whole numbers, and their values numbers"
            raise UserError(f"{name}: latent {shown(latent)}, value {shown(value)}: {right}") from None
        require(math.isfinite(float(value)), f"{name}: value of latent {latent}", value, "must be finite")
    return found


class SAE(nn.Module):
    """A sparse autoencoder: x [..., d_in] -> codes [..., d_sae] -> x_hat [..., d_in].

    The codes of a token depend on that token alone.
    """

    W_enc: Tensor
    """[d_in, d_sae], stored latent by latent like W_dec: W_enc.T is contiguous."""
    b_enc: Tensor
    """[d_sae]; None for architectures without it, such as gated."""
    W_dec: Tensor
    """[d_sae, d_in]."""
    b_dec: Tensor
    threshold: Tensor
    """() or [d_sae], float32: a jumprelu code is kept above it, strictly; 0 for other architectures."""
    threshold_ema: Tensor
    """() float32: moving average of the threshold during training; nan if there is none."""

    def __init__(
        self, cfg: InferenceConfig, dtype: torch.dtype = torch.float32, device: str | torch.device | None = None
    ):
        """Create an SAE with all weights 0."""
        super().__init__()
        self.cfg = cfg
        self.folder: Path | None = None
        """Folder that it was loaded from or last saved to."""
        self.architecture = ARCHITECTURES.find(cfg.architecture)
        shapes = {"W_dec": (cfg.d_sae, cfg.d_in), "b_dec": (cfg.d_in,)}
        shapes |= {name: (cfg.d_sae,) for name in self.architecture.tensors if name not in THRESHOLDS}
        self.W_enc = nn.Parameter(torch.zeros(cfg.d_sae, cfg.d_in, dtype=dtype, device=device).T)
        self.register_parameter("b_enc", None)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)))
        self.register_buffer("threshold", torch.zeros((), device=device))
        self.register_buffer("threshold_ema", torch.full((), torch.nan, device=device))
        self._cut: tuple[Tensor, int, torch.dtype, float] | None = None

    @property
    def d_in(self) -> int:
        """Width of the activations."""
        return self.cfg.d_in

    @property
    def d_sae(self) -> int:
        """Number of latents."""
        return self.cfg.d_sae

    @property
    def device(self) -> torch.device:
        return self.W_dec.device

    @property
    def dtype(self) -> torch.dtype:
        return self.W_dec.dtype

    @property
    def cut(self) -> float | Tensor:
        """Threshold as it is applied, at least 0: a float for all latents, or [d_sae].

        The float is cached until the buffer changes, so that encoding does not synchronize with the GPU.
        """
        threshold = self.threshold
        if threshold.ndim:
            return threshold.clamp_min(0.0)
        version = -1 if threshold.is_inference() else threshold._version  # -1: changes are not counted
        cached = self._cut
        if cached is None or version < 0 or cached[0] is not threshold or cached[1:3] != (version, self.dtype):
            # Rounded to the dtype in which pre-activations are compared with it.
            cached = self._cut = (threshold, version, self.dtype, float(threshold.clamp_min(0.0).to(self.dtype)))
        return cached[3]

    def pre_activations(self, x: Tensor | np.ndarray[Any, Any], latents: Tensor | None = None) -> Tensor:
        """x [..., d_in] -> the encoder's affine map [..., c] before any activation, of latents [c] or of all."""
        x = self._input(x)
        pre = self._affine(x.reshape(-1, self.d_in), latents)
        return pre.view(*x.shape[:-1], pre.shape[1])

    def encode(self, x: Tensor | np.ndarray[Any, Any], prefix: int | None = None) -> Tensor:
        """x [..., d_in] -> codes [..., d_sae]; with `prefix`, codes outside that Matryoshka prefix are 0."""
        x = self._input(x)
        codes = self._codes(x.reshape(-1, self.d_in), None if prefix is None else slice(self.prefix_width(prefix)))
        if prefix is not None:
            codes = nn.functional.pad(codes, (0, self.d_sae - codes.shape[1]))
        return codes.view(*x.shape[:-1], self.d_sae)

    def prefix_width(self, prefix: int | None) -> int:
        """Number of latents in a Matryoshka prefix, by its index in `cfg.prefixes`; None: all latents."""
        if prefix is None:
            return self.d_sae
        widths = self.cfg.prefixes
        if not -len(widths) <= prefix < len(widths):
            what = f"indexes one of the prefixes {widths}" if widths else "this SAE has no Matryoshka prefixes"
            raise UserError(f"prefix = {prefix!r}: {what}")
        return widths[prefix]

    @torch.no_grad()
    def encode_sparse(
        self, x: Tensor | np.ndarray[Any, Any], latents: Tensor | None = None, max_values: int = 2**26
    ) -> SparseCodes:
        """x [..., d_in] -> the nonzero codes of its tokens in order, of latents [c] (each once) or of all.

        Computed in chunks of tokens with at most `max_values` codes.
        """
        x = self._input(x).reshape(-1, self.d_in)
        if latents is not None:
            latents = latents.to(self.device).sort().values
        computed = self.d_sae if latents is None or not self.architecture.per_latent else len(latents)
        chunks = x.split(max(1, max_values // max(1, computed)))
        codes = SparseCodes.cat([SparseCodes.from_dense(self._codes(chunk, latents)) for chunk in chunks])
        return codes if latents is None else codes._replace(latent=latents[codes.latent], d_sae=self.d_sae)

    def decode(self, codes: Tensor | SparseCodes, x: Tensor | None = None, prefix: int | None = None) -> Tensor:
        """Codes [..., d_sae] -> x_hat [..., d_in]; sparse codes -> x_hat [tokens, d_in].

        `x`, the activations that were encoded, is needed for SAEs that normalize each token (see the configuration).
        With `prefix`, only the latents of that Matryoshka prefix contribute.
        """
        width = codes.d_sae if isinstance(codes, SparseCodes) else codes.shape[-1]
        if width != self.d_sae:
            raise UserError(f"codes have {width} latents: this SAE has {self.d_sae}")
        inside = self.prefix_width(prefix)
        if isinstance(codes, SparseCodes):
            decoded = (codes if prefix is None else codes.where(codes.latent < inside)).decode(self.W_dec)
        else:
            decoded = codes[..., :inside] @ self.W_dec[:inside]
        decoded = decoded + self.b_dec
        if self.cfg.normalize_activations == "none":
            return decoded
        if x is None:
            how = f"normalize_activations = {self.cfg.normalize_activations!r}"
            raise UserError(f"x = None: this SAE has {how}; give decode the activations that were encoded")
        shift, scale = self._normalization(x.reshape(-1, self.d_in).to(self.device, self.dtype))
        return (decoded.reshape(-1, self.d_in) * scale + shift).view(decoded.shape)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d_in] -> x_hat [..., d_in]."""
        return self.decode(self.encode(x), x)

    def _input(self, x: Tensor | np.ndarray[Any, Any]) -> Tensor:
        """A tensor of the right width; it moves to the SAE's device and dtype chunk by chunk."""
        if isinstance(x, np.ndarray):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # read-only arrays, such as mapped files: nothing writes to x
                x = torch.from_numpy(x)
        if not x.ndim or x.shape[-1] != self.d_in:
            width = x.shape[-1] if x.ndim else None
            raise UserError(f"x has width {width}: this SAE takes activations of width {self.d_in}")
        return x

    def _affine(self, x: Tensor, latents: Tensor | slice | None) -> Tensor:
        """x [n, d_in] -> pre-activations [n, c]."""
        x = x.to(self.device, self.dtype)
        if self.cfg.normalize_activations != "none":
            shift, scale = self._normalization(x)
            x = (x - shift) / (scale + (LAYER_NORM_EPS if self.cfg.normalize_activations == "layer_norm" else 0.0))
        x = x - self.b_dec if self.cfg.apply_b_dec_to_input else x
        rows, b_enc = self.W_enc.T, self.b_enc
        if latents is not None:
            rows, b_enc = rows[latents], b_enc if b_enc is None else b_enc[latents]
        return nn.functional.linear(x, rows, b_enc)

    def scales(self, x: Tensor) -> Tensor | float:
        """x [n, d_in] -> what a code of each token is multiplied by in its reconstruction, [n]; 1 for most SAEs."""
        if self.cfg.normalize_activations == "none":
            return 1.0
        return self._normalization(x.to(self.device, self.dtype))[1][:, 0]

    def _normalization(self, x: Tensor) -> tuple[Tensor | float, Tensor]:
        """x [n, d_in] -> what is subtracted from each token, and what the rest is divided by, [n, 1]."""
        if self.cfg.normalize_activations == "constant_norm_rescale":
            return 0.0, (x.norm(dim=1, keepdim=True) / self.d_in**0.5).clamp_min(torch.finfo(x.dtype).tiny)
        shift = x.mean(dim=1, keepdim=True)
        return shift, (x - shift).std(dim=1, keepdim=True)

    def _codes(self, x: Tensor, latents: Tensor | slice | None) -> Tensor:
        """x [n, d_in] -> codes [n, c]."""
        if latents is None or self.architecture.per_latent:
            return self.architecture.activate_(self, self._affine(x, latents), latents)
        return self.architecture.activate_(self, self._affine(x, None), None)[:, latents]

    @contextmanager
    def attached(
        self,
        model: Any,
        hook: int | str | None = None,
        *,
        ablate: Sequence[int] = (),
        steer: Mapping[int, float] | None = None,
        clamp: Mapping[int, float] | None = None,
        keep_error: bool = True,
    ) -> Iterator[Any]:
        """Run the model with this SAE inserted at its hook point, at every token, within the `with` block.

        The codes z of the activations x are changed before they are decoded: those of the latents in `ablate` become
        0, those in `clamp` become the given value, and `steer` adds its value to the code, which moves x by that value
        times the latent's decoder row. With `keep_error`, the reconstruction error x - decode(z) is added back, so that
        unchanged codes leave the model unchanged; without it, the model continues from the reconstruction alone.

        `model` is one of `ss.load_model` or of transformers; it is also returned. `hook` is a layer or the name of a
        hook point, by default the one that is saved with the SAE.
        """
        decoder = model if isinstance(model, Decoder) else Decoder.of(model)
        require(isinstance(ablate, Iterable), "ablate", ablate, "must be a list of latents, such as [17]")
        off, clamped = _by_latent("ablate", dict.fromkeys(ablate, 0.0)), _by_latent("clamp", clamp)
        fixed, added = off | clamped, _by_latent("steer", steer)
        if twice := off.keys() & clamped.keys() | fixed.keys() & added.keys():
            raise UserError(f"latent {min(twice)}: must be in one of ablate, steer and clamp")
        if wrong := [latent for latent in (*fixed, *added) if not 0 <= latent < self.d_sae]:
            raise UserError(f"latent {wrong[0]}: the SAE has {self.d_sae} latents, 0 to {self.d_sae - 1}")
        set_, add = (torch.tensor(list(one), dtype=torch.long, device=self.device) for one in (fixed, added))
        to, by = (torch.tensor(list(one.values()), dtype=self.dtype, device=self.device) for one in (fixed, added))

        def replace(x: Tensor) -> Tensor:
            flat = x.reshape(-1, self.d_in)
            if keep_error:
                moved = by @ self.W_dec[add]
                if len(set_):
                    moved = moved + (to - self._codes(flat, set_)) @ self.W_dec[set_]
                if self.cfg.normalize_activations != "none":
                    moved = moved * self._normalization(flat.to(self.device, self.dtype))[1]
                return (flat + moved.to(flat)).view(x.shape)
            codes = self._codes(flat, None)
            codes[:, set_] = to
            codes[:, add] += by
            return self.decode(codes, flat).to(flat).view(x.shape)

        with attach(decoder, hook, self.cfg.metadata, self.d_in, replace):
            yield model

    @torch.no_grad()
    def rescale_(self, c: float) -> SAE:
        """Make an SAE trained on x/c take x, in place: biases and thresholds are multiplied by c."""
        for name, tensor in self.state_dict(keep_vars=True).items():
            if name.startswith("b_") or name in THRESHOLDS:
                tensor.mul_(c)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SAE:
        """Called by `to`, `cuda`, `bfloat16` and the like: thresholds move along, but stay in float32."""
        kept = {name: getattr(self, name) for name in THRESHOLDS}
        super()._apply(fn, recurse)
        for name, value in kept.items():
            setattr(self, name, value.to(getattr(self, name).device))
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Called by `load_state_dict`: a threshold may be () or [d_sae], whatever it was before."""
        for name in THRESHOLDS:
            if (given := state_dict.get(prefix + name)) is not None and given.shape in ((), (self.d_sae,)):
                setattr(self, name, torch.zeros(given.shape, device=self.device))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has tensors of its own, whose changes are counted from 0.
        return self.__dict__ | {"_cut": None}

    def save(self, folder: str | Path, format: str = "saelens") -> Path:
        """Write a folder, whole or not at all, and return it."""
        tensors = {name: tensor.detach() for name, tensor in self.state_dict().items()}
        self.folder = FORMATS.find(format).save(StoredSAE(self.cfg, tensors), Path(folder))
        return self.folder

    @classmethod
    @torch.no_grad()
    def load(
        cls,
        path: str | Path,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        k: int | None = None,
    ) -> SAE:
        """Read a saved SAE of any known format, in its own dtype by default.

        `path` is a folder, a file, or `hf:OWNER/NAME[/FOLDER][@REVISION]` on the hub. `k` is the number of active
        latents per token, for files that do not contain it (Qwen-Scope).
        """
        device, path = usable_device(device), located(hub.local(path))
        cfg, tensors = load(path, k)
        sae = cls(cfg, dtype or tensors["W_dec"].dtype, device)
        for name, tensor in tensors.items():
            if name in THRESHOLDS:
                setattr(sae, name, tensor.to(device, torch.float32))
            else:
                getattr(sae, name).copy_(tensor)
        sae.folder = path
        return sae

    @classmethod
    def from_pretrained(
        cls,
        repo: str,
        subfolder: str | None = None,
        revision: str | None = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        k: int | None = None,
    ) -> SAE:
        """Load an SAE of any known format from the Hugging Face hub; only the files that its format reads are fetched.

        `repo` is OWNER/NAME, `subfolder` the SAE's folder in it, `revision` a branch, a tag or a commit. `k` as in
        `load`.
        """
        return cls.load(hub.download(hub.Place(repo, subfolder and subfolder.strip("/"), revision)), device, dtype, k)

    def push_to_hub(
        self,
        repo: str,
        subfolder: str | None = None,
        revision: str | None = None,
        *,
        private: bool | None = None,
        license: str | None = None,
        card: bool | None = None,
        message: str | None = None,
    ) -> str:
        """Upload the SAE, as a SAELens folder with a model card, to the Hugging Face hub; returns the commit's address.

        A repository that does not exist is created, `private` or not; likewise the branch `revision`. The card has the
        metrics of the results in the SAE's folder if the SAE is the one saved there. A README.md that exists already is
        kept unless `card=True`; `card=False` writes none. `license` is a name that the hub knows, such as `mit`.
        """
        place = hub.Place(repo, subfolder and subfolder.strip("/"), revision)
        results = self.folder if self.folder is not None and self.is_saved_in(self.folder) else None
        text = hub.model_card(self.cfg, place, results, license)
        tensors = {name: tensor.detach() for name, tensor in self.state_dict().items()}
        with tempfile.TemporaryDirectory() as parent:
            folder = FORMATS.find("saelens").save(StoredSAE(self.cfg, tensors), Path(parent) / "sae")
            (folder / hub.CARD).write_text(text, encoding="utf-8")
            return hub.upload(folder, place, card, private, message)

    def is_saved_in(self, folder: Path) -> bool:
        """Whether the SAE in a folder has the same tensors."""
        try:
            saved = SAE.load(folder).state_dict()
        except UserError:
            return False
        own = {name: tensor.cpu() for name, tensor in self.state_dict().items()}
        # A threshold that is not known is nan.
        return own.keys() == saved.keys() and all(
            torch.equal(own[name].nan_to_num(), saved[name].nan_to_num()) for name in own
        )

    def __repr__(self) -> str:
        return (
            f"SAE({self.cfg.architecture}, d_in={self.d_in}, d_sae={self.d_sae}, "
            f"threshold={float(self.threshold.mean()):.4g}, training={self.cfg.training})"
        )
