"""Other people's libraries: imported where they are needed, kept quiet, and what fails in them said in one line."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sampled_sae.utils.errors import UserError


def package(name: str, setting: str, extra: str = "lm") -> Any:
    """Import an optional package; `setting` is the one that needs it, with its value, `extra` the one that holds it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(f"{setting}: {name.split('.')[0]} is missing; pip install 'sampled-sae[{extra}]'") from None


def reason(error: Exception) -> str:
    """What a foreign error says, in one line of bearable length."""
    return " ".join(str(error).split())[:300] or type(error).__name__


@contextmanager
def quiet(bars: bool = False) -> Iterator[None]:
    """Keep transformers' warnings off the terminal, and its bars too unless they are wanted."""
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
    than a minute, and tell less."""
    hub = importlib.import_module("huggingface_hub")
    if not isinstance(hub.try_to_load_from_cache(name, "config.json"), str):
        hub.HfApi().model_info(name, timeout=10)


def stream(rows: Iterator[Any], who: str) -> Iterator[Any]:
    """The rows of a dataset as they come over the network; `who` is the setting that names it, with its value."""
    number = 0
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        # Errors of many families come up here, none of which is a bug of ours.
        except Exception as error:
            raise UserError(f"{who}: the hub's stream broke off at row {number} ({reason(error)})") from error
        yield row
        number += 1
