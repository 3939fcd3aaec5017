"""Datasets for probing by what the user names: a file, or one of SAEBench's datasets on the hub."""

from __future__ import annotations

from collections.abc import Sequence

from sampled_sae.errors import UserError
from sampled_sae.evals.probing.data import READERS, SPLITS, Labelled, load_file
from sampled_sae.evals.probing.hub import HUB, load_hub


def load(sources: Sequence[str], texts_a_class: int, characters: int) -> list[Labelled]:
    """The datasets, each with a name of its own; of long texts only the first `characters` are kept.

    `texts_a_class` bounds what is read of datasets that are too large to be read whole.
    """
    datasets = [_load(source, texts_a_class, characters) for source in sources]
    names = [dataset.name for dataset in datasets]
    for dataset, source in zip(datasets, sources, strict=True):
        # Files of the same name in two folders.
        if names.count(dataset.name) > 1:
            dataset.name = source
    return datasets


def _load(source: str, texts_a_class: int, characters: int) -> Labelled:
    if source in HUB:
        found = load_hub(source, texts_a_class, characters)
    elif source.lower().endswith(tuple(READERS)):
        found = load_file(source, characters)
    else:
        raise UserError(
            f"datasets = {source!r}: must be a file ending in {', '.join(READERS)}, or one of {', '.join(HUB)}"
        )
    _check(found, source)
    return found


def _check(found: Labelled, source: str) -> None:
    """Refuse what no probe can be made of."""
    here = f"datasets = {source!r}"
    if not found.texts:
        raise UserError(f"{here}: holds no text ({found.blank} blank, {found.other_split} of other splits)")
    if len(found.classes) < 2:
        raise UserError(f"{here}: all labels are {found.classes[0]!r}; must have at least two classes")
    for split in SPLITS:
        if found.splits is not None and split not in found.splits:
            raise UserError(f"{here}: column 'split' has no {split!r}; must have train and test, or leave it out")
