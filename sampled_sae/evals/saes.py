"""SAEs to be measured: in folders, or in memory; their names, layers and models."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from sampled_sae.evals.reading import own_layer
from sampled_sae.evals.results import WEIGHTS
from sampled_sae.formats import describe
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError


class Subject:
    """One SAE that is measured: in a folder, or in memory."""

    def __init__(self, label: str, folder: Path | None = None, sae: SAE | None = None):
        """`label` is for error messages: the folder, or saes[i]."""
        self.label, self.folder, self.sae = label, folder, sae

    @cached_property
    def cfg(self) -> InferenceConfig:
        """The configuration, known without the weights."""
        if self.sae is not None:
            return self.sae.cfg
        assert self.folder is not None
        return describe(self.folder)

    def load(self, device: torch.device) -> SAE:
        if self.sae is not None:
            return self.sae
        assert self.folder is not None
        return SAE.load(self.folder, device)


def subjects(saes: Sequence[SAE | Path | str]) -> list[Subject]:
    found: dict[Any, Subject] = {}
    for number, item in enumerate(saes):
        if isinstance(item, SAE):
            folder = item.folder if item.folder is not None and is_saved(item, item.folder) else None
            found[number] = Subject(f"saes[{number}]", folder, item)
            continue
        for folder in find_saes([Path(item)]):
            found.setdefault(folder, Subject(str(folder), folder))
    if not found:
        raise UserError("saes: must name at least one SAE")
    return list(found.values())


def is_saved(sae: SAE, folder: Path) -> bool:
    """Whether the SAE in the folder has the same tensors."""
    try:
        saved = SAE.load(folder).state_dict()
    except UserError:
        return False
    own = {name: tensor.cpu() for name, tensor in sae.state_dict().items()}
    # A threshold that is not known is nan.
    return own.keys() == saved.keys() and all(
        torch.equal(own[name].nan_to_num(), saved[name].nan_to_num()) for name in own
    )


def layer_of(sae: InferenceConfig, asked: int | None, where: object) -> int:
    """The layer that an SAE names, or `asked` if it names none."""
    own = own_layer(sae.metadata, str(where))
    if asked is not None and own not in (None, asked):
        raise UserError(f"layer = {asked}: {where} is of layer {own}; leave the flag out")
    return int(named(sae, "layer", asked, "layer", where)) if own is None else own


def named(sae: InferenceConfig, name: str, asked: Any, flag: str, where: object) -> Any:
    """`asked`, or else the entry of the SAE's metadata."""
    value = sae.metadata.get(name) if asked is None else asked
    if value is None:
        raise UserError(f"{where}: does not name its {flag}; give --{flag}")
    return value


def find_saes(folders: Sequence[Path]) -> list[Path]:
    """The folders of SAEs in these folders, or these themselves, in order."""
    found: list[Path] = []
    for folder in folders:
        # A save that was killed leaves a folder that begins with a dot.
        places = sorted(path.parent for path in folder.rglob(WEIGHTS))
        inside = [place for place in places if not _is_hidden(place.relative_to(folder))]
        if not inside:
            raise UserError(f"{str(folder)!r}: holds no SAE; must be the folder of one, or of a run")
        found += [path for path in inside if path not in found]
    if not found:
        raise UserError("folders: must name at least one SAE's folder")
    return found


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def names_of(folders: Sequence[Path]) -> list[str]:
    """The last parts of the folders' paths, as many as make them unique."""
    for parts in range(1, max((len(folder.parts) for folder in folders), default=1) + 1):
        names = ["/".join(folder.parts[-parts:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]
