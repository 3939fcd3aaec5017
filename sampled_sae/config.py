"""Settings and files: `Config`, the base of all settings, and JSON files of one kind with a `format_version`.

Settings are frozen, slotted dataclasses. A field's annotation is its check, `check` holds conditions between fields:

    @dataclass(frozen=True, slots=True)
    class HarvestConfig(Config):
        batch_size: Positive = 4096
        high_norm_factor: Annotated[float, at_least(1)] = 10.0
        bos: bool = True
        pick: Literal["top", "sample"] = "top"
        skip: tuple[Count, ...] = ()
        schedule: Constant | Released = field(default_factory=Constant)   # JSON: {"kind": "released", "at": 0.7}
        limit: PositiveNumber | None = None                               # JSON: null

        def check(self) -> None:
            require(len(self.skip) <= self.batch_size, "skip", self.skip, f"must be at most {self.batch_size} tokens")

An invalid value raises `UserError` with one line, such as `batch_size = 0: must be at least 1`. Values are converted
to plain Python ones (numpy numbers, lists for tuples, text for paths). `config.to_dict()` is plain JSON, and
`HarvestConfig.from_dict(plain, where=path)` is its strict inverse: `run.json: text.length = 0: must be at least 2`.

Files that are read back: `write_file(path, "run", content)` adds the format version, and `read_file(path, "run")`
returns the content as the present version has it; `migrations.py` has the upgrades.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import operator
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, SupportsFloat, Union, get_args, get_origin
from typing import get_type_hints as type_hints

from sampled_sae.migrations import MIGRATIONS
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import read_json, write_json

if TYPE_CHECKING:
    from typing_extensions import Self


class Invalid(UserError):
    """A value that a field cannot take."""

    def __init__(self, message: str, field: str = "", right: str = ""):
        super().__init__(message)
        self.field, self.right = field, right


def require(condition: bool, field: str, value: object, right: str) -> None:
    """Raise a one-line error unless the condition holds: the field, its value and what would be right."""
    if not condition:
        raise Invalid(f"{field} = {shown(value)}: {right}", field, right)


def shown(value: object) -> str:
    """A value in one line of at most 200 characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # integers of more than 4,300 digits have no repr, and other people's objects may fail
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 200 else f"{text[:200]}..."


# ---- bounds -----------------------------------------------------------------------------------------


class Bound(NamedTuple):
    """A condition on one field, as metadata of its annotation."""

    right: str  # for the error message
    holds: Callable[[Any], bool]


def at_least(least: float) -> Bound:
    return Bound(f"must be at least {least}", lambda value: value >= least)


Positive = Annotated[int, at_least(1)]
Count = Annotated[int, Bound("must not be negative", lambda value: value >= 0)]
Seed = int  # each integer must fit into 64 bits
PositiveNumber = Annotated[float, Bound("must be a positive number", lambda value: 0 < value < math.inf)]
NonNegative = Annotated[float, Bound("must not be negative", lambda value: value >= 0)]
Share = Annotated[float, Bound("must be a share in [0, 1]", lambda value: 0 <= value <= 1)]
PositiveShare = Annotated[float, Bound("must be a share in (0, 1]", lambda value: 0 < value <= 1)]
ShareBelowOne = Annotated[float, Bound("must be a share in [0, 1)", lambda value: 0 <= value < 1)]
OpenShare = Annotated[float, Bound("must be a share between 0 and 1", lambda value: 0 < value < 1)]
NotEmpty = Bound("must name at least one", lambda values: len(values) > 0)
Distinct = Bound("must name each one once", lambda values: len(set(values)) == len(values))


# ---- settings ---------------------------------------------------------------------------------------


class Config:
    """Base of all settings: each field is checked against its annotation on creation."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, hint in hints(type(self)).items():
            object.__setattr__(self, name, _converted(getattr(self, name), hint, name, from_json=False))
        self.check()

    def check(self) -> None:
        """Conditions between fields; override this, not `__post_init__`: `super()` fails with slots."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON; members of a union carry their `kind`."""
        plain_fields = {}
        for name, hint in hints(type(self)).items():
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                value = str(value)  # JSON has no infinity
            elif isinstance(value, Config) and len(_kinds(hint)) > 1:
                value = {"kind": _kind(type(value)), **value.to_dict()}
            plain_fields[name] = plain(value)
        return plain_fields

    @classmethod
    def from_dict(cls, plain: Any, where: str | Path = "") -> Self:
        """The strict inverse of `to_dict`; an error names `where`, usually a file, and the path of the field."""
        return _built(cls, plain, cls.__name__, f"{where}: " if where else "", "")


_hints: dict[type, dict[str, Any]] = {}


