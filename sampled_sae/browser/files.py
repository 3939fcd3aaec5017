"""Data files of the page: typed arrays as base64 and tokens as text, in scripts that the page loads from disk."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sampled_sae.browser.collect import Browsed, Other
from sampled_sae.browser.latents import NONE, inside_contexts
from sampled_sae.evals import get_evaluation
from sampled_sae.evals.reading import Firings, token_text
from sampled_sae.evals.results import Density, Explanation, UniqueLatent
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.measures import shown

# The page's function that takes what a file holds: fetch() may not read files, but scripts may be loaded.
RECEIVER = "sampledSae"
LATENTS_A_CHUNK = 256
TOKENS_A_FILE = 2**18  # tokens of the text in one file


def column(values: Tensor) -> dict[str, str]:
    """Numbers of any shape, flat, for the page: floats of 32 bits, whole numbers in as few bits as they need.

    Whole numbers are -1, which stands for none, or more; -1 becomes the largest number of the unsigned types.
    """
    array, kind = values.detach().cpu().contiguous().flatten().numpy(), "f4"
    if not values.is_floating_point():
        if array.size and int(array.min()) < -1:
            raise ValueError("integers below -1 cannot be stored in a column")
        largest = int(array.max()) if array.size else 0
        # The largest number of the unsigned types is kept for none.
        kind = next(kind for kind, end in (("u1", 2**8 - 1), ("u2", 2**16 - 1), ("i4", 2**31)) if largest < end)
    with np.errstate(over="ignore"):
        content = array.astype(f"<{kind}")
    return {"type": kind, "data": base64.b64encode(content.tobytes()).decode()}


def script(name: str, content: Any) -> str:
    """The text of a script file that hands `content` over under a name.

    All of it is ASCII, and nothing in it can end a script or begin a comment of HTML.
    """
    text = json.dumps([name, content], separators=(",", ":"), allow_nan=False)
    text = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return f"{RECEIVER}(...{text});\n"


@dataclass(frozen=True)
class Page:
    """All that the page of an SAE is made of."""

    browsed: Browsed
    density: Density
    about: dict[str, Any]  # about the page: title, facts, notes, the other SAE's name
    meanings: dict[int, Explanation] = field(default_factory=dict)
    other_meanings: dict[int, Explanation] = field(default_factory=dict)
    unique: dict[int, UniqueLatent] = field(default_factory=dict)
    folder: Path | None = None  # the SAE's; None for one that is not saved

    @property
    def chunks(self) -> int:
        return -(-self.browsed.firings.d_sae // LATENTS_A_CHUNK)


def data_files(page: Page, tokenizer: Any) -> Iterator[tuple[str, str]]:
    """The names and texts of all files, the index first. Tokens in them are numbers of the list of words."""
    browsed = page.browsed
    used = torch.cat([tokens.flatten() for tokens in _token_columns(browsed)]).unique()
    used = used[used != NONE]
    yield "index", script("index", index(page, used))
    yield "words", script("words", words_of(used.tolist(), tokenizer)._asdict())
    yield "explanations", script("explanations", explanations(page.meanings))
    yield (
        "samples",
        script("samples", {"latent": column(browsed.samples.latent), "value": column(browsed.samples.value)}),
    )
    contexts_a_file = text_file_size(browsed)
    for number, part in enumerate(browsed.contexts.split(contexts_a_file)):
        yield f"text-{number}", script(f"text-{number}", {"tokens": column(numbered(part, used))})
    for number in range(page.chunks):
        yield f"chunk-{number}", script(f"chunk-{number}", chunk(page, number, used))


def _token_columns(browsed: Browsed) -> list[Tensor]:
    """Everything that holds token ids."""
    found = [browsed.contexts, browsed.tokens.token]
    found += [browsed.output.promoted, browsed.output.suppressed] if browsed.output else []
    return found + ([browsed.other.tokens.token] if browsed.other and browsed.other.tokens else [])


def numbered(tokens: Tensor, used: Tensor) -> Tensor:
    """Token ids of any shape -> their numbers among those used [n], which are sorted; NONE stays."""
    return torch.where(tokens == NONE, NONE, torch.searchsorted(used, tokens.contiguous()))


def text_file_size(browsed: Browsed) -> int:
    """Contexts in one file of the text."""
    return max(1, TOKENS_A_FILE // browsed.firings.shape[1])


def index(page: Page, used: Tensor) -> dict[str, Any]:
    """What the table of all latents shows, sorts and searches, and what the page needs to know of the other files."""
    browsed, m = page.browsed, page.browsed.firings.d_sae
    columns = {
        "density": page.density.fired.double().div(page.density.tokens).float(),
        "fired": browsed.firings.fired,
        "maximum": browsed.firings.maximum,
        "near": browsed.near.nearest,
        "tokens": numbered(browsed.tokens.token, used),
    }
    score = ranking(page.meanings)
    if score is not None:
        columns["score"] = spread(score.values, m)
    if browsed.other is not None:
        columns["unique"] = 1 - browsed.other.near.nearest
    if page.unique:
        columns["listed"] = 1 - spread({latent: item.overall for latent, item in page.unique.items()}, m)
    return {
        "about": {**page.about, "score": None if score is None else score._asdict() | {"values": None}},
        "samples": list(browsed.samples.latent.shape),
        "latents": m,
        "tokensKept": browsed.tokens.token.shape[1],
        "bins": browsed.histogram.shape[1],
        "length": browsed.firings.shape[1],
        "contextsAFile": text_file_size(browsed),
        "latentsAChunk": LATENTS_A_CHUNK,
        "columns": {name: column(values) for name, values in columns.items()},
    }


class Ranking(NamedTuple):
    """The score of explanations that latents are sorted by."""

    head: str
    meaning: str
    values: dict[int, float]


def ranking(meanings: dict[int, Explanation]) -> Ranking | None:
    """Balanced detection minus its control; without a control, the best score there is; None without any."""
    gains = {latent: gain for latent, meaning in meanings.items() if (gain := meaning.gain) is not None}
    balanced = {
        latent: meaning.scores["balanced"] for latent, meaning in meanings.items() if "balanced" in meaning.scores
    }
    detection = {latent: meaning.score for latent, meaning in meanings.items() if meaning.score is not None}
    help_ = (
        "Balanced detection with its explanation minus the same with another latent's explanation: how much the "
        "explanation helps to predict where the latent fires. 0 is no help; guessing is 0.5 in both, so 0.5 is good. "
        "Both are measured on a few windows per latent."
    )
    each = (
        Ranking("Gain", help_, gains),
        Ranking("Balanced", MEANINGS["balanced"], balanced),
        Ranking("Detection", MEANINGS["detection"], detection),
    )
    return next((one for one in each if one.values), None)


def spread(values: dict[int, float], m: int) -> Tensor:
    """Numbers of some latents -> [m], nan for the others."""
    full = torch.full((m,), torch.nan)
    full[list(values)] = torch.tensor(list(values.values()))
    return full


def explanations(meanings: dict[int, Explanation]) -> dict[str, Any]:
    """The texts of those latents that have one."""
    latents = sorted(meanings)
    texts = [shown(meanings[latent].text) for latent in latents]
    return {"latent": column(torch.tensor(latents, dtype=torch.int64)), "text": texts}


def chunk(page: Page, number: int, used: Tensor) -> dict[str, Any]:
    """What the view of a single latent shows, for latents one after the other."""
    browsed, first = page.browsed, number * LATENTS_A_CHUNK
    rows = slice(first, min(first + LATENTS_A_CHUNK, browsed.firings.d_sae))
    columns = {
        "histogram": browsed.histogram[rows],
        "shares": browsed.tokens.share[rows],
        "near": browsed.near.latent[rows],
        "nearCosine": browsed.near.cosine[rows],
        "together": browsed.together.latent[rows],
        "togetherBy": browsed.together.correlation[rows],
        "togetherAt": browsed.together.tokens[rows],
        **_windows(browsed, rows),
    }
    if browsed.output is not None:
        out = browsed.output
        columns |= {"promoted": numbered(out.promoted[rows], used), "promotedBy": out.promoted_by[rows]}
        columns |= {"suppressed": numbered(out.suppressed[rows], used), "suppressedBy": out.suppressed_by[rows]}
    other: dict[str, Any] = {}
    if browsed.other is not None:
        near = browsed.other.near.latent[rows]
        columns |= {"other": near, "otherCosine": browsed.other.near.cosine[rows]}
        columns |= _other_tokens(browsed.other, near, used) | _pairs(browsed, rows)
        meanings, named = page.other_meanings, sorted(set(near.flatten().tolist()))
        other = {"otherText": {latent: shown(meanings[latent].text) for latent in named if latent in meanings}}
    inside = range(rows.start, rows.stop)
    packed = {name: column(values) for name, values in columns.items()}
    scores = {latent: _scores(page.meanings[latent]) for latent in inside if latent in page.meanings}
    unique = {latent: _plain(page.unique[latent]) for latent in inside if latent in page.unique}
    return {"columns": packed, "scores": scores, **other, "unique": unique}


def _windows(browsed: Browsed, rows: slice) -> dict[str, Tensor]:
    """The contexts of some latents: `windows` [latents + 1] are the first ones of each latent, `firings` [windows +
    1] the first firings of each context."""
    windows, firings = browsed.windows, browsed.firings
    begin = torch.searchsorted(windows.latent, torch.arange(rows.start, rows.stop + 1))
    part = slice(int(begin[0]), int(begin[-1]))
    place = firings.position[windows.center[part]].long()
    return {
        "windows": begin - begin[0],
        "band": windows.band[part],
        "context": place // firings.shape[1],
        "center": place % firings.shape[1],
        **_ranges(firings, windows.first[part], windows.last[part], ""),
    }


def _ranges(firings: Firings, first: Tensor, last: Tensor, name: str) -> dict[str, Tensor]:
    """Firings from `first` to `last` [w] of some contexts: where each one's begin, positions and activations."""
    size = last - first
    ends = torch.cat((torch.zeros(1, dtype=torch.int64), size.cumsum(0)))
    inside = torch.repeat_interleave(first - ends[:-1], size) + torch.arange(int(ends[-1]))
    names = [f"{name}{part.capitalize()}" if name else part for part in ("firings", "position", "value")]
    values = (ends, firings.position[inside].long() % firings.shape[1], firings.value[inside])
    return dict(zip(names, values, strict=True))


