"""Metrics of a finished training: numbers in `metadata["training"]` of each SAE."""

from sampled_sae.utils.measures import Metric

METRICS = tuple(
    metric._replace(evaluation="training")
    for metric in (
        Metric(
            "heldout_fvu",
            "FVU, held out",
            "Fraction of variance unexplained at the inference threshold, on the tokens that calibrated it.",
            "low",
            ("heldout", "fvu"),
            null=1.0,
        ),
        Metric(
            "dead",
            "Dead at the end",
            "Share of latents that had not fired for more than dead_after tokens when training ended.",
            "low",
            ("dead",),
        ),
        Metric(
            "ever_pooled",
            "Ever pooled",
            "Share of latents that were in a candidate pool at least once.",
            None,
            ("ever_pooled",),
        ),
        Metric(
            "seconds",
            "Seconds",
            "Training time of the whole run, divided by its number of SAEs.",
            None,
            ("seconds",),
            digits=0,
            unit="s",
        ),
    )
)
