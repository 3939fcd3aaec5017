"""Texts -> features: the mean over a text's tokens of the residual stream, and of each SAE's codes.

The model reads each text once for all SAEs; only means are kept. An SAE's means are sparse: a text of 128 tokens
activates a few thousand of 65,536 latents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from sampled_sae.data.contexts import HALVES, Tokenizer
from sampled_sae.evals.probing.schema import ProbingConfig
from sampled_sae.method.codes import SparseCodes
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError

TEXTS_AT_ONCE = 1024  # texts that are tokenized together
CHARACTERS_A_TOKEN = 64
"""Characters read of a text for each token that is used: enough unless tokens are ten times as long as usual."""


class Tokens(NamedTuple):
    """Token ids of some texts, padded at their ends, of about equal length."""

    first: int  # number of the first text; the others follow it
    ids: Tensor  # [t, L] long, with BOS if there is one
    lengths: Tensor  # [t] long: tokens of each text, without BOS and padding


def tokenize(texts: Sequence[str], tokenizer: Tokenizer, settings: ProbingConfig) -> list[list[int]]:
    """Texts -> their first tokens, without BOS; at least one each.

    A special token that is quoted in a text is read as its letters.
    """
    most = settings.tokens - settings.bos
    options = dict(add_special_tokens=False, split_special_tokens=True, padding=False, truncation=False)
    found: list[list[int]] = []
    for first in range(0, len(texts), TEXTS_AT_ONCE):
        part = [HALVES.sub("\N{REPLACEMENT CHARACTER}", text) for text in texts[first : first + TEXTS_AT_ONCE]]
        # verbose=False: no warnings about texts longer than the model's context.
        ids = tokenizer(part, **options, return_attention_mask=False, verbose=False)["input_ids"]
        found += [list(one[:most]) for one in ids]
    for text, one in zip(texts, found, strict=True):
        if not one:
            raise UserError(f"datasets: the text {text[:40]!r} gives no token; take it out")
    return found


def bos_token(tokenizer: Tokenizer, settings: ProbingConfig) -> list[int]:
    """Token ids before each text: one or none."""
    if not settings.bos:
        return []
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return [token]
    raise UserError("bos = True: the tokenizer has neither BOS nor EOS; must be False")


def batches(ids: list[list[int]], before: list[int], at_once: int) -> Iterator[Tokens]:
    """Token ids of texts, sorted by length -> batches of texts, each padded to its longest."""
    for first in range(0, len(ids), at_once):
        part = [[*before, *one] for one in ids[first : first + at_once]]
        longest = max(map(len, part))
        # Padding at the end affects no token before it and is in no mean: any id will do.
        padded = torch.tensor([one + [one[-1]] * (longest - len(one)) for one in part])
        yield Tokens(first, padded, torch.tensor([len(one) - len(before) for one in part]))


class MeanCodes:
    """Mean codes [N, d_sae] of N texts by one SAE, as sparse codes; texts are added in their order."""

    def __init__(self, sae: SAE, contrast: Tensor):
        """`contrast` [T, N]: weights of the texts in sums that are taken on the way, one per task."""
        self.contrast = contrast.to(sae.device, torch.float64)
        self.difference = torch.zeros(len(contrast), sae.d_sae, dtype=torch.float64, device=sae.device)
        """[T, d_sae]: the weighted sums over the texts so far."""
        self._parts: list[SparseCodes] = []

    def add(self, first: int, means: Tensor) -> None:
        """Mean codes [t, d_sae] of the texts from number `first` on."""
        self.difference += self.contrast[:, first : first + len(means)] @ means.double()
        codes = SparseCodes.from_dense(means)
        self._parts.append(codes._replace(token=codes.token.int(), latent=codes.latent.int()))

    @property
    def codes(self) -> SparseCodes:
        """The mean codes of all texts, as the codes of one token per text."""
        self._parts = [SparseCodes.cat(self._parts)]
        return self._parts[0]

    def columns(self, latents: Tensor) -> Tensor:
        """Latents [u], each once -> their means [N, u] float64."""
        return self.codes.columns(latents).double()

    def rows(self, texts: Tensor) -> Tensor:
        """Numbers of texts [n], each once -> the means [n, u] of the u latents that are not 0 in all of them."""
        codes = self.codes
        wanted = torch.zeros(codes.tokens, dtype=torch.bool, device=texts.device)
        wanted[texts] = True
        used = torch.zeros(codes.d_sae, dtype=torch.bool, device=texts.device)
        used[codes.latent[wanted[codes.token]]] = True
        return codes.columns(used.nonzero().squeeze(1), texts)


class Features(NamedTuple):
    """Input of the probes of one dataset."""

    residual: Tensor  # [N, d_in] float64: mean residual stream of each text
    codes: list[MeanCodes]  # mean codes of each text, for each SAE


def read(
    model: LanguageModel,
    layer: int,
    saes: Sequence[SAE],
    ids: list[list[int]],
    contrast: Tensor,
    settings: ProbingConfig,
    progress: Callable[[int], None],
) -> Features:
    """Token ids of N texts, sorted by length -> their features; `contrast` [T, N] as in `MeanCodes`.

    `progress` is called after each batch with its number of texts.
    """
    before = bos_token(model.tokenizer, settings)
    codes = [MeanCodes(sae, contrast) for sae in saes]
    residual: list[Tensor] = []
    for part in batches(ids, before, settings.contexts_at_once):
        stream = model.activations(part.ids, [layer])[layer][:, len(before) :]
        weights = _weights(part.lengths, stream.shape[1]).to(stream.device)
        residual.append((stream.double() * weights[..., None]).sum(1))
        for sae, means in zip(saes, codes, strict=True):
            means.add(part.first, _pool(sae, stream, weights, settings))
        progress(len(part.ids))
    found = torch.cat(residual)
    if not bool(found.isfinite().all()):
        raise UserError(
            f"layer = {layer}: {model.name} gives activations that are nan or infinite in {model.dtype}; "
            "load it in float32"
        )
    return Features(found, codes)


def _weights(lengths: Tensor, longest: int) -> Tensor:
    """[t] -> [t, longest]: 1 / length at a text's tokens, 0 after them."""
    inside = torch.arange(longest) < lengths[:, None]
    return inside.double() / lengths[:, None]


def _pool(sae: SAE, stream: Tensor, weights: Tensor, settings: ProbingConfig) -> Tensor:
    """Residual stream [t, L, d_in] and weights of its tokens [t, L] -> mean codes [t, d_sae]."""
    at_once = max(1, settings.tokens_at_once // stream.shape[1])
    means = []
    for x, weight in zip(stream.split(at_once), weights.split(at_once), strict=True):
        with matmul_precision("high" if settings.tf32 else "highest"):
            z = sae.encode(x)
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        with matmul_precision("highest"):
            means.append(torch.bmm(weight[:, None].to(z.device, z.dtype), z).squeeze(1))
    return torch.cat(means)


@contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """Whether float32 products on a GPU may round to TF32 (`high`) or not (`highest`)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
