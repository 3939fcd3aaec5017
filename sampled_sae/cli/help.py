"""Help of the command line, from the commands' dataclasses: docstrings of fields, their types and their defaults.

`COMMAND --help` shows the command's own options and one line per group of settings, `--help-GROUP` one group, and
`--help-all` everything. A command may declare `GROUPS`, titles with the names of their fields, and `EXAMPLES`, lines of
arguments.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import tyro

from sampled_sae.utils.errors import UserError

WIDTH = 100
"""Widest line."""
FLAG_COLUMN = 30
"""Width of the column of flags; a longer flag has a line of its own."""
METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", bool: "{True,False}"}


class Command(NamedTuple):
    """A command as `sampled-sae --help` lists it."""

    target: str  # module.name of its dataclass, or of a function that makes it
    topic: str  # heading that it is listed under
    summary: str  # one short line


@dataclass(frozen=True)
class Option:
    """One flag or positional argument."""

    flag: str  # with its short form, such as "--lr"; the metavar for a positional argument
    metavar: str  # empty for a switch
    text: str  # description with the default
    field: str  # name of the field
    positional: bool = False
    required: bool = False


@dataclass(frozen=True)
class Group:
    """Settings with a common prefix, such as --optimizer.beta1; the command's own have none."""

    name: str
    text: str  # first paragraph of the settings' docstring
    options: tuple[Option, ...]
    details: str = ""  # the rest of it


def overview(program: str, commands: Mapping[str, Command], version: str) -> str:
    """The help of the program: its commands by topic."""
    lines = [f"{program} {version}: train, evaluate and compare sparse autoencoders (SAEs).", ""]
    lines += [f"usage: {program} COMMAND [options]"]
    width = max(map(len, commands)) + 2
    for topic in dict.fromkeys(command.topic for command in commands.values()):
        lines += ["", heading(topic)]
        lines += [f"  {name:{width}}{each.summary}" for name, each in commands.items() if each.topic == topic]
    lines += ["", f"{program} COMMAND --help describes a command and shows examples.", ""]
    return "\n".join(lines)


def command_help(command: Any, program: str, default: Any, wanted: str = "") -> str:
    """The help of a command; `wanted` is the name of a group, "all", or nothing for the command's own options."""
    own, *others = groups(command, default)
    if wanted not in ("", "all"):
        found = [group for group in others if group.name == wanted or group.name.startswith(f"{wanted}.")]
        if not found:
            known = ", ".join(f"--help-{group.name}" for group in others if "." not in group.name)
            raise UserError(f"--help-{wanted}: not known; must be --help, --help-all{known and ', '}{known}")
        return "\n".join([*[line for group in found for line in _group_lines(group, full=True)][1:], ""])
    common = [option for group in others for option in group.options if option.flag.count("--") > 1]
    short = tuple(replace(option, flag=option.flag.split(",")[0]) for option in common)
    own = replace(own, options=own.options + short)
    positional = [option for option in own.options if option.positional]
    needed = [f"{option.flag} {option.metavar}".strip() for option in own.options if option.required]
    words = [*(option.flag for option in positional if not option.required), *needed]
    lines = [f"usage: {program} {' '.join(words)} [options]", "", *_wrapped(own.text)]
    lines += [line for part in own.details.split("\n\n") if part for line in ("", *_wrapped(part))]
    lines += _own_lines(own, getattr(command, "GROUPS", {}))
    if wanted == "all":
        lines += [line for group in others for line in _group_lines(group)]
    elif others:
        lines += ["", heading(getattr(command, "GROUPS_TITLE", "More settings")), *_listed(others)]
        lines += ["", *_wrapped("--help-NAME shows the options of one group, --help-all those of all groups.")]
    if notes := getattr(command, "notes", None):
        lines += ["", *notes()]
    if examples := getattr(command, "EXAMPLES", ()):
        lines += ["", heading("Examples")]
        lines += [part for line in examples for part in _shell(f"{program} {line}")]
    return "\n".join([*lines, ""])


