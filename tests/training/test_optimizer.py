import pytest

from sampled_sae.method.config import OptimizerConfig
from sampled_sae.training.optimizer import learning_rate


def test_learning_rate_over_time():
    config = OptimizerConfig(lr=1.0, warmup_steps=10, decay=0.2)
    rates = [learning_rate(config, step, 100) for step in range(100)]
    assert rates[0] == 0
    assert rates[5] == 0.5
    assert set(rates[10:81]) == {1.0}
    assert rates[90] == 0.5
    assert rates[99] == pytest.approx(1 / 20)
    assert learning_rate(OptimizerConfig(lr=1.0), 20, 100) == 1.0  # 1,000 steps of warm-up would never end
