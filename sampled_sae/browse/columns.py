"""Numbers in files that a page reads from disk: typed arrays as base64, inside a script that hands them over."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
from torch import Tensor

RECEIVER = "sampledSae"
"""The page's function that takes what a file holds: fetch() may not read files, but scripts may be loaded."""


def column(values: Tensor) -> dict[str, str]:
    """Numbers of any shape, flat, for the page: floats of 32 bits, whole numbers in as few bits as they need.

    Whole numbers are -1, which stands for none, or more; -1 becomes the largest number of the unsigned types.
    """
    array = values.detach().cpu().contiguous().flatten().numpy()
    kind = "f4" if values.is_floating_point() else _narrowest(array)
    with np.errstate(over="ignore"):
        content = array.astype(f"<{kind}")
    return {"type": kind, "data": base64.b64encode(content.tobytes()).decode()}


def _narrowest(array: np.ndarray) -> str:
    if array.size and int(array.min()) < -1:
        raise ValueError("whole numbers below -1 have no place in a column")
    largest = int(array.max()) if array.size else 0
    # The largest number of the unsigned types is kept for none.
    return next(kind for kind, end in (("u1", 2**8 - 1), ("u2", 2**16 - 1), ("i4", 2**31)) if largest < end)


def script(name: str, content: Any) -> str:
    """The text of a script file that hands `content` over under a name.

    All of it is ASCII, and nothing in it can end a script or begin a comment of HTML.
    """
    text = json.dumps([name, content], separators=(",", ":"), allow_nan=False)
    text = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return f"{RECEIVER}(...{text});\n"
