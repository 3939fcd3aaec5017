"""SAEs' folders, and the files that evaluations leave: results, explanations, firing counts, comparisons.

Those of an SAE are in the folder `evals` of its own folder.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from sampled_sae.config import current_version, read_file, upgraded, write_file
from sampled_sae.formats import results_folder, saes_in
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import make_folder, read_json, remove_leftovers, replacing, writing

FOLDER = "evals"
FIRING = Path(FOLDER) / "firing.safetensors"
"""`fired` [d_sae], the number of tokens at which each latent fired, and `tokens` [1], the number of tokens read."""
CORE = Path(FOLDER) / "core.json"  # has the number of dead latents, not which: enough if it is none or all
SPARSITY = Path("sparsity.safetensors")  # SAELens' `sparsity` [d_sae], log10 of the density plus 1e-10
WEIGHTS = "sae_weights.safetensors"
SAMPLE = 2**20  # bytes of each part of the weights that enter their fingerprint


# ---- results -----------------------------------------------------------------------------------------


def result_path(folder: Path, name: str) -> Path:
    """The file of an evaluation's result on the SAE in this folder."""
    return results_folder(folder) / FOLDER / f"{name}.json"


def write_result(folder: Path, name: str, content: dict[str, Any]) -> Path:
    """Write a result, with how it was measured."""
    return _write(result_path(folder, name), "result", content)


def _write(path: Path, kind: str, content: dict[str, Any]) -> Path:
    remove_leftovers(make_folder(path.parent), path.name)
    write_file(path, kind, content)
    return path


def read_result(folder: Path, name: str) -> dict[str, Any] | None:
    """A result with how it was measured, as written by the present version; None if there is no valid one."""
    path = result_path(folder, name)
    content = read_json(path) if path.exists() else None
    if not isinstance(content, dict) or not isinstance(content.get("result"), dict):
        return None
    content = upgraded("result", content, path)
    return content | {"asked": content["asked"] if isinstance(content.get("asked"), dict) else {}}


