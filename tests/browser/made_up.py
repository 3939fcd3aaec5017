"""A page of made-up latents over a text of hostile words, without a model."""

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models

from sampled_sae.browser.collect import Browsed, Other, OutputTokens, neighbors
from sampled_sae.browser.files import LATENTS_A_CHUNK, MEANINGS, Page
from sampled_sae.browser.latents import (
    coactivating,
    counterparts,
    histogram,
    pick_windows,
    token_latents,
    top_tokens,
)
from sampled_sae.browser.write import write_browser
from sampled_sae.evals.reading import Firings
from sampled_sae.evals.results import Density, Explanation, UniqueLatent
from sampled_sae.method.codes import SparseCodes

HOSTILE = [
    "<script>alert(1)</script>",
    "</script>",
    "\"'`&quot;",
    "\u202eright",
    "🦀",
    "a\nb",
    "\u2028",
    "عربية",
    "-->",
]
WORDS = [*HOSTILE, *(f" w{n}" for n in range(40)), "__proto__", "The", "the"]
M, N, L = 2 * LATENTS_A_CHUNK + 40, 60, 24
SILENT = 7
"""A latent that never fires."""
ALERT = "<img src=x onerror=alert(1)>\u202e\n</script> chemistry"
"""A hostile explanation, of latent 3."""


def hostile_tokenizer() -> Any:
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="the"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)


def made_up_firings(m: int, n: int, length: int, k: float = 4.0, seed: int = 0) -> Firings:
    """Random firings, about k a token, of latents of very different densities; one is silent."""
    generator = torch.Generator().manual_seed(seed)
    rate = torch.rand(m, generator=generator).pow(3)
    rate[torch.tensor([3, 5, 300]) % m] = 1.0  # those of which more is known are not silent
    rate *= k / rate.sum()
    rate[SILENT % m] = 0
    fires = torch.rand(n * length, m, generator=generator) < rate
    place, latent = fires.nonzero(as_tuple=True)
    value = torch.rand(len(place), generator=generator).pow(2) * 9 + 0.5
    return Firings.sort(SparseCodes(place, latent, value, n * length, m), (n, length))


def made_up_page(words: int, m: int = M, n: int = N, length: int = L, other: bool = True) -> Page:
    """A page whose tokens are numbers below `words`."""
    generator = torch.Generator().manual_seed(1)
    contexts = torch.randint(words, (n, length), generator=generator)
    firings = made_up_firings(m, n, length)
    tokens = top_tokens(firings, contexts, 4)
    decoder, second = torch.randn(2, m, 12, generator=generator)
    effect = torch.randn(m, words, generator=generator)
    up, down = effect.topk(5, dim=1), effect.topk(5, dim=1, largest=False)
    near = neighbors(decoder, second, 5)
    browsed = Browsed(
        contexts,
        n * length,
        0,
        100.0,
        firings,
        pick_windows(firings, 6, 5, 2),
        histogram(firings, 16),
        tokens,
        neighbors(decoder, None, 5),
        coactivating(firings, n * length, 5),
        token_latents(firings, 6, 4),
        OutputTokens(up.indices, up.values, down.indices, down.values),
        Other(near, tokens, counterparts(firings, firings, near.latent[:, 0], 3)) if other else None,
        ["A note."],
    )
    about = {
        "title": "<b>made & up</b>\u202e",
        "summary": "nothing real",
        "facts": [["Model", "<i>none</i>"]],
        "notes": ["A note."],
        "read": n * length,
        "densityTokens": n * length,
        "bands": 5,
        "meanings": MEANINGS,
        "other": "</script>other" if other else None,
    }
    meanings = {
        3: Explanation(ALERT, 0.75, {"detection": 0.75, "__proto__": 0.5}),
        300: Explanation("organic chemistry", 0.9, {}),
        5: Explanation("music", None, {}),
    }
    meanings = {latent: meaning for latent, meaning in meanings.items() if latent < m}
    unique = {300: UniqueLatent("</script>other", 0.21, 0.3, 0.12, 4, "<b>sea</b>", 0.35)} if m > 300 else {}
    density = Density(firings.fired, n * length)
    return Page(browsed, density, about, meanings, {4: Explanation("the sea", 0.5, {})}, unique)


def write_hostile(out: Path) -> Page:
    page = made_up_page(len(WORDS))
    write_browser(page, hostile_tokenizer(), out)
    return page
