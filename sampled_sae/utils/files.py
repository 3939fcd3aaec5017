"""Files and folders that are written whole or not at all."""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from sampled_sae.utils.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)  # of file systems that have no locks
CHUNK = 2**24


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the operating system's errors when writing to `path` into one line."""
    try:
        yield
    except Exception as error:
        # safetensors has the operating system's error in its message, and so has tokenizers, in a bare Exception.
        foreign = type(error) in (SafetensorError, Exception)
        wrapped = re.search(r"os error (\d+)", str(error)) if foreign else None
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


def check_writable(path: Path) -> None:
    """Raise the error that `make_folder` would raise, but create nothing: known before long work."""
    nearest = next(each for each in (path.absolute(), *path.absolute().parents) if os.path.lexists(each))
    with writing(path), tempfile.TemporaryFile(dir=nearest):
        pass


@contextmanager
def alone_in(path: Path, wait: float = 0) -> Iterator[None]:
    """Create the folder if needed and lock it: for a second process this is a one-line error, after `wait` seconds."""
    from filelock import FileLock, Timeout

    make_folder(path)
    lock = FileLock(path / ".lock")
    try:
        with writing(path / ".lock"):
            lock.acquire(timeout=wait)
    except Timeout:
        raise UserError(f"out = {str(path)!r}: another process is at work there; choose another folder") from None
    except UserError as error:
        if not isinstance(error.__cause__, OSError) or error.__cause__.errno not in NO_LOCKS:
            raise
    try:
        yield
    finally:
        lock.release()


def remove_leftovers(folder: Path, name: str = "*") -> None:
    """Remove what killed writers of `name`, a glob pattern, left in the folder; only its one writer may do so.

    A folder that was moved aside for its replacement moves back if the replacement is not there.
    """
    for old in folder.glob(f".{name}.*.old"):
        for kept in old.iterdir():
            if not (folder / kept.name).exists():
                kept.rename(folder / kept.name)
        shutil.rmtree(old, ignore_errors=True)
    for temporary in folder.glob(f".{name}.*.tmp"):
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def sync(path: Path) -> int:
    """Wait until the file is on the disk; returns its size."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


def checksum(path: Path) -> int:
    """Checksum of a file: CRC-32 over the CRC-32s of its chunks of 16 MiB, which are computed in parallel."""
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return zlib.crc32(b"")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, ThreadPoolExecutor() as pool:
            view = memoryview(mapped)
            parts = [view[at : at + CHUNK] for at in range(0, len(view), CHUNK)]
            try:
                sums = list(pool.map(zlib.crc32, parts))
            finally:
                for part in (view, *parts):
                    part.release()
    return zlib.crc32(b"".join(number.to_bytes(4, "little") for number in sums))


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`, which replaces `path` on success, so that no reader sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with writing(path):
            sync(temporary)
            temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink()


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path`, whole or not at all."""
    with replacing(path) as temporary, writing(path):
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """Write `content` as standard JSON: NaN and infinity are errors."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def read_text(path: Path) -> str:
    """Read a text file; a missing one, or one that is not UTF-8, is a one-line error."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); was it damaged?") from None


def read_json(path: Path) -> Any:
    """Read a JSON file; a missing or damaged one is a one-line error. So are names given twice, NaN and infinity."""
    text = read_text(path)
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as error:  # RecursionError: objects nested too deeply
        what = str(error).split(";")[0]
        raise UserError(f"{path}: not valid JSON ({what}); was it cut short?") from None


def parse_json(text: str | bytes) -> Any:
    """JSON as the standard has it; ValueError or RecursionError if it is damaged."""
    return json.loads(text, object_pairs_hook=_once, parse_float=_finite, parse_constant=_finite, parse_int=_whole)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a name is given twice in one object")
    return made


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:20]} is not finite")
    return number


def _whole(text: str) -> int:
    """Integers beyond the range of floats would fail wherever they meet one."""
    number = int(text)
    if number.bit_length() > 1023:
        raise ValueError(f"the number {text[:20]}... is too large")
    return number


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`, which replaces `path` on success.

    An existing folder is moved aside first and removed after.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    try:
        with writing(path):
            yield temporary
            for file in temporary.rglob("*"):
                if file.is_file():
                    sync(file)
            # mkdtemp creates private folders; results are meant to be shared.
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
