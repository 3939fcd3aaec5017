"""The jinja2 environment, and what the pages share: tables, figures, legends, training curves, findings in words."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sampled_sae.reporting.collect import Log
from sampled_sae.reporting.figures import Styles
from sampled_sae.reporting.palette import DARK, css
from sampled_sae.reporting.panels import curves, dash
from sampled_sae.reporting.sweep import BASE, Configuration, Key, group_title
from sampled_sae.reporting.tables import range_of, text_of
from sampled_sae.training.learner import METRICS
from sampled_sae.utils.measures import Better, Stat, Table, form, listed, shown
from sampled_sae.utils.paired import leaders

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from jinja2 import Environment

HERE = Path(__file__).parent
BOLD = "\0"  # encloses what is bold in a sentence; it cannot be in a text that is shown


class Mark(NamedTuple):
    """An entry of a legend."""

    glyph: str
    text: str
    color: str


class Figure(NamedTuple):
    """A figure with its caption; the name is its id on the page."""

    name: str
    figure: go.Figure
    title: str
    caption: str = ""
    key: Sequence[Mark] = ()


# ---- templates -----------------------------------------------------------------------------------------


def render(template: str, folder: Path = HERE, /, **values: Any) -> str:
    """A template of `folder`/templates as text; all values are escaped, hidden characters made visible."""
    return trusted(_environment(folder).get_template(template).render(**values))


def trusted(text: str) -> str:
    """Text that templates insert as it is: HTML, styles and scripts of ours."""
    from markupsafe import Markup

    return Markup(text)


@functools.cache
def _environment(folder: Path) -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(folder / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_visible,
    )
    made.filters |= {"in_script": in_script, "settings": _settings, "hashed": _hashed}
    made.filters |= {"bolded": lambda text: text.split(BOLD), "breaking": _breaking}
    made.globals |= {"dark": DARK, "dash": dash, "form": form, "page_rows": page_rows, "text_columns": text_columns}
    made.globals["source"] = lambda name: trusted((folder / name).read_text(encoding="utf-8"))
    made.globals |= {"plotly_script": _plotly_script, "colors": lambda: trusted(css())}
    return made


def _visible(value: Any) -> Any:
    """What jinja2 does with each value before it is escaped; markup has been through it."""
    return shown(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _plotly_script() -> str:
    from plotly.offline import get_plotlyjs

    return trusted(get_plotlyjs())


def _hashed(text: str) -> str:
    """How a content security policy names a style or script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def in_script(content: Any) -> str:
    """A figure or other content as JSON that cannot end the script block it is in."""
    is_figure = hasattr(content, "to_plotly_json")
    text = content.to_json() if is_figure else json.dumps(content, ensure_ascii=False, allow_nan=False)
    return trusted(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _settings(content: Any) -> str:
    """Settings as indented JSON, for <pre>."""
    from markupsafe import escape

    return escape(shown(json.dumps(content, indent=2, ensure_ascii=False), keep="\n"))


def _breaking(text: str) -> str:
    """A method's name, which may break after a colon or comma."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"([:,])(?=\w)", r"\1<wbr>", str(escape(shown(text)))))


def bold(text: str) -> str:
    """Text that is bold where a template shows the sentence around it with the macro `sentence`."""
    return BOLD + shown(text) + BOLD


# ---- tables --------------------------------------------------------------------------------------------


class PageCell(NamedTuple):
    """A cell of a table on a page."""

    text: str
    range: str  # under the text; empty for none
    value: str  # what the column is sorted by
    kind: str  # its classes


def text_columns(table: Table) -> set[int]:
    """Columns that hold text and are aligned left."""
    cells = [[row[c] for row in table.rows] for c in range(len(table.columns))]
    return {c for c, column in enumerate(table.columns) if column.wide or any(isinstance(x, str) for x in cells[c])}


def page_rows(table: Table) -> Iterator[list[PageCell]]:
    """The rows of a table as a page shows them."""
    left = text_columns(table)
    for r, row in enumerate(table.rows):
        cells = []
        for c, (cell, column) in enumerate(zip(row, table.columns, strict=True)):
            kinds = ["best"] * ((r, c) in table.bold) + ["rule"] * (r in table.rules and r > 0)
            kinds += ["text"] if column.wide else ["left"] if c in left and c else []
            value = cell[0] if isinstance(cell, tuple) else cell
            ends = " to ".join(range_of(cell, column) or ())
            cells.append(PageCell(text_of(cell, column), ends, "" if value is None else f"{value}", " ".join(kinds)))
        yield cells


# ---- training ------------------------------------------------------------------------------------------

CURVES = [(metric.name, metric.title, metric.meaning) for metric in METRICS if metric.headline]


def several(rows: Sequence[Configuration]) -> bool:
    """Whether some configuration has more than one seed."""
    return any(len(row.runs) > 1 for row in rows)


def training(
    rows: Sequence[Configuration], look: Styles, log: Log, note: str, prefix: str = "", missing: str = ""
) -> dict[str, Any]:
    """What the macro `training` shows: four figures and a legend per group; ids begin with `prefix`.

    `missing` is the reason where there are no curves.
    """
    if not any(run["name"] in log for row in rows for run in row.runs):
        return {"why": note or missing or "The curves are missing: the log has no lines for these SAEs."}
    groups = [
        (group_title(group), style.color, [row.label for row in rows if row.group == group])
        for group, style in look.items()
    ]
    figures = [
        Figure(f"{prefix}curve-{key}", curves(rows, look, log, key), title, caption) for key, title, caption in CURVES
    ]
    return {"why": "", "note": note, "prefix": prefix, "groups": groups, "figures": figures, "several": several(rows)}


# ---- findings ------------------------------------------------------------------------------------------
# What the numbers of several configurations show, in words: a best one is named only where seeds tell it apart.

Name = Callable[[str], str]  # writes a configuration's label


@dataclass(frozen=True)
class Finding:
    """One number of all configurations that have it, the best mean first."""

    title: str
    better: Better
    digits: int
    null: float | None  # value without any information; None: none
    rows: tuple[Configuration, ...]
    stats: tuple[Stat, ...]
    counts: tuple[int, ...]  # measured SAEs of each
    tied: tuple[Configuration, ...]  # those not clearly worse than the first; the first alone is a clear winner

    @property
    def winner(self) -> Configuration | None:
        """The configuration that is clearly better than each other one over seeds."""
        return self.rows[0] if len(self.rows) > 1 and len(self.tied) == 1 else None

    @property
    def seeds(self) -> str:
        """How many SAEs were measured of each configuration."""
        low, high = min(self.counts), max(self.counts)
        return f"n = {low}" if low == high else f"n = {low} to {high}"

    @property
    def single(self) -> bool:
        """Whether no configuration has a second seed, so that nothing is known of the noise."""
        return max(self.counts) == 1

    def value(self, index: int = 0) -> str:
        """The mean of a row and, of several seeds, the smallest and the largest."""
        mean, low, high = (form(one, self.digits) for one in self.stats[index])
        return mean if low == high else f"{mean} ({low} to {high})"

    def verdict(self, name: Name = str) -> str:
        """A few words for a table."""
        if len(self.rows) == 1:
            return "only one was measured"
        if self.winner:
            return name(self.winner.label)
        if self.single:
            return "not known: one SAE each"
        return f"no clear winner: {listed([name(row.label) for row in self.tied])}"

    def sentence(self, name: Name = str) -> str:
        """What the number shows, with the number of SAEs and their spread."""
        what, first, last = name(self.title), name(self.rows[0].label), name(self.rows[-1].label)
        if len(self.rows) == 1:
            return f"{what} of {first} is {self.value()}; {self.seeds}."
        if form(self.stats[0].mean, self.digits) == form(self.stats[-1].mean, self.digits):
            return f"{what} is {form(self.stats[0].mean, self.digits)} for all {len(self.rows)} configurations."
        if self.winner:
            second = f"{name(self.rows[1].label)}, {self.value(1)}{self._base(name, 0, 1)}"
            return f"{what}: {first} is best, {self.value()}, ahead of {second}; {self.seeds}."
        ends = f"from {self.value()} ({first}) to {self.value(-1)} ({last}){self._base(name, 0, len(self.rows) - 1)}"
        if self.single:
            return f"{what} ranges {ends}."
        among = "all" if len(self.tied) == len(self.rows) else f"{len(self.tied)} of {len(self.rows)}"
        alone = sum(count == 1 for row, count in zip(self.rows, self.counts, strict=True) if row in self.tied)
        one = f" ({alone} of them with one seed, which decides nothing)" if alone else ""
        return f"{what}: no clear winner among {among} configurations{one}. Means range {ends}; {self.seeds}."

    def _base(self, name: Name, *told: int) -> str:
        """The value of BatchTopK, unless its row is among those that were told."""
        at = next((i for i, row in enumerate(self.rows) if row.group == BASE), 0)
        return (
            "" if at in told or self.rows[at].group != BASE else f"; {name(self.rows[at].label)} has {self.value(at)}"
        )


ONE_SEED = (
    "With one SAE per configuration the noise between seeds is not known, so none is named best: train several seeds."
)


def finding(
    rows: Sequence[Configuration], key: Key, title: str, better: Better, digits: int, null: float | None = None
) -> Finding | None:
    """Compare the rows that have the number; None if none has it."""
    known = [row for row in rows if row.stat(key)]
    if not known:
        return None
    tied = leaders([row.by_seed(key) for row in known], better) or [0]
    sign = 1 if better == "low" else -1
    order = sorted(range(len(known)), key=lambda i: (i != tied[0], sign * (known[i].mean(key) or 0.0)))
    stats = [known[i].stat(key) for i in order]
    return Finding(
        title,
        better,
        digits,
        null,
        tuple(known[i] for i in order),
        tuple(stat for stat in stats if stat),
        tuple(len(known[i].by_seed(key)) for i in order),
        tuple(known[i] for i in tied),
    )


def in_words(findings: Sequence[Finding], name: Name = str) -> list[str]:
    """A sentence for each, and one on the seeds where no configuration has two."""
    sentences = [one.sentence(name) for one in findings]
    compared = [one for one in findings if len(one.rows) > 1]
    return [*sentences, *([ONE_SEED] if compared and all(one.single for one in compared) else [])]