def hints(cls: type[Any]) -> dict[str, Any]:
    """The annotations of a dataclass's fields, in their order."""
    if cls not in _hints:
        known = type_hints(cls, include_extras=True)
        _hints[cls] = {item.name: known[item.name] for item in dataclasses.fields(cls)}
    return _hints[cls]


def _kind(cls: type) -> str:
    return cls.__name__.lower()


def _kinds(hint: Any) -> dict[str, type[Config]]:
    """The configurations in a union, by their `kind` in JSON."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return {_kind(cls): cls for cls in members if isinstance(cls, type) and issubclass(cls, Config)}


def _built(cls: type[Any], plain: Any, title: str, where: str, path: str) -> Any:
    """An instance of cls from JSON. Errors name `where` and `path`, which precedes the field's name."""
    require(isinstance(plain, dict), f"{where}{title}", plain, "must be an object with named fields")
    known = hints(cls)
    values = {}
    for name, value in plain.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            right = f"no such field; {meant}{cls.__name__} has {', '.join(known) or 'none'}"
            require(False, f"{where}{path}{name}", value, right)
        values[name] = _converted(value, known[name], f"{path}{name}", from_json=True, where=where)
    for item in dataclasses.fields(cls):
        if item.name not in values and item.default is item.default_factory is dataclasses.MISSING:
            raise Invalid(f"{where}{path}{item.name}: is missing")
    try:
        return cls(**values)
    except UserError as error:
        raise Invalid(f"{where}{path}{error}") from None


def _converted(value: Any, hint: Any, name: str, from_json: bool, where: str = "") -> Any:
    """The value in the type of its annotation; `Invalid` if it has another one."""
    origin, args, field = get_origin(hint), get_args(hint), f"{where}{name}"
    if origin is Annotated:
        value = _converted(value, args[0], name, from_json, where)
        for bound in args[1:]:
            if isinstance(bound, Bound):
                require(bound.holds(value), field, value, bound.right)
    elif origin in (Union, UnionType):
        return _member(value, hint, name, from_json, where)
    elif origin is Literal:
        right = f"must be {_listed([repr(choice) for choice in args])}"
        require(any(type(value) is type(choice) and value == choice for choice in args), field, value, right)
    elif origin in (tuple, list):
        listed = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
        require(listed, field, value, "must be a list")
        items, variadic = list(value), origin is list or args[-1] is Ellipsis
        require(variadic or len(items) == len(args), field, value, f"must have {len(args)} entries")
        kinds = [args[0]] * len(items) if variadic else args
        pairs = enumerate(zip(items, kinds, strict=True))
        return origin(_converted(item, kind, f"{name}[{i}]", from_json, where) for i, (item, kind) in pairs)
    elif origin is dict:
        named = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
        require(named, field, value, "must be an object with named fields")
        return {key: _converted(item, args[1], f"{name}.{key}", from_json, where) for key, item in value.items()}
    elif hint in SIMPLE:
        right, convert = SIMPLE[hint]
        try:
            value = float(value) if from_json and hint is float and value in ("inf", "-inf") else convert(value)
        except (TypeError, ValueError, OverflowError):
            raise Invalid(f"{field} = {shown(value)}: {right}", field, right) from None
        require(hint is not int or -(2**63) <= value < 2**63, field, value, "must fit into 64 bits")
    elif hint is not Any and isinstance(hint, type) and not isinstance(value, hint):
        if from_json and issubclass(hint, Config):
            return _built(hint, value, name, where, f"{name}.")
        title = f"{'an' if hint.__name__[0] in 'AEIOU' else 'a'} {hint.__name__}"
        require(False, field, value, f"must be {EXACT.get(hint, title)}")
    return value


def _member(value: Any, hint: Any, name: str, from_json: bool, where: str) -> Any:
    """`_converted` for a union: configurations are told apart by `kind`, other types by trying them in their order."""
    kinds, members = _kinds(hint), get_args(hint)
    if value is None and NoneType in members:
        return None
    if len(kinds) > 1:
        if from_json and isinstance(value, dict):
            named: Any = value.get("kind")
            right = f"must be one of {', '.join(kinds)}"
            require(isinstance(named, str) and named in kinds, f"{where}{name}.kind", named, right)
            rest = {key: item for key, item in value.items() if key != "kind"}
            return _built(kinds[named], rest, name, where, f"{name}.")
        if isinstance(value, tuple(kinds.values())):
            return value
        right = f"must be {_listed([cls.__name__ for cls in kinds.values()])}"
        raise Invalid(f"{where}{name} = {shown(value)}: {right}", f"{where}{name}", right)
    rights = []
    for member in members:
        if member is not NoneType:
            try:
                return _converted(value, member, name, from_json, where)
            except Invalid as error:
                if error.field != f"{where}{name}":  # inside of it: the right member, with a mistake
                    raise
                rights.append(error.right.removeprefix("must be "))
    right = f"must be {_listed(rights)}{', or none' * (NoneType in members)}".replace("must be must", "must")
    raise Invalid(f"{where}{name} = {shown(value)}: {right}", f"{where}{name}", right)


