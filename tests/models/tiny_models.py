"""Tiny random language models of the common families, saved as transformers saves them, and one as a GGUF file; what
tests of loading share."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sampled_sae.hooks import find_blocks
from sampled_sae.models.load import load_model
from sampled_sae.utils.errors import UserError

LAYERS, WIDTH, HEADS, CONTEXT = 3, 16, 2, 64
MERGES = [("t", "h"), ("th", "e")]
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = ["<|endoftext|>", *LETTERS, "th", "the"]
IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SHAPE = {
    "vocab_size": len(WORDS),
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": CONTEXT,
    **IDS,
}
GROUPED = SHAPE | {"num_key_value_heads": 1}
FAMILIES = {
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SHAPE),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=len(WORDS), n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=CONTEXT, **IDS
    ),
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "qwen2": lambda: transformers.Qwen2Config(**GROUPED),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED, head_dim=8),
    "gemma2": lambda: transformers.Gemma2Config(**GROUPED, head_dim=8, sliding_window=4),
    "gemma3": lambda: transformers.Gemma3TextConfig(**GROUPED, head_dim=8, sliding_window=4),
}
PATHS = {"gpt_neox": "gpt_neox.layers", "gpt2": "transformer.h"}


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(WORDS)}, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=WORDS[0], bos_token=WORDS[0])


def make_model(family: str, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    # Only the plain attention caps its scores in every version of transformers.
    attention = "eager" if family == "gemma2" else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family](), attn_implementation=attention).eval()
    # As they are made, blocks hardly change the residual stream.
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return model


def truth(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The residual stream after each block and the logits, by transformers' own means."""
    last = []
    blocks = find_blocks(model, "x")[1]
    handle = blocks[-1].register_forward_hook(lambda *seen: last.append(seen[2]))
    with torch.no_grad():
        out = model(tokens, output_hidden_states=True, use_cache=False)
    handle.remove()
    return [*out.hidden_states[1:-1], last[0][0] if isinstance(last[0], tuple) else last[0]], out.logits


def save(model: torch.nn.Module, folder: Path) -> Path:
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def save_gguf(model: torch.nn.Module, path: Path, bos: bool | None = None) -> Path:
    """A tiny Llama in llama.cpp's names, 32 bits per weight."""
    from gguf import GGUFWriter  # only here: a GPU machine may lack it

    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(24)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3] + [1] * (len(WORDS) - 1))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    if bos is not None:
        writer.add_add_bos_token(bos)
    for name, weight in model.state_dict().items():
        writer.add_tensor(gguf_name(name), gguf_layout(name, weight.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    renames = {
        "model.layers": "blk",
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for theirs, ours in renames.items():
        name = name.replace(theirs, ours)
    return name


def gguf_layout(name: str, weight: np.ndarray) -> np.ndarray:
    """llama.cpp keeps a rotary pair side by side, transformers half a head apart."""
    heads = {"q_proj": HEADS, "k_proj": 1}.get(name.split(".")[-2])
    if heads is None:
        return weight
    pairs = weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2)
    return np.ascontiguousarray(pairs.reshape(weight.shape))


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit, but with the oldest torch up to rounding: its grouped attention, which transformers uses for Llama
    models, has other bits than the same attention with repeated heads."""
    q, k = (torch.randn(2, heads, 12, 4, generator=torch.Generator().manual_seed(0)) for heads in (4, 2))
    attention = torch.nn.functional.scaled_dot_product_attention
    repeated = k.repeat_interleave(2, 1)
    grouped = attention(q, k, k, is_causal=True, enable_gqa=True)
    exact = torch.equal(grouped, attention(q, repeated, repeated, is_causal=True))
    return torch.equal(found, expected) if exact else torch.allclose(found, expected, atol=1e-4)


def refused(name: object, reason: str, **options: object) -> None:
    """One line that names the model and says what is wrong; `.*` in the reason stands for anything."""
    with pytest.raises(UserError) as caught:
        load_model(name, **({"device": "cpu"} | options))
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    assert message.startswith(f"model = {str(name)!r}: ")
    for part in reason.split(".*"):
        assert part in message
