"""`sampled-sae`: parse the arguments, call the library, print. User errors print one line and exit with code 2."""

from __future__ import annotations

import difflib
import errno
import io
import os
import re
import select
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import UnionType
from typing import Any, TextIO, Union, get_args

import tyro

from sampled_sae import __version__
from sampled_sae.cli.help import Command, command_help, groups, overview
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.measures import shown
from sampled_sae.utils.ranks import own_rank
from sampled_sae.utils.watch import exiting

PROGRAM = "sampled-sae"
HELP = ("-h", "--help")
COMMANDS = {
    "train": Command("train.Train", "Train", "train SAEs on a language model's activations, or on your own"),
    "resume": Command("train.Resume", "Train", "continue an interrupted run, or extend a finished one"),
    "cache": Command("cache.Cache", "Train", "write a language model's activations to disk"),
    "sweep": Command("sweep.Sweep", "Train", "run many trainings on the GPUs of a machine or on Slurm"),
    "sweep status": Command("sweep.Status", "Train", "show the jobs of a sweep"),
    "sweep cancel": Command("sweep.Cancel", "Train", "stop the jobs of a sweep"),
    "eval": Command("evaluate.make_eval", "Evaluate", "core metrics, probing, absorption, automated interpretability"),
    "compare": Command("evaluate.Compare", "Evaluate", "similarity of SAEs across seeds and methods"),
    "report": Command("evaluate.Report", "Evaluate", "a page with tables and figures of a sweep"),
    "browse": Command("evaluate.Browse", "Evaluate", "a page that shows the latents of an SAE"),
    "convert": Command("share.Convert", "Share", "SAEs of SAELens, dictionary_learning and others, and back"),
    "push": Command("share.Push", "Share", "upload SAEs to the Hugging Face hub"),
    "reproduce": Command("experiments.Reproduce", "Experiments", "the whole paper, from training to its tables"),
    "synthetic": Command("experiments.Synthetic", "Experiments", "the paper's experiment on data with known features"),
    "merge": Command("experiments.Merge", "Experiments", "merge runs of the synthetic experiment"),
    "study": Command("experiments.StudyCommand", "Experiments", "a declared comparison of methods, with verdicts"),
}
"""All commands; only the one that is run is imported."""
BROKEN_PIPE = 141
"""Exit code that shells give to a process whose output has no reader."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point. Exit codes: 2 for a user error, 130 for an interruption, 141 if the output has no reader."""
    with warnings.catch_warnings(), _exit_on_broken_pipe(), exiting():
        warnings.showwarning = _one_line_warning
        with _printing_once(), _names_in_one_line():
            _run(sys.argv[1:] if arguments is None else arguments)


@contextmanager
def _printing_once() -> Iterator[None]:
    """Of the processes that torchrun has started, only the first prints what is no error."""
    with ExitStack() as stack:
        if own_rank():
            nowhere = stack.enter_context(open(os.devnull, "w"))  # noqa: PTH123 (no path)
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        yield


@contextmanager
def _names_in_one_line() -> Iterator[None]:
    """A name that the file system does not take is the user's, wherever it is met first."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise UserError(f"{_shortened(str(error.filename))}: too long for the name of a file or folder") from None


def _one_line_warning(message: Warning | str, *place: Any, **rest: Any) -> None:
    print(f"warning: {shown(message)}", file=sys.stderr)


def _run(arguments: list[str]) -> None:
    if arguments == ["--version"]:
        print(f"{PROGRAM} {__version__}")
        return
    if name := next((name for name in (" ".join(arguments[:2]), *arguments[:1]) if name in COMMANDS), None):
        parse(load(name), arguments[len(name.split()) :], f"{PROGRAM} {name}").run()
    elif not arguments or arguments[0] in HELP:
        print(overview(PROGRAM, COMMANDS, __version__), end="")
    else:
        near = difflib.get_close_matches(arguments[0], COMMANDS, 1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise UserError(
            f"command = {_shortened(arguments[0])!r}: not known; {meant}{PROGRAM} --help lists the commands"
        )


def load(name: str) -> Any:
    """The dataclass of a command."""
    module, found = COMMANDS[name].target.split(".")
    command = getattr(import_module(f"{__name__}.{module}"), found)
    return command if isinstance(command, type) else command()


def parse(command: Any, arguments: Sequence[str], program: str, **settings: Any) -> Any:
    """An instance of a command's dataclass; a mistake in the arguments raises a UserError of one line.

    A command may have `OLD_FLAGS` and `REMOVED`, dictionaries of earlier flags with their present names or their
    replacements, and `defaults(arguments)`, which gives the instance whose values stand for flags that are not given.
    """
    for word in arguments:
        if word in getattr(command, "REMOVED", ()):
            raise UserError(f"{word}: is a parameter of the method now; write {command.REMOVED[word]}")
    renamed = [part for word in arguments for part in _present_name(word, getattr(command, "OLD_FLAGS", {}))]
    if hasattr(command, "defaults"):
        settings["default"] = command.defaults(renamed)
    if asked := next((word for word in arguments if word in HELP or word.startswith("--help-")), None):
        wanted = asked.removeprefix("--help-") if asked not in HELP else ""
        print(command_help(command, program, settings.get("default"), wanted), end="")
        raise SystemExit(0)
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_optional)
    parser = partial(tyro.cli, command, prog=program, args=renamed, registry=registry, **settings)
    try:
        with redirect_stderr(io.StringIO()):
            return parser()
    except SystemExit as stop:
        if stop.code != 2:
            raise
    raise UserError(_one_line(_unwrapped(parser), renamed, program, command))


def _unwrapped(parser: Callable[[], Any]) -> str:
    """tyro's error on lines of any length, and without the characters that a terminal may lack."""
    boxed, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "1000000"
    try:
        with redirect_stderr(boxed), redirect_stdout(io.StringIO()), suppress(SystemExit):
            parser()
    finally:
        del os.environ["COLUMNS"]
        if columns is not None:
            os.environ["COLUMNS"] = columns
    return boxed.getvalue()