def _pairs(browsed: Browsed, rows: slice) -> dict[str, Tensor]:
    """Each latent and its nearest one in the other SAE: the other's firings in the latent's contexts (`pair`), the
    other's top contexts (`there`), and the latent's firings in those (`here`)."""
    if browsed.other is None or browsed.other.pairs is None:
        return {}
    pairs, own = browsed.other.pairs, browsed.firings
    part = slice(*torch.searchsorted(browsed.windows.latent, torch.tensor([rows.start, rows.stop])).tolist())
    length = own.shape[1]
    context = own.position[browsed.windows.center[part]].long() // length
    shown = inside_contexts(pairs.firings, pairs.latent[browsed.windows.latent[part]], context)
    # The other's windows are by its latents; each of ours takes those of its nearest.
    begin = torch.searchsorted(pairs.windows.latent, torch.arange(pairs.firings.d_sae + 1))
    near = pairs.latent[rows]
    size = torch.where(near == NONE, 0, begin[near.clamp_min(0) + 1] - begin[near.clamp_min(0)])
    ends = torch.cat((torch.zeros(1, dtype=torch.int64), size.cumsum(0)))
    chosen = torch.repeat_interleave(begin[near.clamp_min(0)] - ends[:-1], size) + torch.arange(int(ends[-1]))
    place = pairs.firings.position[pairs.windows.center[chosen]].long()
    latent = torch.repeat_interleave(torch.arange(rows.start, rows.stop), size)
    return {
        "both": pairs.both[rows],
        **_ranges(pairs.firings, *shown, "pair"),
        "there": ends,
        "thereContext": place // length,
        "thereCenter": place % length,
        **_ranges(pairs.firings, pairs.windows.first[chosen], pairs.windows.last[chosen], "there"),
        **_ranges(own, *inside_contexts(own, latent, place // length), "here"),
    }


def _other_tokens(other: Other, near: Tensor, used: Tensor) -> dict[str, Tensor]:
    """What the nearest latents [l, c] of the other SAE fire on, and how often."""
    if other.tokens is None or other.pairs is None:
        return {}
    there, latent = near != NONE, near.clamp_min(0)
    tokens = torch.where(there[..., None], other.tokens.token[latent], NONE)
    return {
        "otherTokens": numbered(tokens, used),
        "otherFired": torch.where(there, other.pairs.firings.fired[latent], NONE),
    }


MEANINGS = {metric.brief: metric.meaning for metric in get_evaluation("autointerp").metrics}
"""What the scores of explanations mean, by their names on the page."""
SHUFFLED = "balanced, shuffled"


def _scores(meaning: Explanation) -> dict[str, float]:
    """All scores of an explanation, with the control of the one that latents are sorted by."""
    control = meaning.control.get("balanced")
    return {**meaning.scores, **({} if control is None else {SHUFFLED: control})}


def _plain(item: UniqueLatent) -> dict[str, Any]:
    return item._asdict() | {"against": shown(item.against), "match_text": shown(item.match_text)}


# ---- tokens as text ------------------------------------------------------------------------------------

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # how SentencePiece writes a token of one byte


class Words(NamedTuple):
    """Some tokens as text."""

    text: list[str]  # one line in one direction each; leading spaces are kept, line ends are ↵
    bytes: dict[int, list[int]]
    """The bytes of those that hold part of a character, by their number in the list: several together may be one."""


def words_of(tokens: Iterable[int], tokenizer: Any) -> Words:
    """The text of token ids, in their order."""
    if tokenizer is None:
        raise UserError("model: it comes without a tokenizer; tokens cannot be shown as text")
    ids = list(tokens)
    pieces = tokenizer.convert_ids_to_tokens(ids)
    texts, parts = [], {}
    for number, (token, piece) in enumerate(zip(ids, pieces, strict=True)):
        text = token_text(token, tokenizer)
        if REPLACEMENT in text and (content := _bytes(piece)) is not None and not _is_text(content):
            parts[number] = list(content)
            text = "".join(f"\\x{byte:02x}" for byte in content)
        texts.append(shown(text.replace("\r\n", "\n").replace("\n", "↵").replace("\t", "⇥")))
    return Words(texts, parts)


def _is_text(content: bytes) -> bool:
    """Whether a replacement character was in the text itself."""
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _bytes(piece: str | None) -> bytes | None:
    """The bytes that a tokenizer's own name of a token stands for, where it is of a known kind."""
    if piece is None:
        return None
    if found := BYTE.fullmatch(piece):
        return bytes([int(found[1], 16)])
    try:
        return bytes(LETTERS[letter] for letter in piece)
    except KeyError:
        return None


def _letters() -> dict[str, int]:
    """Byte-level tokenizers name printable bytes by their Latin-1 letter, the others by letters from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + number): byte for number, byte in enumerate(others)}


LETTERS = _letters()
