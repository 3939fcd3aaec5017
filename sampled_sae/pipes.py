"""Ending quietly when the reader of our output is gone, as in `sampled-sae train --help | head`."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

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
