"""Models of the Llama family, in torch alone: their modules have transformers' names and give the same values.

transformers takes seconds to import what it needs to run any model, and eight kernels for each norm.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from sampled_sae import kernels
from sampled_sae.utils.third_party import package, quiet


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """What is used of a config.json, with the names and the defaults of transformers."""

    vocab_size: int = 32_000
    hidden_size: int = 4096
    intermediate_size: int = 11_008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    use_cache: bool = False

    @property
    def dim(self) -> int:
        """Width of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


def read_shape(folder: Path) -> LlamaShape | None:
    """The shape of the model in a folder that transformers saved; None if it is not a plain Llama."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        ropes: list[dict[str, Any]] = [content.get(name) or {} for name in ("rope_parameters", "rope_scaling")]
        plain = (
            content.get("model_type") == "llama"
            and content.get("architectures", ["LlamaForCausalLM"]) == ["LlamaForCausalLM"]
            and content.get("hidden_act", "silu") == "silu"
            and isinstance(content.get("num_hidden_layers", 1), int)
            and all(rope.get("rope_type", rope.get("type", "default")) == "default" for rope in ropes)
            and not {"auto_map", "quantization_config"} & content.keys()
        )
        given = ropes[1] | ropes[0] | content
        known = {field.name for field in fields(LlamaShape)}
        return LlamaShape(**{key: given[key] for key in known & given.keys()}) if plain else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None  # transformers says what is wrong with it


def read_llama(folder: Path, shape: LlamaShape, dtype: torch.dtype) -> Llama | None:
    """The model in a folder, in memory; None if its weights are not just as its configuration says."""
    try:
        with torch.device("meta"):
            model = Llama(shape, folder)
        wanted = {name: weight.shape for name, weight in model.state_dict().items()}
        found: dict[str, Tensor] = {}
        for file in _weight_files(folder):
            found |= load_file(file)
    except Exception:  # a damaged configuration or file can fail anywhere; transformers says what is wrong
        return None
    if shape.tie_word_embeddings:
        found["lm_head.weight"] = found.get("model.embed_tokens.weight", torch.empty(0))
    if any(name not in found or found[name].shape != size for name, size in wanted.items()):
        return None
    model.load_state_dict({name: found[name].to(dtype) for name in wanted}, assign=True)
    if shape.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def _weight_files(folder: Path) -> list[Path]:
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    parts = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    return [folder / name for name in sorted(set(parts.values()))]


def _fused(x: Tensor) -> bool:
    """Whether the kernels of `kernels.blocks` take these activations."""
    return x.is_cuda and not torch.compiler.is_compiling() and _kernels_run(x.device)


@cache
def _kernels_run(device: torch.device) -> bool:
    return not kernels.obstacle(device, torch.float32)


class Linear(nn.Linear):
    """Without random weights: for those, torch imports its compiler."""

    def reset_parameters(self) -> None:
        return


class Embedding(nn.Embedding):
    """The same."""

    def reset_parameters(self) -> None:
        return


class RMSNorm(nn.Module):
    """x [..., d] over its root mean square, times a weight."""

    def __init__(self, d: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(d)), eps

    def forward(self, x: Tensor) -> Tensor:
        if _fused(x):
            from sampled_sae.kernels.blocks import rms_norm

            return rms_norm(x, self.weight, self.eps)
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Attention(nn.Module):
    """Causal attention with rotary positions; several heads may share their keys and values."""

    def __init__(self, shape: LlamaShape):
        super().__init__()
        d, bias = shape.hidden_size, shape.attention_bias
        heads, shared = shape.num_attention_heads, shape.num_key_value_heads or shape.num_attention_heads
        self.dim, self.groups = shape.dim, heads // shared
        self.q_proj, self.o_proj = Linear(d, heads * self.dim, bias), Linear(heads * self.dim, d, bias)
        self.k_proj, self.v_proj = Linear(d, shared * self.dim, bias), Linear(d, shared * self.dim, bias)

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n, length, _ = hidden_states.shape
        q, k, v = (
            part(hidden_states).view(n, length, -1, self.dim) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k, v = rotated(q, cos, sin).transpose(1, 2), rotated(k, cos, sin).transpose(1, 2), v.transpose(1, 2)
        if not q.is_cuda and self.groups > 1:  # elsewhere the fast attention has one head of values for each of queries
            k, v = k.repeat_interleave(self.groups, 1), v.repeat_interleave(self.groups, 1)
        out = scaled_dot_product_attention(q, k, v, is_causal=length > 1, enable_gqa=k.shape[1] < q.shape[1])
        return self.o_proj(out.transpose(1, 2).reshape(n, length, -1))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [n, L, heads, dim] turned by the angles of its positions, see `kernels.blocks.rotate`."""
    if _fused(x):
        from sampled_sae.kernels.blocks import rotate

        return rotate(x, cos, sin)
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def angles(length: int, dim: int, theta: float, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine [L, dim] of the angles by which positions turn the pairs of a head's entries."""
    inverse = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
    turns = torch.arange(length, device=device).float()[:, None] * inverse.to(device)
    both = torch.cat((turns, turns), dim=-1)
    return both.cos().to(dtype), both.sin().to(dtype)


class MLP(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, shape: LlamaShape):
        super().__init__()
        d, inner, bias = shape.hidden_size, shape.intermediate_size, shape.mlp_bias
        self.gate_proj, self.up_proj = Linear(d, inner, bias), Linear(d, inner, bias)
        self.down_proj = Linear(inner, d, bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if _fused(x):
            from sampled_sae.kernels.blocks import gated

            return self.down_proj(gated(gate, up))
        return self.down_proj(silu(gate) * up)


class Block(nn.Module):
    """Attention and feed-forward layer, each added to the residual stream [n, L, d]."""

    def __init__(self, shape: LlamaShape):
        super().__init__()
        self.self_attn, self.mlp = Attention(shape), MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = hidden_states + self.self_attn(self.input_layernorm(hidden_states), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Stack(nn.Module):
    """Token ids [n, L] -> the residual stream after all blocks and the last norm [n, L, d]."""

    def __init__(self, shape: LlamaShape):
        super().__init__()
        self.embed_tokens = Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.dim, self.theta = shape.dim, shape.rope_theta

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        cos, sin = angles(input_ids.shape[1], self.dim, self.theta, x.device, x.dtype)
        with torch.cuda.device_of(x):  # kernels are launched on the current device
            for block in self.layers:
                x = block(x, cos, sin)
            return self.norm(x)


class Output(NamedTuple):
    """What a causal language model gives."""

    logits: Tensor
    """[n, L, vocabulary]."""


class Llama(nn.Module):
    """A causal language model; `config` and the methods are those that transformers' models have."""

    def __init__(self, shape: LlamaShape, folder: Path):
        super().__init__()
        self.config, self.folder = shape, folder
        self.model = Stack(shape)
        self.lm_head = Linear(shape.hidden_size, shape.vocab_size, bias=False)
        self._twin: list[Any] = []  # in a list, or else it would be one of the submodules

    def forward(self, input_ids: Tensor) -> Output:
        return Output(self.lm_head(self.model(input_ids)))

    def get_decoder(self) -> nn.Module:
        return self.model

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def generate(self, tokens: Tensor, **options: Any) -> Tensor:
        """transformers' `generate`, by its own model, which sees the same hooks."""
        if not self._twin:
            with quiet():
                kind = package("transformers").AutoModelForCausalLM
                twin = kind.from_pretrained(self.folder, dtype=self.lm_head.weight.dtype)
            twin = twin.to(self.lm_head.weight.device).eval().requires_grad_(False)
            own = dict(self.named_modules())
            for name, module in twin.named_modules():
                for kind in HOOKS if name in own else ():
                    setattr(module, kind, getattr(own[name], kind))
            self._twin.append(twin)
        return self._twin[0].generate(tokens, **options)


HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
"""Where torch keeps the hooks of a module."""