def fingerprint(folder: Path) -> str:
    """A hash of parts of the weights' file, different for other weights; of all its files for formats of others."""
    digest = hashlib.blake2b(digest_size=16)
    for path in _files_of(folder):
        try:
            size = path.stat().st_size
            digest.update(str(size).encode())
            with path.open("rb") as file:
                for start in (0, size // 3, 2 * size // 3, max(0, size - SAMPLE)):
                    file.seek(start)
                    digest.update(file.read(SAMPLE))
        except OSError as error:  # removed while it was evaluated
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    return digest.hexdigest()


def _files_of(folder: Path) -> list[Path]:
    if folder.is_file() or (folder / WEIGHTS).exists():
        return [folder if folder.is_file() else folder / WEIGHTS]
    found: list[Path] = []
    for where, below, files in os.walk(folder):
        below[:] = [name for name in below if name[0] != "." and name != FOLDER]
        found += [Path(where) / name for name in files if name[0] != "."]
    return sorted(found) or [folder / WEIGHTS]


def find_saes(folders: Sequence[Path]) -> list[Path]:
    """The SAEs in these folders, or these themselves, in order: their folders, or files of formats without one."""
    found: dict[Path, None] = {}
    for folder in folders:
        inside = saes_in(folder)
        if not inside and not folder.exists():
            raise UserError(f"{str(folder)!r}: there is no such folder")
        if not inside and (folder / "run.json").exists():
            raise UserError(f"{str(folder)!r}: the run has no SAE yet; sampled-sae resume continues it")
        if not inside:
            raise UserError(f"{str(folder)!r}: holds no SAE; must be the folder of one, or of a run")
        found |= dict.fromkeys(inside)
    if not found:
        raise UserError("folders: must name at least one SAE's folder")
    return list(found)


def names_of(folders: Sequence[Path]) -> list[str]:
    """The last parts of the folders' paths, as many as make them unique."""
    for parts in range(1, max((len(folder.parts) for folder in folders), default=1) + 1):
        names = ["/".join(folder.parts[-parts:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def saebench_layout(
    kind: str, config: dict[str, Any], metrics: dict[str, Any], details: list[Any], unstructured: Any
) -> dict[str, Any]:
    """A result as SAEBench's own tools read it; reports fill in what names the SAE and the run."""
    return {
        "eval_type_id": kind,
        "eval_config": config,
        "eval_id": None,
        "datetime_epoch_millis": None,
        "eval_result_metrics": metrics,
        "eval_result_details": details,
        "sae_bench_commit_hash": None,
        "sae_lens_id": None,
        "sae_lens_release_id": None,
        "sae_lens_version": None,
        "sae_cfg_dict": None,
        "eval_result_unstructured": unstructured,
    }


# ---- explanations ------------------------------------------------------------------------------------


class Explanation(NamedTuple):
    """What a latent fires on, by an explainer."""

    text: str  # one short sentence
    score: float | None  # its interpretability score; None if it was not scored
    scores: Mapping[str, float] = {}  # all scores by name
    control: Mapping[str, float] = {}  # the same with the explanation of another latent; empty without a control

    @property
    def gain(self) -> float | None:
        """Balanced detection minus its control; None unless both were measured."""
        both = self.scores.get("balanced"), self.control.get("balanced")
        return None if both[0] is None or both[1] is None else both[0] - both[1]


def explanations_path(folder: Path) -> Path:
    """The file with the explanations of the SAE in this folder."""
    return results_folder(Path(folder)) / FOLDER / "explanations.json"


def save_explanations(folder: Path, latents: Mapping[int, Mapping[str, Any]], **about: Any) -> Path:
    """Write what is known of each latent, at least its `explanation` and `score`; `about` is how it was made."""
    plain = {str(latent): dict(latents[latent]) for latent in sorted(latents)}
    return _write(explanations_path(folder), "explanations", {**about, "latents": plain})


def read_explanations(folder: Path, d_sae: int | None = None) -> dict[int, Explanation]:
    """The explanations of the SAE in this folder by latent, in order; empty if there is no file."""
    path = explanations_path(folder)
    if not path.exists():
        return {}
    latents = read_file(path, "explanations").get("latents")
    if not isinstance(latents, dict):
        raise UserError(f"{path}: must be an object with `latents`")
    found = {}
    for latent, entry in latents.items():
        known = entry if isinstance(entry, dict) else {"explanation": entry}
        text, score = known.get("explanation"), known.get("score")
        if not latent.isdecimal() or not isinstance(text, str | None):
            raise UserError(f"{path}: latents[{latent!r}] must be a latent's number with an `explanation` that is text")
        if score is not None and not _is_number(score):
            raise UserError(f"{path}: score = {score!r}: must be a number, or null")
        if text and d_sae is not None and int(latent) >= d_sae:
            raise UserError(f"{path}: explains latent {latent}: the SAE has {d_sae}; is the file another SAE's?")
        if text:
            named = [_numbers(known.get(name)) for name in ("scores", "control")]
            found[int(latent)] = Explanation(text, None if score is None else float(score), *named)
    return dict(sorted(found.items()))


def _numbers(record: Any) -> dict[str, float]:
    """The numbers in an object, by name."""
    items = record.items() if isinstance(record, dict) else ()
    return {str(name): float(value) for name, value in items if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


# ---- firing counts -----------------------------------------------------------------------------------


class Liveness(NamedTuple):
    """Which latents fire, as far as it is known."""

    mask: Tensor | None  # [d_sae] bool; None if it is not known
    source: str  # the file that it was read from, or why it is not known


class Density(NamedTuple):
    """At how many tokens each latent fires."""

    fired: Tensor  # [d_sae] int64
    tokens: int  # tokens that were read


def save_firing(folder: Path, fired: Tensor, tokens: int) -> Path:
    """Write the number of tokens at which each latent [d_sae] fired; whole or not at all."""
    path = results_folder(folder) / FIRING
    remove_leftovers(make_folder(path.parent), path.name)
    about = {"format_version": str(current_version("firing"))}
    content = {"fired": fired.detach().cpu().long().contiguous(), "tokens": torch.tensor([tokens])}
    with replacing(path) as temporary, writing(path):
        temporary.write_bytes(save(content, about))
    return path


def read_density(folder: Path, d_sae: int) -> Density | None:
    """The counts of the core evaluation in the SAE's folder, if there are any."""
    path = results_folder(folder) / FIRING
    if not path.exists():
        return None
    fired, tokens = _tensor(path, "fired", d_sae), _tensor(path, "tokens", 1)
    if int(tokens) < 1:
        raise UserError(f"{path}: tokens = {int(tokens)}: must be at least 1")
    return Density(fired.long(), int(tokens))


def load_live(folder: Path, d_sae: int) -> Liveness:
    """Which of an SAE's latents fire, from the files in its folder: firing counts, core results, SAELens' densities."""
    folder = results_folder(folder)
    if (folder / FIRING).exists():
        return Liveness(_tensor(folder / FIRING, "fired", d_sae) > 0, str(FIRING))
    if (folder / CORE).exists():
        content = read_json(folder / CORE)
        try:
            dead = int(content["result"]["density"]["dead"])
        except (KeyError, TypeError, ValueError):
            why = "not a result of the core evaluation; remove it or evaluate again"
            raise UserError(f"{folder / CORE}: {why}") from None
        if dead in (0, d_sae):
            return Liveness(torch.full((d_sae,), dead == 0), str(CORE))
    if (folder / SPARSITY).exists():
        # A latent that never fired has exactly -10 there, up to rounding.
        return Liveness(_tensor(folder / SPARSITY, "sparsity", d_sae) > -9.99, str(SPARSITY))
    return Liveness(None, f"no {FIRING} with the latents that fire")


def _tensor(path: Path, name: str, length: int) -> Tensor:
    try:
        values = load_file(path)[name]
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(f"{path}: missing or damaged ({error})") from None
    if values.shape != (length,):
        raise UserError(f"{path}: {name} has shape {tuple(values.shape)}: must be {(length,)}")
    return values


# ---- comparisons -------------------------------------------------------------------------------------


class UniqueLatent(NamedTuple):
    """A latent without an equal in another SAE, in a comparison."""

    against: str  # the other SAE
    overall: float  # similarity to its best explained match there: mean of the next two
    decoder: float
    text: float
    match: int  # the best match
    match_text: str
    nearest: float | None = None  # largest decoder cosine with any latent there; None in files of early versions


def read_unique(compare: Path, folder: Path, d_sae: int) -> dict[int, UniqueLatent]:
    """The unique latents of the SAE in `folder`, from a compare.json or the folder that holds one.

    Against several SAEs, a latent's entry is the one of the lowest similarity.
    """
    path = compare / "compare.json" if compare.is_dir() else compare
    content = read_file(path, "comparison")
    try:
        names = {item["name"] for item in content["saes"]}
        tables = [item for pair in content["pairs"] for item in pair["unique"]]
        parts = folder.resolve().parts
        own = [name for name in names if parts[-len(Path(name).parts) :] == Path(name).parts]
        if not own:
            raise UserError(f"compare = {str(compare)!r}: is about {', '.join(sorted(names))}: not about {folder}")
        rows = [(item["against"], row) for item in tables if item["of"] in own for row in item["table"]]
        found: dict[int, UniqueLatent] = {}
        for against, row in rows:
            latent, match = int(row["latent"]), (int(row["match"]), str(row["match_explanation"]))
            overall, decoder, text = (float(row[name]) for name in ("overall", "decoder", "text"))
            nearest = None if row.get("nearest") is None else float(row["nearest"])
            new = UniqueLatent(str(against), overall, decoder, text, *match, nearest)
            if not 0 <= latent < d_sae:
                raise UserError(f"{path}: names latent {latent}: the SAE has {d_sae}")
            if latent not in found or new.overall < found[latent].overall:
                found[latent] = new
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(f"{path}: not a result of `sampled-sae compare`") from None
    return found
