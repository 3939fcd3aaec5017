import pytest

import sampled_sae as ss
from sampled_sae.method.presets import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_every_member_of_the_family_takes_a_learning_rate(name):
    config = PRESETS[name](d_sae=48, k=4, lr=1e-3)
    assert config == PRESETS[name](48, 4, optimizer=ss.OptimizerConfig(lr=1e-3))
    assert PRESETS[name](48, 4).optimizer == ss.OptimizerConfig()
    with pytest.raises(ss.UserError, match=r"lr = 0.1 and optimizer = .*: give one of the two"):
        PRESETS[name](48, 4, lr=0.1, optimizer=ss.OptimizerConfig())
    with pytest.raises(ss.UserError, match=r"lr = 0.0: must be a positive number"):
        PRESETS[name](48, 4, lr=0.0)
