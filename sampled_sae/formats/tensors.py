"""Files of tensors from elsewhere, none of them trusted; scales that are folded into weights."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sampled_sae.config import Config, hints, shown
from sampled_sae.method.architectures import ARCHITECTURES, InferenceConfig
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import read_json
from sampled_sae.utils.third_party import reason

C = TypeVar("C", bound=Config)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Shape = tuple[int, ...]


class Archive(NamedTuple):
    """Tensors of one file, by name."""

    path: Path
    tensors: Mapping[str, Any]
    about: Mapping[str, str] = {}
    """Texts in the header of a safetensors file."""

    def take(self, name: str, *shapes: Shape) -> Tensor:
        """A tensor of finite floats, of one of these shapes; UserError otherwise."""
        tensor = self.tensors.get(name)
        if not isinstance(tensor, Tensor):
            raise UserError(f"{self.path}: {name} is missing; there are {shown(list(self.tensors))}")
        if tuple(tensor.shape) not in shapes:
            right = " or ".join(map(str, shapes))
            raise UserError(f"{self.path}: {name} has shape {tuple(tensor.shape)}: must be {right}")
        # A view could claim to be far larger than what the file holds.
        whole = tensor.layout == torch.strided and tensor.device.type == "cpu" and tensor.dtype in DTYPES
        if not whole or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise UserError(f"{self.path}: {name} is not a plain tensor of floats ({tensor.dtype}, {tensor.layout})")
        if not bool(tensor.isfinite().all()):
            raise UserError(f"{self.path}: {name} has entries that are nan or infinite: must be finite numbers")
        return tensor


def read_safetensors(path: Path) -> Archive:
    """All tensors of a safetensors file."""
    try:
        with safe_open(path, "pt") as file:
            return Archive(path, {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {})  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise _damaged(path, error) from None


def safetensors_shapes(path: Path) -> dict[str, Shape]:
    """Shapes of the tensors of a safetensors file, from its header."""
    try:
        with safe_open(path, "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise _damaged(path, error) from None


def read_pickle(path: Path, mapped: bool = False) -> Archive:
    """The dictionary of tensors in a file of torch.save; code in it is not run.

    `mapped` leaves the weights on disk until they are used.
    """
    try:
        mapped = mapped and zipfile.is_zipfile(path)  # files of early versions of torch are none
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped or None)
    # A damaged file can fail anywhere in torch and in pickle.
    except Exception as error:
        if "weights_only" in str(error).lower():
            raise UserError(f"{path}: holds code or objects; only plain tensors are loaded") from None
        raise _damaged(path, error) from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds a {type(content).__name__}: must be a dictionary of tensors")
    return Archive(path, {str(name): value for name, value in content.items()})


def read_npz(path: Path) -> Archive:
    """All arrays of an .npz archive as tensors; arrays of objects are refused."""
    npz_shapes(path)
    try:
        with np.load(path, allow_pickle=False) as archive:
            return Archive(path, {name: torch.from_numpy(archive[name]) for name in archive.files})
    except Exception as error:  # zipfile, zlib and numpy fail in many ways
        raise _damaged(path, error) from None


def npz_shapes(path: Path) -> dict[str, Shape]:
    """Shapes of the arrays of an .npz archive, from their headers, which must agree with the sizes of the entries."""
    found = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                with archive.open(entry) as file:
                    version = np.lib.format.read_magic(file)
                    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else _header_2_0
                    shape, _, dtype = header(file)
                    size = file.tell() + math.prod(shape) * dtype.itemsize
                if dtype.hasobject:
                    raise ValueError(f"{entry.filename} holds Python objects; only plain arrays are loaded")
                if size != entry.file_size:
                    raise ValueError(f"{entry.filename} has {entry.file_size} bytes, its header says {size}")
                found[entry.filename.removesuffix(".npy")] = tuple(shape)
    except Exception as error:
        raise _damaged(path, error) from None
    return found


_header_2_0 = np.lib.format.read_array_header_2_0


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"{path}: missing or damaged ({reason(error)})")


# ---- configurations ---------------------------------------------------------------------------------


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds {shown(content)}: must be an object with named fields")
    return content


def known_fields(cls: type[C], content: Any, where: object) -> C:
    """The fields of `cls` that an object from elsewhere has; others are left out, null stands for the default."""
    if not isinstance(content, dict):
        raise UserError(f"{where}: {shown(content)}: must be an object with named fields")
    known = {name: content[name] for name in hints(cls) if content.get(name) is not None}
    return cls.from_dict(known, str(where))


def metadata(**entries: Any) -> dict[str, Any]:
    """Entries that are known."""
    return {name: value for name, value in entries.items() if value is not None}


# ---- weights ----------------------------------------------------------------------------------------


def native_shapes(cfg: InferenceConfig) -> dict[str, Shape]:
    """Tensors of an SAE, by name, with one threshold per latent."""
    common: dict[str, Shape] = {
        "W_enc": (cfg.d_in, cfg.d_sae),
        "W_dec": (cfg.d_sae, cfg.d_in),
        "b_dec": (cfg.d_in,),
    }
    return common | {name: (cfg.d_sae,) for name in ARCHITECTURES[cfg.architecture].tensors}


def one_threshold(threshold: Tensor) -> Tensor:
    """float32, () if all latents have the same: SAEs of some kinds have one for all, others one for each."""
    threshold = threshold.float()
    equal = threshold.ndim == 0 or bool((threshold == threshold[0]).all())
    return threshold.flatten()[0].clone() if equal else threshold


def fold_decoder_norms_(tensors: dict[str, Tensor]) -> None:
    """Codes that are multiplied by the norms of the decoder rows, and divided by them for decoding: unit rows."""
    W_dec = wide(tensors["W_dec"])
    norms = W_dec.norm(dim=1).clamp_min(torch.finfo(W_dec.dtype).tiny)
    tensors["W_enc"], tensors["b_enc"] = tensors["W_enc"] * norms, tensors["b_enc"] * norms
    tensors["W_dec"] = W_dec / norms[:, None]


def fold_scale_(tensors: dict[str, Tensor], scale: float) -> None:
    """An SAE of `scale` times the activations takes the activations themselves, with the same codes."""
    tensors["W_enc"] = wide(tensors["W_enc"]) * scale
    tensors["W_dec"], tensors["b_dec"] = wide(tensors["W_dec"]) / scale, wide(tensors["b_dec"]) / scale


def wide(tensor: Tensor) -> Tensor:
    """In 32 bits or more, so that a factor adds no rounding to weights of 16 bits."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
