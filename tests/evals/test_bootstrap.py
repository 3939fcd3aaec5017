import pytest
import torch

from sampled_sae.evals import bootstrap


def test_bootstrap_interval_of_a_mean_is_near_the_normal_one():
    values = torch.randn(400, generator=torch.Generator().manual_seed(0)).double()
    drawn = bootstrap.totals({"sum": values, "n": torch.ones(400)}, resamples=2000, seed=1)
    found = bootstrap.estimate(drawn["sum"] / drawn["n"], 400, 0.95)
    half = 1.96 * float(values.std()) / 20
    assert found.value == pytest.approx(float(values.mean()))
    assert found.low == pytest.approx(found.value - half, abs=0.1 * half)
    assert found.high == pytest.approx(found.value + half, abs=0.1 * half)


def test_bootstrap_blocks_do_not_matter(monkeypatch):
    values = {"a": torch.arange(9.0), "b": torch.ones(9)}
    first = bootstrap.totals(values, 50, 0)
    monkeypatch.setattr(bootstrap, "MOST", 20)
    assert all(torch.equal(first[name], again) for name, again in bootstrap.totals(values, 50, 0).items())
    assert float(first["a"][0]) == 36
    assert set(first["b"].tolist()) == {9.0}