def _listed(words: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _whole(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _number(value: Any) -> float:
    if isinstance(value, str | bool) or not isinstance(value, SupportsFloat) or math.isnan(value):
        raise TypeError
    return float(value)


SIMPLE: dict[Any, tuple[str, Callable[[Any], Any]]] = {
    int: ("must be a whole number", _whole),
    float: ("must be a number", _number),
    Path: ("must be a path", Path),
}
"""By type: the error message and the conversion."""
EXACT: dict[type, str] = {bool: "True or False", str: "text"}
"""Types that are not converted, as error messages name them."""


def plain(value: Any) -> Any:
    """What reading a value back from JSON gives; named tuples and configurations are objects."""
    if isinstance(value, Config):
        return value.to_dict()
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    elif dataclasses.is_dataclass(value):
        value = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, Path):
        return str(value)
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def first_difference(old: Any, new: Any, where: str = "") -> str | None:
    """The first setting in which two configurations differ, in words; none if they agree."""
    if isinstance(old, dict) and isinstance(new, dict):
        parts = [(old.get(key), new.get(key), f"{where}.{key}" if where else str(key)) for key in {**old, **new}]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        parts = [(old[i], new[i], f"{where}[{i}]") for i in range(len(old))]
    elif isinstance(old, list) and isinstance(new, list) and any(isinstance(item, dict) for item in old + new):
        return f"{where} had {len(old)} entries and now has {len(new)}"
    else:
        return None if old == new else f"{where} was {shown(old)} and is now {shown(new)}"
    return next(filter(None, (first_difference(*part) for part in parts)), None)


# ---- files of one kind ------------------------------------------------------------------------------


def current_version(kind: str) -> int:
    return max(1, len(MIGRATIONS.get(kind, ())))


def write_file(path: Path, kind: str, content: dict[str, Any]) -> None:
    """Write a JSON file of one kind, whole or not at all."""
    write_json(path, versioned(kind, content))


def read_file(path: Path, kind: str) -> dict[str, Any]:
    """The content of a JSON file as the present version of its kind has it, without the version."""
    return upgraded(kind, read_json(path), path)


SEALED = (
    *("sae", "checkpoint", "cache", "cache_part", "train", "result", "explanations", "comparison", "synthetic"),
    *("sweep", "sweep_job", "sweep_slurm"),
)
"""Kinds of files with a checksum of their own content: a change to them would go unnoticed and give other results."""


def versioned(kind: str, content: dict[str, Any]) -> dict[str, Any]:
    """The content with its format version and, if the kind has one, its checksum."""
    made = {"format_version": current_version(kind), **content}
    return {**made, "checksum": _checksum(made)} if kind in SEALED else made


def _checksum(content: dict[str, Any]) -> int:
    """CRC-32 of JSON content without its own checksum; independent of white space and of the order of the fields."""
    rest = {name: value for name, value in content.items() if name != "checksum"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def upgraded(kind: str, content: Any, where: str | Path) -> dict[str, Any]:
    """The inverse of `versioned`, for content of any version; none is version 0. Errors name `where`."""
    if _too_deep(content):
        raise UserError(f"{where}: objects and lists are nested too deeply for a {kind!r} file")
    version, newest = 0, current_version(kind)
    if kind in SEALED and isinstance(content, dict) and "checksum" in content:  # version 0 had none
        if content["checksum"] != _checksum(content):
            intended = "if that was intended, remove its field checksum"
            raise UserError(f"{where}: changed since it was written (its checksum differs); {intended}")
        content = {name: value for name, value in content.items() if name != "checksum"}
    if isinstance(content, dict) and "format_version" in content:
        version = _converted(content["format_version"], Count, "format_version", True, f"{where}: ")
        right = f"written by a newer version of sampled-sae; this one reads up to {newest}"
        require(version <= newest, f"{where}: format_version", version, right)
        content = {name: value for name, value in content.items() if name != "format_version"}
    for upgrade in MIGRATIONS.get(kind, [])[version:]:
        content = upgrade(content)
    if not isinstance(content, dict):
        raise UserError(f"{where}: must hold an object with named fields, as {kind!r} files do; not {shown(content)}")
    return content


def _too_deep(content: Any, most: int = 50) -> bool:
    """Whether objects and lists are nested so deeply that a recursive function could fail."""
    level = [content]
    for _ in range(most):
        level = [
            item
            for parent in level
            if isinstance(parent, dict | list)
            for item in (parent.values() if isinstance(parent, dict) else parent)
        ]
    return bool(level)