def _optional(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    """Flags whose default is None: None cannot be given."""
    if info.type_origin not in (Union, UnionType) or type(None) not in get_args(info.type):
        return None
    inner: Any = Union[tuple(kind for kind in get_args(info.type) if kind is not type(None))]  # noqa: UP007
    made = tyro.constructors.PrimitiveTypeInfo.make(inner, info.markers)
    spec = tyro.constructors.ConstructorRegistry.get_primitive_spec(made)
    if not isinstance(spec, tyro.constructors.PrimitiveConstructorSpec):
        return None

    def shown(value: Any) -> list[str]:
        return ["unset"] if value is None else spec.str_from_instance(value)

    return replace(spec, is_instance=lambda v: v is None or spec.is_instance(v), str_from_instance=shown)


def _present_name(word: str, names: Mapping[str, str]) -> list[str]:
    flag, equals, value = word.partition("=")
    return f"{names[flag]}{equals}{value}".split(" ", 1) if flag in names else [word]


METAVARS = {"INT": "an integer", "FLOAT": "a number", "[INT [INT ...]]": "integers", "[FLOAT [FLOAT ...]]": "numbers"}


def _one_line(box: str, arguments: Sequence[str], program: str, command: Any) -> str:
    """tyro's error, a box of several sections, as `--flag = 'value': what would be right`."""
    lines = [line.strip() for line in box.splitlines()][2:]  # the title comes first, with a line below it
    breaks = [n for n, line in enumerate(lines) if line and not line.strip("-")]
    first = lines[: breaks[0]] if breaks else lines
    text = " ".join(first).strip()
    if found := re.match(r"Error parsing (\S+): (.*)", text):
        flag = _given(found[1], arguments)
        helped = next((line for line in lines if line.startswith("--") and found[1].split("/")[-1] in line), "")
        expected = helped.rpartition(", ")[2].partition(" ")[2]
        right = f"must be {METAVARS.get(expected, expected)}" if expected else found[2]
        values = _values(flag, arguments) or []
        given = " ".join(values if expected.startswith("[") else values[:1])
        return f"{flag} = {_shortened(given)!r}: {right}"
    if found := re.match(r"invalid choice (.*) for argument '(\S+)'\. Expected one of \((.*)\)\.", text):
        choices = found[3].rstrip(",").replace("'", "")
        return f"{_given(found[2], arguments)} = {_shortened(found[1])}: must be one of {choices}"
    if found := re.match(r"Missing value for argument '(\S+)'", text):
        return f"{_given(found[1], arguments)}: needs a value"
    if found := re.match(r"Unrecognized options: ?(.*)", text):
        return f"{_shortened(found[1].replace(', ', ' ')) or repr('')}: not known; {program} --help lists the options"
    if text.startswith("Missing from"):
        names = [line.split()[0] for line in first[1:] if line.startswith("--") or line.isupper()]
        positional = [option.flag for option in groups(command)[0].options if option.positional and option.required]
        # tyro shows the types of positional arguments; those that are missing are the last ones.
        unnamed = iter(positional[-sum(not name.startswith("--") for name in names) :])
        shown = [name if name.startswith("--") else next(unnamed, name) for name in names]
        return f"{', '.join(shown)}: is missing; {program} --help describes it"
    return text or box.strip()


def _shortened(text: str) -> str:
    """A value as errors show it."""
    return text if len(text) <= 200 else f"{text[:200]}..."


def _given(flags: str, arguments: Sequence[str]) -> str:
    """Of a flag's names, with slashes between them, the one that is among the arguments."""
    return next((name for name in flags.split("/") if _values(name, arguments) is not None), flags)


def _values(flag: str, arguments: Sequence[str]) -> list[str] | None:
    """The words after a flag, the last time that it is given; none if it is not."""
    found = None
    for n, word in enumerate(arguments):
        if word.startswith(f"{flag}="):
            found = [word.partition("=")[2]]
        elif word == flag:
            rest = arguments[n + 1 :]
            end = next((i for i, other in enumerate(rest) if other.startswith("--")), len(rest))
            found = list(rest[:end])
    return found


@contextmanager
def _exit_on_broken_pipe() -> Iterator[None]:
    """Exit if the reader of the output is gone, as in `... --help | head`; another broken pipe stays an error."""
    try:
        try:
            yield
        finally:
            # Otherwise the interpreter would report what is left in the buffer on its exit.
            sys.stdout.flush()
    except BrokenPipeError:
        unread = [stream for stream in (sys.stdout, sys.stderr) if _is_unread(stream)]
        if not unread:
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in unread:
            os.dup2(nowhere, stream.fileno())
        sys.exit(BROKEN_PIPE)


def _is_unread(stream: TextIO) -> bool:
    """Whether the other end of its pipe is closed."""
    try:
        stream.flush()
        poll = select.poll()
        poll.register(stream.fileno(), 0)  # errors are always reported
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except BrokenPipeError:
        return True
    except (AttributeError, OSError, ValueError):  # no poll on Windows, no file number for a test's stream
        return False
