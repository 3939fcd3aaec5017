"""Upgrades of the JSON files of earlier versions.

A change of a format is a function decorated with `@migration(kind, version)`. It takes the content of a file of that
kind from the version before, which may be damaged: what is not as expected stays as it is, for the reader to refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

Migration = Callable[[Any], Any]
MIGRATIONS: dict[str, list[Migration]] = {}
"""By kind of file: the upgrade from version 0, from version 1 and so on."""


def migration(kind: str, version: int) -> Callable[[Migration], Migration]:
    """Register a function that takes the content of a file of `kind` to `version` from the version before."""

    def register(function: Migration) -> Migration:
        known = MIGRATIONS.setdefault(kind, [])
        assert version == len(known) + 1, f"{kind}: version {version} must come after {len(known)}"
        known.append(function)
        return function

    return register


def renamed(content: Any, **names: str) -> Any:
    """JSON content with fields of the object renamed; anything but an object stays what it is."""
    return {names.get(name, name): value for name, value in content.items()} if isinstance(content, dict) else content


def within(content: Any, path: str, change: Migration) -> Any:
    """JSON content with the field at `path`, such as `config.saes`, changed; in a list there, each entry."""
    field, _, rest = path.partition(".")
    if not isinstance(content, dict) or field not in content:
        return content
    value = content[field]
    inner = partial(within, path=rest, change=change) if rest else change
    return {**content, field: [inner(item) for item in value] if isinstance(value, list) else inner(value)}


# ---- version 1: other names, and objects instead of lists ----------------------------------------------

SAES = {
    "sae": "config",  # sampled_sae.json
    "run": "config.saes",  # run.json
    "checkpoint": "run.saes",  # checkpoint.json
    "configs": "saes",  # a file for `--configs`
    "result": "sae",  # results of an evaluation of an SAE
    "synthetic": "saes.config",  # results of the synthetic experiment
}
"""Where the settings of SAEs are, by kind of file."""
NAMES: dict[str, dict[str, dict[str, str]]] = {
    "sae": {"metadata": {"max_norm": "high_norm_limit"}},
    "run": {"source": {"max_norm": "high_norm_factor", "length": "context"}},
    "result": {"asked": {"interp_tokens": "tokens"}},
    "cache": {"description": {"max_norm": "high_norm_limit"}},
}
"""Other fields that were renamed, by kind of file and path."""
LISTS = {"configs": "saes", "passes": "sizes", "report": "files"}
"""Kinds of files that were lists, with the field that has the list now."""


def _version_1(kind: str, content: Any) -> Any:
    if kind in LISTS and isinstance(content, list):
        content = {LISTS[kind]: content}
    if kind in SAES:
        content = within(content, SAES[kind], partial(renamed, latents="d_sae"))
    for path, names in NAMES.get(kind, {}).items():
        content = within(content, path, partial(renamed, **names))
    return content


for _kind in {**SAES, **NAMES, **LISTS}:
    migration(_kind, 1)(partial(_version_1, _kind))


# ---- version 2: the default recipe changed, and some of what was fixed became a setting -----------------

OLD_OPTIMIZER = {
    "lr": 3e-4,
    "gradient": "clip",
    "clip": 1.0,
    "cautious": False,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "rates": {"W_enc": 1.0, "b_enc": 1.0, "W_dec": 1.0, "b_dec": 1.0},
    "warmup_steps": 1000,
    "decay": 0.2,
}
"""The optimizer of version 1, whose files may leave out what was the default."""
OLD_INIT = {"encoder_scale": 1.0, "decoder": "random"}
TRAIN = {"sae": "metadata.training", "run": "config.train", "checkpoint": "run.train"}
"""Where the settings of a run are, by kind of file."""


def _with_old_recipe(config: Any) -> Any:
    """Settings of an SAE from version 1: what they leave out had other defaults, or was fixed."""
    if not isinstance(config, dict):
        return config
    optimizer = config.get("optimizer", {})
    if isinstance(optimizer, dict) and "gradient" not in optimizer:
        optimizer = OLD_OPTIMIZER | optimizer
    return {"init": OLD_INIT, **config, "optimizer": optimizer}


def _with_input_norm(train: Any) -> Any:
    """Settings of a run from version 1: `normalize` was whether the inputs were scaled to norm 1."""
    if not isinstance(train, dict) or "normalize" not in train:
        return train
    rest = {name: value for name, value in train.items() if name != "normalize"}
    return rest | {"input_norm": "one" if train["normalize"] else "none"}


def _version_2(kind: str, content: Any) -> Any:
    content = within(content, SAES[kind], _with_old_recipe)
    return within(content, TRAIN[kind], _with_input_norm) if kind in TRAIN else content


for _kind in SAES:
    migration(_kind, 2)(partial(_version_2, _kind))


# ---- versions 3 and 4 of results: 0 and [] are settings of their own, not the default -------------------


def unset(settings: Any, **stood_for: Any) -> Any:
    """Settings of an evaluation in which these values of fields stood for the default, as None does now."""
    if not isinstance(settings, dict):
        return settings
    return settings | {name: None for name, value in stood_for.items() if settings.get(name) == value}


migration("result", 3)(partial(within, path="asked", change=partial(unset, skip_first=0)))
migration("result", 4)(partial(within, path="asked", change=partial(unset, left_out=[])))
