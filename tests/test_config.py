"""The base of all settings, and JSON files with a format version."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from sampled_sae import migrations
from sampled_sae.config import (
    Config,
    Count,
    Distinct,
    NotEmpty,
    Positive,
    PositiveNumber,
    Share,
    at_least,
    first_difference,
    plain,
    read_file,
    require,
    upgraded,
    versioned,
    write_file,
)
from sampled_sae.method.config import SAEConfig
from sampled_sae.method.presets import PAPER_INIT, PAPER_OPTIMIZER, paper_recipe
from sampled_sae.migrations import OLD_INIT, OLD_OPTIMIZER
from sampled_sae.utils.errors import UserError


@dataclass(frozen=True, slots=True)
class Often(Config):
    every: Annotated[int, at_least(2)]


@dataclass(frozen=True, slots=True)
class Never(Config):
    pass


@dataclass(frozen=True, slots=True)
class Inner(Config):
    share: Share = 0.5


@dataclass(frozen=True, slots=True)
class Outer(Config):
    size: Positive
    when: Often | Never = field(default_factory=Never)
    inner: Inner | None = None
    skip: tuple[Count, ...] = ()
    seeds: Annotated[tuple[int, ...], NotEmpty, Distinct] = (0,)
    pair: tuple[int, str] = (1, "one")
    limit: PositiveNumber | None = None
    clip: float = 1.0
    pick: Literal["top", "sample"] = "top"
    where: Path | None = None
    tokens: int | Literal["all"] = "all"
    flag: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        require(len(self.skip) <= self.size, "skip", self.skip, f"must be at most size = {self.size}")


FULL = Outer(
    np.int64(9),
    Often(3),
    Inner(np.float32(0.25)),
    [1, 2],
    limit=2,
    clip=math.inf,
    where="a/b",
    tokens=5,
    extra={"x": [1]},
)


def test_values_are_plain_python_ones_and_survive_json():
    assert FULL.size == 9 and type(FULL.size) is int and type(FULL.limit) is float
    assert FULL.skip == (1, 2) and FULL.where == Path("a/b")
    written = json.dumps(FULL.to_dict(), allow_nan=False)
    assert json.loads(written)["when"] == {"kind": "often", "every": 3}
    assert json.loads(written)["clip"] == "inf"
    assert Outer.from_dict(json.loads(written)) == FULL
    assert Outer.from_dict({"size": 1}) == Outer(1)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"size": 0}, "size = 0: must be at least 1"),
        ({"size": 1.5}, "size = 1.5: must be a whole number"),
        ({"size": True}, "size = True: must be a whole number"),
        ({"size": None}, "size = None: must be a whole number"),
        ({"size": 10**5000}, "size = <int>: must fit into 64 bits"),
        ({"when": 3}, "when = 3: must be Often or Never"),
        ({"inner": 3}, "inner = 3: must be an Inner, or none"),
        ({"skip": "12"}, "skip = '12': must be a list"),
        ({"skip": [0, -1]}, "skip[1] = -1: must not be negative"),
        ({"skip": [0, 0]}, "skip = (0, 0): must be at most size = 1"),
        ({"seeds": []}, "seeds = (): must name at least one"),
        ({"seeds": [1, 1]}, "seeds = (1, 1): must name each one once"),
        ({"pair": [1]}, "pair = [1]: must have 2 entries"),
        ({"pair": [1, 2]}, "pair[1] = 2: must be text"),
        ({"limit": 0}, "limit = 0: must be a positive number, or none"),
        ({"limit": "x"}, "limit = 'x': must be a number, or none"),
        ({"clip": math.nan}, "clip = nan: must be a number"),
        ({"clip": "inf"}, "clip = 'inf': must be a number"),
        ({"pick": "best"}, "pick = 'best': must be 'top' or 'sample'"),
        ({"pick": ["top"]}, "pick = ['top']: must be 'top' or 'sample'"),
        ({"where": 3}, "where = 3: must be a path, or none"),
        ({"tokens": "some"}, "tokens = 'some': must be a whole number or 'all'"),
        ({"flag": 1}, "flag = 1: must be True or False"),
        ({"extra": [1]}, "extra = [1]: must be an object with named fields"),
        ({"extra": {1: 2}}, "extra = {1: 2}: must be an object with named fields"),
    ],
)
def test_an_invalid_value_is_one_line(settings, line):
    with pytest.raises(UserError) as caught:
        Outer(**{"size": 1, **settings})
    assert str(caught.value) == line


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ([1], "Outer = [1]: must be an object with named fields"),
        ({}, "size: is missing"),
        ({"size": 1, "sise": 2}, "sise = 2: no such field; did you mean size? Outer has size, when, inner,"),
        ({"size": None}, "size = None: must be a whole number"),
        ({"size": 1, "skip": [0, 0]}, "skip = (0, 0): must be at most size = 1"),
        ({"size": 1, "inner": {"share": 2}}, "inner.share = 2.0: must be a share in [0, 1]"),
        ({"size": 1, "inner": {"share": None}}, "inner.share = None: must be a number"),
        ({"size": 1, "inner": {"extra": 2}}, "inner.extra = 2: no such field; Inner has share"),
        ({"size": 1, "inner": []}, "inner = []: must be an object with named fields, or none"),
        ({"size": 1, "when": {"kind": "often"}}, "when.every: is missing"),
        ({"size": 1, "when": {"kind": "often", "every": 1}}, "when.every = 1: must be at least 2"),
        ({"size": 1, "when": {"kind": ["often"]}}, "when.kind = ['often']: must be one of often, never"),
        ({"size": 1, "when": {}}, "when.kind = None: must be one of often, never"),
        ({"size": 1, "when": None}, "when = None: must be Often or Never"),
        ({"size": 1, "skip": [1, "x"]}, "skip[1] = 'x': must be a whole number"),
        ({"size": 1, "clip": "nan"}, "clip = 'nan': must be a number"),
    ],
)
def test_json_is_read_strictly_and_the_field_is_named(content, line):
    with pytest.raises(UserError) as caught:
        Outer.from_dict(content, "a.json")
    assert str(caught.value).startswith(f"a.json: {line}")
    assert "\n" not in str(caught.value)


def test_plain_is_what_json_gives_back():
    content = {"a": (1, FULL), 2: Path("x")}
    assert plain(content) == json.loads(json.dumps(plain(content)))


def test_first_difference():
    one = FULL.to_dict()
    assert first_difference(one, FULL.to_dict()) is None
    assert first_difference(one, {**one, "when": {"kind": "often", "every": 4}}) == "when.every was 3 and is now 4"
    assert first_difference(one, {**one, "skip": [1, 3]}) == "skip[1] was 2 and is now 3"


# ---- files ------------------------------------------------------------------------------------------


@pytest.fixture
def kind(monkeypatch):
    """A kind of file in its version 2: the list became an object, then a field was renamed."""
    monkeypatch.setitem(migrations.MIGRATIONS, "test", [])
    migrations.migration("test", 1)(lambda content: {"items": content} if isinstance(content, list) else content)
    migrations.migration("test", 2)(lambda content: migrations.renamed(content, items="values"))
    return "test"


def test_files_of_any_version_are_read(kind, tmp_path):
    path = tmp_path / "a.json"
    for content in ([1, 2], {"items": [1, 2]}, {"format_version": 1, "items": [1, 2]}):
        path.write_text(json.dumps(content))
        assert read_file(path, kind) == {"values": [1, 2]}
    write_file(path, kind, {"values": [3]})
    assert json.loads(path.read_text()) == {"format_version": 2, "values": [3]}
    assert read_file(path, kind) == {"values": [3]}
    assert upgraded(kind, versioned(kind, {"x": 1}), path) == {"x": 1}


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[" * 200 + b"]" * 200, "objects and lists are nested too deeply for a 'test' file"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"a": "\xff"}', "not UTF-8 text"),
        (b"null", "must hold an object with named fields"),
        (b"3", "must hold an object with named fields"),
        (
            b'{"format_version": 3}',
            "format_version = 3: written by a newer version of sampled-sae",
        ),
        (b'{"format_version": null}', "format_version = None: must be a whole number"),
        (b'{"format_version": -1}', "format_version = -1: must not be negative"),
    ],
)
def test_damaged_files_are_one_line(kind, tmp_path, content, line):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_file(path, kind)
    assert str(caught.value).startswith(f"{path}: {line}")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_line(kind, tmp_path):
    with pytest.raises(UserError, match="no such file"):
        read_file(tmp_path / "absent.json", kind)


def test_names_of_version_0_are_renamed():
    old = {"latents": 8, "k": 2}
    assert upgraded("sae", {"config": old, "metadata": {"max_norm": 3.0}}, "")["metadata"] == {"high_norm_limit": 3.0}
    for found in (
        upgraded("sae", {"config": old}, "")["config"],
        upgraded("run", {"config": {"saes": [old]}}, "")["config"]["saes"][0],
        upgraded("checkpoint", {"run": {"saes": [old]}}, "")["run"]["saes"][0],
        upgraded("configs", [old], "")["saes"][0],
        upgraded("result", {"sae": old}, "")["sae"],
    ):
        assert found == {"d_sae": 8, "k": 2, "optimizer": OLD_OPTIMIZER, "init": OLD_INIT}
    assert upgraded("run", {"source": {"max_norm": 10.0}}, "")["source"] == {"high_norm_factor": 10.0}
    for damaged in ({"config": None}, {"config": [3]}, {"config": {"saes": 3}}, {"source": []}):
        assert upgraded("run", damaged, "") == damaged


def test_settings_of_version_1_keep_the_recipe_of_that_time():
    """What they leave out had other defaults; what they name stays."""
    config = {"d_sae": 8, "k": 2, "optimizer": {"lr": 0.01, "clip": "inf"}}
    assert SAEConfig.from_dict({"d_sae": 8, "k": 2}) != SAEConfig(8, 2, **paper_recipe())
    old = replace(PAPER_OPTIMIZER, lr=0.01, clip=math.inf)
    for found in (
        upgraded("sae", {"format_version": 1, "config": config}, "")["config"],
        upgraded("run", {"format_version": 1, "config": {"saes": [config]}}, "")["config"]["saes"][0],
        upgraded("checkpoint", {"format_version": 1, "run": {"saes": [config]}}, "")["run"]["saes"][0],
        upgraded("configs", {"format_version": 1, "saes": [config]}, "")["saes"][0],
        upgraded("result", {"format_version": 1, "sae": config}, "")["sae"],
    ):
        assert SAEConfig.from_dict(found) == SAEConfig(8, 2, optimizer=old, init=PAPER_INIT)
    [bare] = upgraded("configs", [{"d_sae": 8, "k": 2}], "")["saes"]
    assert SAEConfig.from_dict(bare) == SAEConfig(8, 2, **paper_recipe())
    whole = SAEConfig(8, 2).to_dict()
    assert upgraded("configs", [whole], "")["saes"] == [whole]
    [new] = upgraded("configs", {"format_version": 2, "saes": [{"d_sae": 8, "k": 2}]}, "")["saes"]
    assert SAEConfig.from_dict(new) == SAEConfig(8, 2)


@pytest.mark.parametrize(("normalize", "norm"), [(True, "one"), (False, "none")])
def test_normalize_of_version_1_is_the_input_norm(normalize, norm):
    old, new = {"steps": 3, "normalize": normalize}, {"steps": 3, "input_norm": norm}
    assert upgraded("run", {"config": {"train": old}}, "")["config"]["train"] == new
    assert upgraded("checkpoint", {"run": {"train": old}}, "")["run"]["train"] == new
    assert upgraded("sae", {"metadata": {"training": old}}, "")["metadata"]["training"] == new
    assert upgraded("sae", {"metadata": {"training": new}}, "")["metadata"]["training"] == new
