"""Ending quietly when the reader of our output is gone, as in `sampled-sae train --help | head`."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TextIO

import tyro

from sampled_sae import __version__
from sampled_sae.cli.browse import Browse
from sampled_sae.cli.cache import Cache
from sampled_sae.cli.compare import Compare
from sampled_sae.cli.eval import Eval
from sampled_sae.cli.report import Report
from sampled_sae.cli.reproduce import Reproduce
from sampled_sae.cli.synthetic import Merge, Synthetic
from sampled_sae.cli.train import Train
from sampled_sae.method.scores import SCORES
from sampled_sae.utils.errors import Interrupted, UserError

GONE = 141
"""The exit code that shells give for it."""


@contextmanager
def while_somebody_reads() -> Iterator[None]:
    """End the process where output finds no reader; a broken pipe of another kind stays an error."""
    try:
        try:
            yield
        finally:
            # What is left in the buffer: later the interpreter would complain in its own way.
            sys.stdout.flush()
    except BrokenPipeError:
        unread = [stream for stream in (sys.stdout, sys.stderr) if _is_unread(stream)]
        if not unread:
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in unread:
            os.dup2(nowhere, stream.fileno())
        sys.exit(GONE)


def _is_unread(stream: TextIO) -> bool:
    """Whether the other end of its pipe is closed."""
    try:
        stream.flush()
        poll = select.poll()
        poll.register(stream.fileno(), 0)  # errors are told unasked
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except BrokenPipeError:
        return True
    except (AttributeError, OSError, ValueError):  # no poll on Windows, no number for a stream of tests
        return False


Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Cache, tyro.conf.subcommand("cache")]
    | Annotated[Eval, tyro.conf.subcommand("eval")]
    | Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Browse, tyro.conf.subcommand("browse")]
    | Annotated[Reproduce, tyro.conf.subcommand("reproduce")]
    | Annotated[Synthetic, tyro.conf.subcommand("synthetic")]
    | Annotated[Merge, tyro.conf.subcommand("merge")]
)


def main(arguments: list[str] | None = None) -> None:
    """Entry point. A user's error is one line and exit code 2; an interruption is 130; nobody to read is 141."""
    with while_somebody_reads():
        _run(arguments)


def _run(arguments: list[str] | None) -> None:
    description = f"Sparse autoencoders with candidate pools. Scores: {', '.join(SCORES)}. --version: tells its own."
    if (sys.argv[1:] if arguments is None else arguments) == ["--version"]:
        print(f"sampled-sae {__version__}")
        return
    try:
        command: Any = tyro.cli(Command, prog="sampled-sae", description=description, args=arguments)
        command.run()
    except Interrupted as stop:
        print(f"stopped: {stop}", file=sys.stderr)
        sys.exit(130)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
