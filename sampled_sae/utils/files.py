"""Files and folders that are written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from sampled_sae.utils.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals to write at `path` into one line for the user."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors wraps the operating system's refusal into a text.
        wrapped = re.search(r"os error (\d+)", str(error))
        number = error.errno if isinstance(error, OSError) else wrapped and int(wrapped[1])
        if number is None:
            raise
        if number in FULL:
            raise UserError(f"{path}: the disk is full; free some space there or choose another folder") from error
        raise UserError(f"{path}: cannot write there ({os.strerror(number)}); choose another folder") from error


def make_folder(path: Path) -> Path:
    """Create `path` (and its parents) and make sure that it can be written to."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        # root may pass an access check that a write then fails, so really write.
        with tempfile.TemporaryFile(dir=path):
            pass
    return path


@contextmanager
def alone_in(path: Path) -> Iterator[None]:
    """Make the folder if need be and keep every other process out of it, as far as it asks here too."""
    make_folder(path)
    try:
        import fcntl
    except ImportError:  # not on Windows; there, nobody is kept out
        yield
        return
    with writing(path):
        file = (path / ".lock").open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"out = {str(path)!r}: another process is at work there; choose another folder") from None
        except OSError:  # a file system without locks
            pass
        yield


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` through a temporary name, so that no reader sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with writing(path):
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write `content` as JSON that every parser reads: NaN and infinity are refused, not written."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file; a missing or damaged one gets a clear line."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:  # RecursionError: objects nested too deeply
        what = str(error).split(";")[0]
        raise UserError(f"{path}: not valid JSON ({what}); was it cut short?") from None


def crc32(path: Path) -> int:
    """Checksum of a file's bytes."""
    found = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(2**22):
            found = zlib.crc32(chunk, found)
    return found


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Give a temporary folder beside `path`; on success it takes the place of `path`, whole.

    Where `path` is already there, the old one is moved aside first and removed after.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    try:
        with writing(path):
            yield temporary
            for file in temporary.iterdir():
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
            # mkdtemp makes private folders; results are meant to be shared.
            temporary.chmod(0o755)
            _replace_folder(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace_folder(new: Path, path: Path) -> None:
    if not path.exists():
        new.rename(path)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".old", dir=path.parent))
    path.rename(aside / path.name)
    try:
        new.rename(path)
    except OSError:
        (aside / path.name).rename(path)
        aside.rmdir()
        raise
    shutil.rmtree(aside, ignore_errors=True)
