"""Names and other text of users as text: in HTML, in pictures and in Markdown, whatever is in it."""

from __future__ import annotations

import html
import re

HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that break a line, or change the direction of what stands around them, without being seen."""


def shown(text: object, keep: str = "") -> str:
    """Text on one line and in one direction: hidden characters become visible escapes, but for those in `keep`."""
    return HIDDEN.sub(lambda found: found[0] if found[0] in keep else _escape(found[0]), str(text))


def _escape(sign: str) -> str:
    return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(sign) or f"\\u{ord(sign):04x}"


def in_html(text: object) -> str:
    """For HTML, between tags and in quoted attributes."""
    return html.escape(shown(text))


def in_markdown(text: object) -> str:
    """For a cell of a Markdown table."""
    return re.sub(r"([\\`*_{}\[\]<>|~$#&])", r"\\\1", shown(text))


def listed(names: list[str], most: int = 3) -> str:
    """`a, b and c`, or `a, b and 5 more`."""
    named = names if len(names) <= most else [*names[: most - 1], f"{len(names) - most + 1} more"]
    return " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)
