"""What other commands have found out about an SAE: how often latents fire, what they stand for, which are unique."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sampled_sae.evals.results import FIRING, explanations_path
from sampled_sae.evals.similarity.members import open_member
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import read_json


class Density(NamedTuple):
    """At how many tokens each latent fires."""

    fired: Tensor
    """[m] int64."""
    tokens: int
    """Of how many."""


class Meaning(NamedTuple):
    """What a latent stands for, by an explainer."""

    text: str
    score: float | None
    """The main score; none if it was not scored."""
    scores: dict[str, float]
    """All of them by name."""


class Unique(NamedTuple):
    """A latent that `sampled-sae compare` lists as one that another SAE lacks."""

    against: str
    """The other SAE."""
    overall: float
    """Similarity to its best explained match there: mean of the next two."""
    decoder: float
    text: float
    match: int
    """The best match."""
    match_text: str
    nearest: float | None = None
    """Largest decoder cosine with any latent there, explained or not; none by an older version, whose list does not
    say that the latent is unique."""


def read_density(folder: Path, m: int) -> Density | None:
    """What the core evaluation left in the SAE's folder, if it did."""
    path = folder / FIRING
    if not path.exists():
        return None
    try:
        content = load_file(path)
        fired, tokens = content["fired"], int(content["tokens"][0])
    except (OSError, SafetensorError, KeyError, IndexError) as error:
        raise UserError(f"{path}: missing or damaged ({error})") from None
    if fired.shape != (m,) or tokens < 1:
        raise UserError(f"{path}: must have a number for each of {m} latents, and a number of tokens")
    return Density(fired.long(), tokens)


def read_meanings(folder: Path) -> dict[int, Meaning]:
    """The explained latents of the SAE in this folder; none where nobody explained them."""
    explained = open_member(folder).explained
    entries = read_json(explanations_path(folder))["latents"] if explained else {}
    return {
        latent: Meaning(item.text, item.score, _scores(entries.get(str(latent)))) for latent, item in explained.items()
    }


def _scores(entry: Any) -> dict[str, float]:
    found = entry.get("scores") if isinstance(entry, Mapping) else None
    return {str(name): float(value) for name, value in (found or {}).items() if isinstance(value, int | float)}


def read_unique(compare: Path, folder: Path, m: int) -> dict[int, Unique]:
    """The unique latents of the SAE in `folder` by a compare.json, or by the folder that holds one.

    Against several SAEs, a latent's entry is the one of the lowest similarity.
    """
    path = compare / "compare.json" if compare.is_dir() else compare
    content = read_json(path)
    try:
        names = {item["name"] for item in content["saes"]}
        tables = [item for pair in content["pairs"] for item in pair["unique"]]
        own = [name for name in names if _ends_with(folder, name)]
        if not own:
            raise UserError(f"compare = {str(compare)!r}: is about {', '.join(sorted(names))}: not about {folder}")
        found: dict[int, Unique] = {}
        for item in tables:
            for row in item["table"] if item["of"] in own else ():
                overall, decoder, text = (float(row[name]) for name in ("overall", "decoder", "text"))
                match, its_text = int(row["match"]), str(row["match_explanation"])
                nearest = None if row.get("nearest") is None else float(row["nearest"])
                new = Unique(str(item["against"]), overall, decoder, text, match, its_text, nearest)
                latent = int(row["latent"])
                if not 0 <= latent < m:
                    raise UserError(f"{path}: names latent {latent}: the SAE has {m}")
                if latent not in found or new.overall < found[latent].overall:
                    found[latent] = new
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(f"{path}: not a result of `sampled-sae compare`") from None
    return found


def _ends_with(folder: Path, name: str) -> bool:
    """A comparison calls SAEs by the last parts of their folders."""
    parts = Path(name).parts
    return folder.resolve().parts[-len(parts) :] == parts
