"""The synthetic experiment's tables in a terminal, on small made-up results."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from sampled_sae.report.terminal import Column, best_of, configurations, form, print_results

BUCKETS = ("LF+HA", "HF+HA", "LF+LA", "HF+LA")


def sae(label: str, seed: int = 0, **numbers: Any) -> dict[str, Any]:
    return {
        "name": f"{label}-s{seed}",
        "label": label,
        "group": "l2",
        "seed": seed,
        "fve_train": 0.8,
        "fve_heldout": 0.75,
        "fve_heldout_threshold": 0.7,
        "l0_threshold": 60.0,
        "dead": 0.1,
        "fidelity": None,
        "recovery": {"LF+HA": 1.0, "HF+HA": 0.5, "LF+LA": 0.0, "HF+LA": 0.0},
        **numbers,
    }


def results(*saes: dict[str, Any]) -> dict[str, Any]:
    part = {"features": 256, "p": 0.02, "sigma": 1.0, "mean_activation": 0.801, "std_activation": 0.605}
    buckets = [{"name": name, **part} for name in BUCKETS]
    data = {"coherence": 0.0625, "expected_l0": 65.0, "observed_l0": 65.1, "noise_db": 20.0, "buckets": buckets}
    return {"data": data, "train": {"steps": 5000, "batch_size": 4096}, "saes": list(saes)}


def printed(content: dict[str, Any], width: int = 100, terminal: bool = False) -> str:
    stream = io.StringIO()
    colours: Any = "standard" if terminal else None
    print_results(content, Console(file=stream, width=width, force_terminal=terminal, color_system=colours))
    return stream.getvalue()


def row(text: str, label: str) -> list[str]:
    (found,) = (line for line in text.splitlines() if line.startswith(label))
    return found.removeprefix(label).split()


def test_data_comes_first() -> None:
    text = printed(results(sae("a")))
    assert row(text, "LF+HA") == ["256", "0.020", "1.00", "0.801", "0.605"]
    assert "coherence 0.0625" in text and "noise 20 dB" in text
    assert text.index("Mutual coherence") < text.index("held-out")


def test_one_row_a_configuration_with_means() -> None:
    text = printed(results(*(sae("a", seed, fve_train=0.1 * seed) for seed in range(3)), sae("b", dead=0.5)))
    assert row(text, "a ")[:5] == ["0.100", "0.750", "0.700", "60.0", "0.10*"]
    assert row(text, "b ")[:5] == ["0.800*", "0.750", "0.700", "60.0", "0.50"]
    assert "means over up to 3 seeds" in " ".join(text.split())


def test_missing_numbers_are_dashes() -> None:
    text = printed(results(sae("a", fve_train=None, recovery=None), sae("b", fve_train=float("nan"))))
    assert row(text, "a ") == ["-", "0.750", "0.700", "60.0", "0.10", "-", "-", "-", "-", "-"]
    assert "nan" not in text.lower()


@pytest.mark.parametrize("width", [80, 100, 200])
def test_fits_the_width(width: int) -> None:
    labels = ["BatchTopK", "uniform 30% to 100% annealed, and a rather long remark", "x" * 70]
    text = printed(results(*(sae(label) for label in labels)), width)
    assert max(map(len, text.splitlines())) <= width
    # Long labels fold; the numbers stay whole.
    assert text.count("0.750") >= 3 and "…" not in text


def test_plain_without_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    print_results(results(sae("a"), sae("b", fve_train=0.9)))
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert row(text, "b ")[0] == "0.900*"
    assert max(map(len, text.splitlines())) <= 100


def test_colour_in_a_terminal() -> None:
    assert "\x1b[1;32m0.900*" in printed(results(sae("a"), sae("b", fve_train=0.9)), terminal=True)


@pytest.mark.parametrize("label", ["[red]x[/red]", "[/]", "<b>x", "x\x1b[31my"])
def test_hostile_labels_stay_text(label: str) -> None:
    text = printed(results(sae(label), sae("b")))
    assert label.replace("\x1b", "?") in text
    assert "\x1b" not in text


def test_one_sae_has_no_best() -> None:
    assert "*" not in " ".join(row(printed(results(sae("a"))), "a "))


def test_no_bucket_is_invented() -> None:
    text = printed({"saes": [sae("a")]})
    assert row(text, "a ") == ["0.800", "0.750", "0.700", "60.0", "0.10", "-"]


def test_best_is_judged_as_written() -> None:
    high = Column("x", "x", 2, "high")
    assert best_of([0.501, 0.499, None, 0.3], high) == [True, True, False, False]
    assert best_of([0.5, 0.3], high._replace(best="low")) == [False, True]
    assert best_of([0.5, 0.3], high._replace(best=None)) == [False, False]
    assert best_of([0.5, 0.5], high) == [False, False]


def test_all_features_are_weighed_by_bucket_size() -> None:
    content = results(sae("a"))
    content["data"]["buckets"][0]["features"] = 768
    (only,) = configurations(content)
    assert only.mean("recovered") == pytest.approx((768 + 128) / (768 + 3 * 256))


def test_an_empty_bucket_does_not_count() -> None:
    content = results(sae("a", recovery={"LF+HA": 1.0, "HF+HA": 0.5, "LF+LA": 0.0, "HF+LA": None}))
    assert configurations(content)[0].mean("recovered") is None
    content["data"]["buckets"][3]["features"] = 0
    assert configurations(content)[0].mean("recovered") == pytest.approx(0.5)


def test_numbers_as_text() -> None:
    assert form(-0.0001, 3) == "0.000"
    assert form(12345.6, 0) == "12,346"
    assert form(None, 2) == form(float("inf"), 2) == form(True, 2) == "-"
