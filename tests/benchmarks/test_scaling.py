"""The projection of docs/scaling.md: its formulas, and that the page is up to date."""

import json

import pytest

from benchmarks import many_saes, scaling
from benchmarks.scaling import ETHERNET, NVLINK, Exchange


def test_exchanges():
    assert Exchange("all_reduce", 360e9).seconds(2, NVLINK) == pytest.approx(1 + 20e-6)
    assert Exchange("all_gather", 45e9, messages=2).seconds(3, ETHERNET) == pytest.approx(2 + 100e-6)
    assert Exchange("ordered_sum", 45e9).seconds(8, ETHERNET) == pytest.approx(1.75 + 100e-6)
    assert Exchange("all_gather", 45e9).seconds(1, ETHERNET) == 0


def test_times_of_one_gpu_are_measured_or_linear():
    small, large = scaling.one_gpu(65_536), scaling.one_gpu(131_072)
    assert small[1] and large[1]
    between, known = scaling.one_gpu(98_304)
    assert not known and between == pytest.approx((small[0] + large[0]) / 2)


def test_measured_lines_replace_estimates(tmp_path, monkeypatch):
    shared = {"d_sae": 2**22, "shards": 8, "batch": 4096, "d_in": 768, "method": "BatchTopK", "path": "fast"}
    parts = {"step": 14.0, "all_reduce": None, "all_gather": None, "ordered_sum": None}
    lines = [
        {"part": part, "ms": ms, "bytes": 1e6, "messages": 2, "gib": 15.5, "exchange": "simulated", **shared}
        for part, ms in parts.items()
    ]
    alone = {**lines[0], "d_sae": 2**21, "shards": 1, "ms": 50.0, "exchange": "none"}
    (tmp_path / "scaling").mkdir()
    (tmp_path / "scaling" / "ranks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, alone]))
    for name in ("speed", "language-models"):
        (tmp_path / name).symlink_to(scaling.DOCS / name)
    monkeypatch.setattr(scaling, "DOCS", tmp_path)
    scaling.lines.cache_clear()
    try:
        one = scaling.step(2**22, 8)
        assert (one.work, one.measured, one.gib) == (0.014, True, 15.5)
        assert [each.bytes for each in one.exchanges[1:]] == [1e6] * 3
        assert scaling.baseline() == (2**21, 0.05)
        assert scaling.efficiency(one, NVLINK) == pytest.approx(2 * 0.05 / 8 / one.seconds(NVLINK))
    finally:
        scaling.lines.cache_clear()


@pytest.mark.parametrize("made", [scaling, many_saes])
def test_the_pages_are_up_to_date(made):
    page = made.PAGE.read_text(encoding="utf-8")
    assert made.filled(page) == page
