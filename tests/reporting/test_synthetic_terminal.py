"""The synthetic experiment's tables in a terminal, on small made-up results."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from sampled_sae.reporting.synthetic import print_results
from tests.reporting.made_up import results, sae


def printed(content: dict[str, Any], width: int = 100, terminal: bool = False) -> str:
    stream = io.StringIO()
    colors: Any = "standard" if terminal else None
    print_results(content, Console(file=stream, width=width, force_terminal=terminal, color_system=colors))
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
    ours = [sae("a", seed, fve_train=0.1 * seed) for seed in range(3)]
    text = printed(results(*ours, *(sae("b", seed, dead=0.5 + seed / 100) for seed in range(3))))
    assert row(text, "a ")[:5] == ["0.100", "0.750", "0.700", "60.0", "0.10*"]
    assert row(text, "b ")[:5] == ["0.800*", "0.750", "0.700", "60.0", "0.51"]
    assert "means over up to 3 seeds" in " ".join(text.split())


def test_missing_numbers_are_dashes() -> None:
    text = printed(results(sae("a", fve_train=None, recovery=None), sae("b", fve_train=float("nan"))))
    assert row(text, "a ") == ["-", "0.750", "0.700", "60.0", "0.10", "-", "-", "-", "-", "-"]
    assert "nan" not in text.lower()


@pytest.mark.parametrize("width", [80, 100, 200])
def test_fits_the_width(width: int) -> None:
    labels = [
        "BatchTopK",
        "uniform 30% to 100% annealed, and a rather long remark",
        "uniform 75% released at 70% lr=0.003",
        "x" * 70,
    ]
    text = printed(results(*(sae(label) for label in labels)), width)
    assert max(map(len, text.splitlines())) <= width
    # Long labels fold; the numbers stay whole.
    assert text.count("0.750") >= 3 and "…" not in text


def ahead() -> list[dict[str, Any]]:
    """`b` is ahead in both seeds by the same amount."""
    return [sae(label, seed, fve_train=value) for seed in (0, 1) for label, value in (("a", 0.8), ("b", 0.9))]


def test_plain_without_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    print_results(results(*ahead()))
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert row(text, "b ")[0] == "0.900*"
    assert max(map(len, text.splitlines())) <= 100


def test_color_in_a_terminal() -> None:
    assert "\x1b[1;32m0.900*" in printed(results(*ahead()), terminal=True)


@pytest.mark.parametrize("label", ["[red]x[/red]", "[/]", "<b>x", "x\x1b[31my"])
def test_hostile_labels_stay_text(label: str) -> None:
    text = printed(results(sae(label), sae("b")))
    assert label.replace("\x1b", "?") in text
    assert "\x1b" not in text


def test_without_several_seeds_there_is_no_winner() -> None:
    assert "*" not in row(printed(results(sae("a"), sae("b", fve_train=0.9))), "b ")[0]
    noisy = [
        sae(label, seed, fve_train=0.8 + (seed == other) / 10) for other, label in enumerate("ab") for seed in (0, 1)
    ]
    assert "*" not in " ".join(row(printed(results(*noisy)), "b "))


def test_one_sae_has_no_best() -> None:
    assert "*" not in " ".join(row(printed(results(sae("a"))), "a "))


def test_no_bucket_is_invented() -> None:
    text = printed({"saes": [sae("a")]})
    assert row(text, "a ") == ["0.800", "0.750", "0.700", "60.0", "0.10", "-"]
