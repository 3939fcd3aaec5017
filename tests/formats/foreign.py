"""SAEs of other programs: files as these write them, and what these compute, from their definitions."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

K = 4


class Foreign(NamedTuple):
    """A file from elsewhere and the peer's forward pass."""

    path: Path
    pre: Callable[[Tensor], Tensor]
    """x [n, d] -> what the threshold is compared with [n, m], affine in x."""
    code: Callable[[Tensor], Tensor]
    """`pre` [n, m] -> codes [n, m]."""
    decode: Callable[[Tensor], Tensor]
    cut: Tensor | None = None
    """[m]: threshold, where there is one."""


class Weights(NamedTuple):
    """Random ones: encoder [m, d], decoder [m, d] with rows of different norms."""

    E: Tensor
    D: Tensor
    b: Tensor
    c: Tensor
    cut: Tensor


def weights(d: int, m: int, seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    E, D = (torch.randn(m, d, generator=generator) / math.sqrt(d) for _ in range(2))
    b, c = 0.1 * torch.randn(m, generator=generator), 0.3 * torch.randn(d, generator=generator)
    return Weights(E, D, b, c, 0.2 + torch.rand(m, generator=generator))


def relu(pre: Tensor) -> Tensor:
    return pre.clamp_min(0)


def jump(cut: Tensor | float) -> Callable[[Tensor], Tensor]:
    return lambda pre: torch.where((pre > cut) & (pre > 0), pre, 0.0)


def gated(w: Weights) -> Callable[[Tensor], Tensor]:
    """A gate with the bias b, which `pre` contains; a magnitude with the factors exp(cut) and the bias b reversed."""
    return lambda pre: (pre > 0) * relu((pre - w.b) * w.cut.exp() + w.b.flip(0))


def top(pre: Tensor) -> Tensor:
    kept = torch.zeros_like(pre, dtype=torch.bool)
    for row, values in zip(kept, pre, strict=True):
        row[values.argsort(descending=True)[:K]] = True
    return torch.where(kept, pre, 0).clamp_min(0)


def put(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(content))
    elif path.suffix == ".npz":
        np.savez(path, **{name: value.numpy() for name, value in content.items()})
    elif path.suffix == ".pt":
        torch.save(content, path)
    else:
        save_file({name: value.clone().contiguous() for name, value in content.items()}, path)
    return path


# ---- SAELens ----------------------------------------------------------------------------------------

META = {"model_name": "tiny", "hook_name": "blocks.1.hook_resid_post", "sae_lens_version": "6.1.0", "context_size": 16}
ACTIVATIONS = {"standard": lambda w: relu, "topk": lambda w: top, "jumprelu": lambda w: jump(w.cut)}


def saelens(
    root: Path, w: Weights, architecture: str, flat: bool = False, extra: dict[str, Tensor] | None = None, **fields: Any
) -> Foreign:
    """A folder of version 6, or with `flat` of version 5; threshold, if any, for each latent."""
    config = {"architecture": architecture, "d_in": w.c.numel(), "d_sae": w.b.numel(), "dtype": "float32"}
    meta = {"hook_point": META["hook_name"], "model_name": "tiny"} if flat else {"metadata": META}
    config |= {"k": K} if architecture == "topk" and not flat else {}
    tensors = {"W_enc": w.E.T, "W_dec": w.D, "b_enc": w.b, "b_dec": w.c}
    tensors |= {"threshold": w.cut} if architecture == "jumprelu" else {}
    put(root / "cfg.json", config | meta | fields)
    put(root / "sae_weights.safetensors", tensors | (extra or {}))
    shift = w.c if fields.get("apply_b_dec_to_input", True) else 0
    code = ACTIVATIONS.get(architecture, lambda w: relu)(w)
    cut = w.cut if architecture == "jumprelu" else None
    return Foreign(root, lambda x: (x - shift) @ w.E.T + w.b, code, lambda z: z @ w.D + w.c, cut)


def saelens_gated(root: Path, w: Weights) -> Foreign:
    found = saelens(root, w, "gated", extra={"b_gate": w.b, "r_mag": w.cut, "b_mag": w.b.flip(0)})
    return found._replace(code=gated(w))


def saelens_scalar(root: Path, w: Weights) -> Foreign:
    found = saelens(root, w, "jumprelu", extra={"threshold": torch.tensor(0.5)}, apply_b_dec_to_input=False)
    return found._replace(code=jump(0.5), cut=torch.full_like(w.b, 0.5))


def saelens_rescaled(root: Path, w: Weights) -> Foreign:
    found, norms = saelens(root, w, "topk", rescale_acts_by_decoder_norm=True), w.D.norm(dim=1)
    return found._replace(pre=lambda x: found.pre(x) * norms, decode=lambda z: found.decode(z / norms))


def saelens_v5_topk(root: Path, w: Weights) -> Foreign:
    settings = {"activation_fn_str": "topk", "activation_fn_kwargs": {"k": K}, "normalize_activations": False}
    found = saelens(root, w, "standard", flat=True, **settings)
    return found._replace(code=top)


def saelens_v5_finetuned(root: Path, w: Weights) -> Foreign:
    found = saelens(
        root, w, "standard", flat=True, extra={"scaling_factor": w.cut}, finetuning_scaling_factor=True, hook_layer=1
    )
    return found._replace(decode=lambda z: (z * w.cut) @ w.D + w.c)


def saelens_log_threshold(root: Path, w: Weights) -> Foreign:
    found = saelens(root, w, "jumprelu")
    tensors = {"W_enc": w.E.T, "W_dec": w.D, "b_enc": w.b, "b_dec": w.c, "log_threshold": w.cut.log()}
    put(root / "sae_weights.safetensors", tensors)
    return found


def saelens_checkpoint(root: Path, w: Weights, rescaled: bool = True) -> Foreign:
    """Of Matryoshka's training, on activations times 2.5; the threshold is for codes times the decoder's norms."""
    extra, m = {"topk_threshold": torch.tensor(0.4, dtype=torch.float64)}, w.b.numel()
    fields = {"rescale_acts_by_decoder_norm": rescaled, "normalize_activations": "expected_average_only_in"}
    fields |= {"matryoshka_widths": [m // 4, m], "k": 4.5, "aux_loss_coefficient": 1.0}
    saelens(root, w, "matryoshka_batchtopk", extra=extra, **fields)
    put(root / "activation_scaler.json", {"scaling_factor": 2.5, "has_whitening": False})
    norms = w.D.norm(dim=1) / 2.5 if rescaled else torch.ones(m)  # of the decoder that gives the activations themselves
    cut = 0.4 / 2.5 if rescaled else 0.4
    return Foreign(
        root,
        lambda x: ((2.5 * x - w.c) @ w.E.T + w.b) * norms,
        jump(cut),
        lambda z: ((z / norms) @ w.D + w.c) / 2.5,
        torch.full((m,), cut),
    )


def saelens_whitened(root: Path, w: Weights, subtracts: bool = True) -> Foreign:
    """A checkpoint of training on (x - mean) matrix."""
    d = w.c.numel()
    fields = {"normalize_activations": "covariance_whitening", "apply_b_dec_to_input": subtracts}
    found = saelens(root, w, "jumprelu", **fields)
    mean, matrix = w.D[0], torch.eye(d).to(w.E) + w.E[:d] / 5
    inverse = torch.linalg.inv(matrix)
    put(root / "activation_whitening.safetensors", {"mean": mean, "matrix": matrix, "inverse_matrix": inverse})
    put(root / "activation_scaler.json", {"scaling_factor": None, "has_whitening": True})
    return found._replace(
        pre=lambda x: found.pre((x - mean) @ matrix), decode=lambda z: found.decode(z) @ inverse + mean
    )


# ---- dictionary_learning ----------------------------------------------------------------------------


def dictionary_learning(root: Path, w: Weights, name: str, state: dict[str, Any], **fields: Any) -> Path:
    trainer = {"trainer_class": "X", "dict_class": name, "activation_dim": w.c.numel(), "dict_size": w.b.numel()}
    trainer |= {"layer": 1, "lm_name": "tiny", "submodule_name": "resid_post_layer_1", "k": K} | fields
    put(root / "ae.pt", state)
    put(root / "config.json", {"trainer": trainer, "buffer": {"ctx_len": 16, "io": "out"}})
    return root


def linear(w: Weights) -> dict[str, Tensor]:
    return {"encoder.weight": w.E, "encoder.bias": w.b, "decoder.weight": w.D.T.contiguous()}


def counts(cut: float) -> dict[str, Tensor]:
    return {"k": torch.tensor(K, dtype=torch.int), "threshold": torch.tensor(cut)}


def dl_standard(root: Path, w: Weights) -> Foreign:
    """Its loader gives the decoder unit norms."""
    path, norms = dictionary_learning(root, w, "AutoEncoder", linear(w) | {"bias": w.c}, k=None), w.D.norm(dim=1)
    return Foreign(path, lambda x: ((x - w.c) @ w.E.T + w.b) * norms, relu, lambda z: (z / norms) @ w.D + w.c)


def dl_new(root: Path, w: Weights) -> Foreign:
    path = dictionary_learning(root, w, "AutoEncoderNew", linear(w) | {"decoder.bias": w.c})
    return Foreign(path, lambda x: x @ w.E.T + w.b, relu, lambda z: z @ w.D + w.c)


def dl_gated(root: Path, w: Weights) -> Foreign:
    state = {"encoder.weight": w.E, "decoder.weight": w.D.T.contiguous(), "decoder_bias": w.c, "r_mag": w.cut}
    path = dictionary_learning(root, w, "GatedAutoEncoder", state | {"gate_bias": w.b, "mag_bias": w.b.flip(0)})
    return Foreign(path, lambda x: (x - w.c) @ w.E.T + w.b, gated(w), lambda z: z @ w.D + w.c)


def dl_jumprelu(root: Path, w: Weights) -> Foreign:
    state = {"W_enc": w.E.T.contiguous(), "b_enc": w.b, "W_dec": w.D, "b_dec": w.c, "threshold": w.cut}
    path = dictionary_learning(root, w, "JumpReluAutoEncoder", state)
    return Foreign(path, lambda x: x @ w.E.T + w.b, jump(w.cut), lambda z: z @ w.D + w.c, w.cut)


def dl_topk(root: Path, w: Weights) -> Foreign:
    path = dictionary_learning(root, w, "AutoEncoderTopK", linear(w) | {"b_dec": w.c} | counts(0.9))
    return Foreign(path, lambda x: (x - w.c) @ w.E.T + w.b, top, lambda z: z @ w.D + w.c)


def dl_batchtopk(root: Path, w: Weights, cut: float = 0.6) -> Foreign:
    path = dictionary_learning(root, w, "BatchTopKSAE", linear(w) | {"b_dec": w.c} | counts(cut))
    cuts = torch.full_like(w.b, cut)
    return Foreign(path, lambda x: (x - w.c) @ w.E.T + w.b, jump(cut), lambda z: z @ w.D + w.c, cuts)


def dl_interrupted(root: Path, w: Weights) -> Foreign:
    """Trained on activations divided by 3; the run did not get to the step that multiplies biases and threshold."""
    state = {
        "step": 9,
        "ae": linear(w) | {"b_dec": w.c} | counts(0.2),
        "optimizer": {},
        "config": {},
        "norm_factor": 3.0,
    }
    path = dictionary_learning(root, w, "BatchTopKSAE", state)
    cuts = torch.full_like(w.b, 0.6)
    return Foreign(path, lambda x: 3 * ((x / 3 - w.c) @ w.E.T + w.b), jump(0.6), lambda z: z @ w.D + 3 * w.c, cuts)


def dl_matryoshka(root: Path, w: Weights) -> Foreign:
    m = w.b.numel()
    sizes = [m // 4, m - m // 4]
    state = {"W_enc": w.E.T.contiguous(), "b_enc": w.b, "W_dec": w.D, "b_dec": w.c} | counts(0.6)
    state |= {"group_sizes": torch.tensor(sizes)}
    path = dictionary_learning(root, w, "MatryoshkaBatchTopKSAE", state, group_sizes=sizes)
    cuts = torch.full_like(w.b, 0.6)
    return Foreign(path, lambda x: (x - w.c) @ w.E.T + w.b, jump(0.6), lambda z: z @ w.D + w.c, cuts)


# ---- sparsify, Gemma Scope, Llama Scope, Qwen-Scope -------------------------------------------------


def sparsify(root: Path, w: Weights, activation: str = "topk", **fields: Any) -> Foreign:
    put(root / "config.json", {"model": "tiny", "dataset": "text", "ctx_len": 16, "sae": {}})
    config = {"activation": activation, "expansion_factor": 32, "normalize_decoder": True, "k": K, "multi_topk": False}
    config |= {"num_latents": w.b.numel(), "d_in": w.c.numel(), "skip_connection": False, "transcode": False}
    put(root / "layers.1" / "cfg.json", config | fields)
    tensors = {"encoder.weight": w.E, "encoder.bias": w.b, "W_dec": w.D, "b_dec": w.c}
    put(root / "layers.1" / "sae.safetensors", tensors)

    def groups(pre: Tensor) -> Tensor:
        parts = [torch.where(part == part.amax(1, keepdim=True), relu(part), 0) for part in pre.chunk(K, dim=1)]
        return torch.cat(parts, dim=1)

    code = top if activation == "topk" else groups
    return Foreign(root / "layers.1", lambda x: (x - w.c) @ w.E.T + w.b, code, lambda z: z @ w.D + w.c)


def gemma_scope(root: Path, w: Weights) -> Foreign:
    path = root / "gemma-scope-2b-pt-res" / "layer_1" / "width_16k" / "average_l0_71"
    put(path / "params.npz", {"W_enc": w.E.T, "b_enc": w.b, "W_dec": w.D, "b_dec": w.c, "threshold": w.cut})
    return Foreign(path, lambda x: x @ w.E.T + w.b, jump(w.cut), lambda z: z @ w.D + w.c, w.cut)


def gemma_scope_2(root: Path, w: Weights, **fields: Any) -> Foreign:
    path = root / "resid_post_all" / "layer_1_width_16k_l0_small"
    tensors = {"w_enc": w.E.T, "b_enc": w.b, "w_dec": w.D, "b_dec": w.c, "threshold": w.cut}
    hook = {"hf_hook_point_in": "model.layers.1.output", "hf_hook_point_out": "model.layers.1.output"}
    config = {"architecture": "jump_relu", "model_name": "gemma-v3-1b-pt", "l0": 20, "type": "sae"} | hook
    put(path / "config.json", config | {"width": w.b.numel(), "affine_connection": False} | fields)
    put(path / "params.safetensors", tensors)
    return Foreign(path, lambda x: x @ w.E.T + w.b, jump(w.cut), lambda z: z @ w.D + w.c, w.cut)


def llama_scope(root: Path, w: Weights, norm: float = 3.0, **fields: Any) -> Foreign:
    """The published threshold is in the units of the activations, everything else in those of norm sqrt(d)."""
    path, d, m = root / "Llama3_1-8B-Base-L1R-8x", w.c.numel(), w.b.numel()
    unit = w.D / w.D.norm(dim=1, keepdim=True)
    config = {
        "d_model": d,
        "d_sae": m,
        "act_fn": "jumprelu",
        "jump_relu_threshold": 0.25,
        "norm_activation": "dataset-wise",
    }
    config |= {"dataset_average_activation_norm": {"in": norm, "out": norm}, "top_k": K, "use_decoder_bias": True}
    config |= {"sparsity_include_decoder_norm": True, "apply_decoder_bias_to_pre_encoder": False}
    config |= {"hook_point_in": "blocks.1.hook_resid_post", "hook_point_out": "blocks.1.hook_resid_post"}
    put(path / "hyperparams.json", config | fields)
    tensors = {"encoder.weight": w.E, "encoder.bias": w.b, "decoder.weight": unit.T, "decoder.bias": w.c}
    put(path / "checkpoints" / "final.safetensors", tensors)
    scale = math.sqrt(d) / norm
    cut = 0.25 * scale
    decode = lambda z: (z @ unit + w.c) / scale  # noqa: E731
    return Foreign(path, lambda x: (x * scale) @ w.E.T + w.b, jump(cut), decode, torch.full((m,), cut))


def qwen_scope(root: Path, w: Weights) -> Foreign:
    path = root / f"SAE-Res-Qwen3-1.7B-Base-W32K-L0_{K}" / "layer1.sae.pt"
    put(path, {"W_enc": w.E, "W_dec": w.D.T.contiguous(), "b_enc": w.b, "b_dec": w.c})
    return Foreign(path, lambda x: x @ w.E.T + w.b, top, lambda z: z @ w.D + w.c)


FOREIGN: dict[str, Callable[[Path, Weights], Foreign]] = {
    "saelens standard": lambda root, w: saelens(root, w, "standard"),
    "saelens standard, no subtraction": lambda root, w: saelens(root, w, "standard", apply_b_dec_to_input=False),
    "saelens gated": saelens_gated,
    "saelens jumprelu": lambda root, w: saelens(root, w, "jumprelu"),
    "saelens jumprelu, one threshold": saelens_scalar,
    "saelens jumprelu, log threshold": saelens_log_threshold,
    "saelens topk": lambda root, w: saelens(root, w, "topk"),
    "saelens topk, rescaled": saelens_rescaled,
    "saelens hook_z": lambda root, w: saelens(root, w, "standard", reshape_activations="hook_z"),
    "saelens v5 standard": lambda root, w: saelens(root, w, "standard", flat=True),
    "saelens v5 jumprelu": lambda root, w: saelens(root, w, "jumprelu", flat=True, apply_b_dec_to_input=False),
    "saelens v5 topk": saelens_v5_topk,
    "saelens v5 finetuned": saelens_v5_finetuned,
    "saelens checkpoint": saelens_checkpoint,
    "saelens checkpoint, whitened": saelens_whitened,
    "saelens checkpoint, whitened, no subtraction": lambda root, w: saelens_whitened(root, w, subtracts=False),
    "saelens checkpoint, not rescaled": lambda root, w: saelens_checkpoint(root, w, rescaled=False),
    "dictionary_learning standard": dl_standard,
    "dictionary_learning standard, April": dl_new,
    "dictionary_learning gated": dl_gated,
    "dictionary_learning jumprelu": dl_jumprelu,
    "dictionary_learning topk": dl_topk,
    "dictionary_learning batchtopk": dl_batchtopk,
    "dictionary_learning batchtopk, no threshold yet": lambda root, w: dl_batchtopk(root, w, -1.0)._replace(cut=None),
    "dictionary_learning interrupted": dl_interrupted,
    "dictionary_learning matryoshka": dl_matryoshka,
    "sparsify topk": sparsify,
    "sparsify groupmax": lambda root, w: sparsify(root, w, "groupmax"),
    "gemma_scope": gemma_scope,
    "gemma_scope_2": gemma_scope_2,
    "llama_scope": llama_scope,
    "qwen_scope": qwen_scope,
}
"""One of each kind, by format and architecture."""
