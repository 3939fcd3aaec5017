"""The evaluations by name. A new one is a module with a function like these, and one line here.

Its results have a method `to_dict`, which gives plain JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from sampled_sae.evals import absorption, autointerp, core, probing
from sampled_sae.evals.results import save_firing
from sampled_sae.utils.errors import UserError


class Evaluation(NamedTuple):
    """How one evaluation is run."""

    evaluate: Callable[..., list[Any]]
    """(saes, model, layer, contexts if it reads text, settings, progress) -> a result for each SAE, in their order."""
    to_saebench: Callable[[Any, Any], dict[str, Any]] | None = None
    """(result, settings) -> SAEBench's layout, where it has one."""
    settings: Callable[[], Any] = lambda: None
    """The settings of an evaluation that has no flags of its own."""
    reads_text: bool = False
    """Whether it is given contexts [n, L] of token ids."""
    one_by_one: bool = False
    """Whether it takes `finished`, which is given each SAE's number and result as soon as it is there."""
    most: int | None = None
    """SAEs that it takes at once; the model reads the text again for the next ones."""
    after: Callable[[Any, Path], Any] = lambda result, folder: None
    """What else is left in the SAE's folder."""


EVALUATIONS: dict[str, Evaluation] = {
    "core": Evaluation(
        core.evaluate_core_many,
        core.to_saebench,
        reads_text=True,
        after=lambda result, folder: save_firing(folder, result.fired, result.normal.tokens),
    ),
    "probing": Evaluation(probing.evaluate_probing_many, probing.to_saebench),
    "absorption": Evaluation(absorption.evaluate_absorption_many, absorption.to_saebench, one_by_one=True),
    "autointerp": Evaluation(
        autointerp.evaluate_autointerp_many,
        autointerp.to_saebench,
        reads_text=True,
        one_by_one=True,
        most=4,  # it holds every firing of the latents that it explains
        after=lambda result, folder: result.save_explanations(folder),
    ),
}


def chosen(names: tuple[str, ...]) -> list[str]:
    """Names, one by one or with commas between them -> those of evaluations, each once, in order."""
    found = [name.strip() for item in names for name in item.split(",") if name.strip()]
    for name in found:
        if name not in EVALUATIONS:
            raise UserError(f"evals = {name!r}: must be among {', '.join(EVALUATIONS)}")
    if not found:
        raise UserError(f"evals: must name at least one of {', '.join(EVALUATIONS)}")
    return list(dict.fromkeys(found))
