"""The training curves of a page."""

from __future__ import annotations

from sampled_sae.report import page_parts as parts
from sampled_sae.report import plotting
from sampled_sae.report.curves import curves
from sampled_sae.report.rows import Configuration
from sampled_sae.report.text import in_html
from sampled_sae.report.training_log import Log

CURVES = [
    ("loss", "Loss", "Mean loss a sample, on a logarithmic scale."),
    ("fve", "FVE", "Of the training batches, with the SAE's own pools."),
    ("dead", "Dead latents", "Share of latents silent for longer than the setting dead_after."),
    ("churn", "Pool churn", "Share of the candidate pool that was not in the pool of the step before."),
]


def training_part(
    rows: list[Configuration], look: plotting.Styles, log: Log, note: str, prefix: str = "", missing: str = ""
) -> str:
    """The four curves and the buttons that pick a group; ids begin with `prefix`. `missing`: why there are none."""
    if not any(run["name"] in log for row in rows for run in row.runs):
        why = note or missing or "The curves are missing: the log says nothing of these SAEs."
        return f"<p class='note'>{in_html(why)}</p>"
    plots = "".join(
        parts.figure_block(f"{prefix}curve-{key}", curves(rows, look, log, key), title, caption)
        for key, title, caption in CURVES
    )
    spread = parts.several(
        rows, " Lines are means over seeds; the bands of a picked group reach from the smallest to the largest."
    )
    return f"""<p class="note">Pick a group to tell its lines apart.{spread} {in_html(note)}</p>
{parts.picker(rows, look, f"{prefix}group")}<div class="pair">{plots}</div>"""
