"""A small model that is made to know first letters, and SAEs of it whose absorption is known."""

from functools import cache
from string import ascii_lowercase

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sampled_sae.evals.absorption.evaluate import evaluate_absorption_many
from sampled_sae.evals.absorption.schema import AbsorptionConfig
from sampled_sae.evals.absorption.words import LETTERS
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE

GROUPS = "abcdefghijkl"
WIDTH = 26 + len(GROUPS)
QUICK = AbsorptionConfig(lines=2, probe_epochs=20, probe_batch=16, lr=0.05, f1_jump=0.2, prompts_at_once=128)
ABSORBED, GROUP = LETTERS.index("s"), 0


@cache
def words_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Words of two letters, with and without a space, are one token each; so are single letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(first, second) for first in LETTERS for second in GROUPS]
    spaced = [("Ġ", f"{first}{second}") for first, second in pairs]
    tokens = ["<|endoftext|>", *alphabet, *("".join(pair) for pair in pairs + spaced)]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs + spaced))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=tokens[0], bos_token=tokens[0])


def make_speller() -> LanguageModel:
    """Embeddings hold 3 in the place of the first letter and 3 in that of the second; blocks add next to nothing."""
    tokenizer = words_tokenizer()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=1,
        max_position_embeddings=256,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.02)
        for number in range(len(tokenizer)):
            text = tokenizer.decode([number]).strip().lower()
            if text and all(char in ascii_lowercase for char in text):
                model.model.embed_tokens.weight[number, LETTERS.index(text[0])] += 3
                if text[1:] and text[1] in GROUPS:
                    model.model.embed_tokens.weight[number, 26 + GROUPS.index(text[1])] += 3
    return LanguageModel(model, tokenizer, "speller")


@cache
def speller() -> LanguageModel:
    return make_speller()


@torch.no_grad()
def letter_sae(absorbing: bool = True) -> SAE:
    """A latent for each letter and each group. If absorbing, latent 0 takes words with S in the first group: the
    latents of S and of that group are silent there."""
    sae = SAE(InferenceConfig(WIDTH, 1 + WIDTH))
    sae.W_enc.T[1:] = sae.W_dec[1:] = torch.eye(WIDTH)
    sae.threshold.fill_(1.0)
    both = torch.zeros(WIDTH)
    both[[ABSORBED, 26 + GROUP]] = 1.0
    sae.W_dec[0] = both / both.norm()
    if absorbing:
        sae.W_enc.T[0], sae.b_enc[0] = both * 2, -7.5
        sae.W_enc.T[1 + ABSORBED, 26 + GROUP] = -1.0
        sae.W_enc.T[1 + 26 + GROUP, ABSORBED] = -1.0
    return sae


@cache
def results() -> list:
    return list(evaluate_absorption_many([letter_sae(), letter_sae(absorbing=False)], speller(), 1, QUICK))