def _shell(line: str) -> list[str]:
    """A command, continued after a backslash where it is too long."""
    parts = textwrap.wrap(line, _width() - 8, break_on_hyphens=False, break_long_words=False)
    return [f"  {part}" for part in " \\\n    ".join(parts).split("\n")]


def rows(table: Mapping[str, str]) -> list[str]:
    """Names with their descriptions, in two columns."""
    column = max(map(len, table)) + 4
    return [
        line
        for name, text in table.items()
        for line in _wrapped(text, " " * column, f"  {name}".ljust(column))  # the name stands before the first line
    ]


def titled(own: Group, titles: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, list[Option]]]:
    """The command's own options by title; those without a title come last."""
    named = {name for names in titles.values() for name in names}
    rest = [option.field for option in own.options if option.field not in named]
    for title, names in {**titles, ("Other options" if titles else "Options"): rest}.items():
        if shown := [option for name in names for option in own.options if option.field == name]:
            yield title, shown


def _own_lines(own: Group, titles: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for title, options in titled(own, titles):
        yield ""
        yield heading(title)
        yield from (line for option in options for line in _option_lines(option))


def _group_lines(group: Group, full: bool = False) -> Iterator[str]:
    yield ""
    yield heading(group.name)
    yield from _wrapped(group.text, "  ")
    if full:
        yield from (line for part in group.details.split("\n\n") if part for line in ("", *_wrapped(part, "  ")))
    yield ""
    yield from (line for option in group.options for line in _option_lines(option))


def _listed(others: Sequence[Group]) -> Iterator[str]:
    """One line per group; a group inside of a group is shown with it."""
    outer = [group for group in others if "." not in group.name]
    width = max(len(group.name) for group in outer) + 2
    for group in outer:
        yield _short(f"  {group.name:{width}}", group.text)


def _short(before: str, text: str) -> str:
    """A line with the first sentence of a text."""
    first = text.split(". ")[0].rstrip(".")
    room = _width() - len(before)
    return before + (first if len(first) <= room else textwrap.shorten(first, room, placeholder=" ..."))


def _option_lines(option: Option) -> Iterator[str]:
    flag = f"  {option.flag} {option.metavar}".rstrip() if not option.positional else f"  {option.flag}"
    lines = _wrapped(option.text, " " * FLAG_COLUMN)
    if len(flag) > FLAG_COLUMN - 2:
        yield flag
        yield from lines
    else:
        yield f"{flag:{FLAG_COLUMN}}{lines[0].lstrip() if lines else ''}".rstrip()
        yield from lines[1:]


def _width() -> int:
    return max(FLAG_COLUMN + 30, min(WIDTH, shutil.get_terminal_size().columns))


def _wrapped(text: str, indent: str = "", first: str | None = None) -> list[str]:
    """The lines of a paragraph, or of a list whose items begin with "- "."""
    wrap = partial(textwrap.wrap, width=_width(), break_on_hyphens=False, break_long_words=False)
    items = [" ".join(item.split()) for item in re.split(r"\n(?=- )", text)]
    begin = indent if first is None else first
    return [
        line
        for n, item in enumerate(items)
        for line in wrap(
            item, initial_indent=indent if n else begin, subsequent_indent=indent + "  " * (item[:2] == "- ")
        )
    ]


def heading(text: str) -> str:
    """A heading, bold on a terminal."""
    bold = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return f"\033[1m{text}\033[0m" if bold else text


# ---- from dataclasses to options --------------------------------------------------------------------


def groups(command: Any, default: Any = None) -> list[Group]:
    """The command's own options first, then its groups of settings; `default` has values of flags not given."""
    found: dict[str, list[Option]] = {"": []}
    texts = {"": _paragraphs(command)}
    _collect(command, default, "", found, texts)
    declared = getattr(command, "DESCRIPTIONS", {})  # of groups, in place of the docstrings of their settings
    texts |= {name: (text, "\n\n".join(filter(None, texts[name]))) for name, text in declared.items()}
    return [Group(name, texts[name][0], tuple(options), texts[name][1]) for name, options in found.items() if options]


def _collect(
    cls: Any, default: Any, prefix: str, found: dict[str, list[Option]], texts: dict[str, tuple[str, str]]
) -> None:
    hints, documented = get_type_hints(cls, include_extras=True), descriptions(cls)
    for item in fields(cls):
        hint, marks = _stripped(hints[item.name])
        if tyro.conf.Suppress in marks:
            continue
        value = getattr(default, item.name, MISSING) if default is not None else _default(item)
        inner: Any = next((kind for kind in (hint, *get_args(hint)) if is_dataclass(kind)), None)
        if inner is not None:
            renamed = next((mark.name for mark in marks if getattr(mark, "name", None) is not None), item.name)
            group = ".".join(filter(None, (prefix, renamed)))
            found.setdefault(group, [])
            texts.setdefault(group, _paragraphs(inner))
            _collect(inner, None if value is MISSING else value, group, found, texts)
        else:
            found[prefix].append(_option(item.name, hint, marks, value, prefix, documented.get(item.name, "")))


def _option(name: str, hint: Any, marks: Sequence[Any], value: Any, prefix: str, text: str) -> Option:
    required = value is MISSING or value is tyro.MISSING
    aliases = [alias for mark in marks for alias in getattr(mark, "aliases", None) or ()]
    dashed = ".".join([*filter(None, [prefix]), name]).replace("_", "-")
    short = [alias for alias in aliases if prefix]  # at the top, an alias is a former name
    if tyro.conf.Positional in marks:
        many = get_origin(hint) is tuple
        shown = f"{name.upper().rstrip('S')} ..." if many else name.upper()
        return Option(shown if required else f"[{shown}]", "", text, name, True, required)
    if hint is bool:
        switch = f"--{prefix + '.' if prefix else ''}[no-]{name.replace('_', '-')}" if value else f"--{dashed}"
        return Option(switch, "", text + (" Default: yes." if value else ""), name)
    flag = ", ".join([*short, f"--{dashed}"])
    return Option(flag, metavar(hint), _with_default(text, required, value), name, required=required)


def _with_default(text: str, required: bool, value: Any) -> str:
    if required:
        return f"{text} Required."
    if "Default:" in text or value in (None, (), "", {}):
        return text
    shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"{text} Default: {shown}."


def metavar(hint: Any) -> str:
    """What a flag takes, such as INT, {a,b} or `PATH ...`."""
    hint = _stripped(hint)[0]
    members = [_stripped(part)[0] for part in get_args(hint)]
    if get_origin(hint) in (Union, UnionType):
        choices = [choice for part in members if part is not NoneType for choice in _choices(part)]
        if choices:
            return f"{{{','.join(choices)}}}"
        return "|".join(dict.fromkeys(metavar(part) for part in members if part is not NoneType))
    if get_origin(hint) is Literal:
        return f"{{{','.join(map(str, get_args(hint)))}}}"
    if get_origin(hint) is tuple:
        return f"{metavar(members[0])} ..."
    return METAVARS.get(hint, "TEXT")


def _choices(hint: Any) -> Iterable[str]:
    """The values of a type that has few of them."""
    if get_origin(hint) is Literal:
        return map(str, get_args(hint))
    return ("True", "False") if hint is bool else ()


def _stripped(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without its annotations, and these."""
    marks: tuple[Any, ...] = ()
    while get_origin(hint) is Annotated:
        hint, marks = get_args(hint)[0], (*marks, *hint.__metadata__)
    return hint, marks


def _default(item: Field[Any]) -> Any:
    return item.default_factory() if item.default_factory is not MISSING else item.default


def _paragraphs(cls: type) -> tuple[str, str]:
    """The first paragraph of a class's docstring, and the others."""
    first, _, rest = (inspect.getdoc(cls) or "").partition("\n\n")
    return ("" if first.startswith(f"{cls.__name__}(") else " ".join(first.split())), rest


def descriptions(cls: type) -> dict[str, str]:
    """The docstrings below a dataclass's fields, by field; those of a subclass replace inherited ones."""
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(each)))
        except (OSError, TypeError, SyntaxError):  # made at run time, or built in
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for field, after in pairwise(body):
            documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and documented:
                found[field.target.id] = " ".join(str(after.value.value).split())  # type: ignore[attr-defined]
    return found
