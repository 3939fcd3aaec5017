import sys

import pytest

from sampled_sae.utils.system import switching_often


def test_threads_change_more_often_only_meanwhile():
    before = sys.getswitchinterval()
    with pytest.raises(KeyError), switching_often():
        assert sys.getswitchinterval() < before / 10
        raise KeyError
    assert sys.getswitchinterval() == before
