"""Where kernels cannot run, the plain path is taken."""

import pytest
import torch

from sampled_sae import kernels
from sampled_sae.kernels import gradients as masked
from sampled_sae.method.presets import topk
from sampled_sae.training.learner import Learner
from sampled_sae.training.step import PlainPath

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_a_cpu_and_other_precisions_take_the_plain_path():
    assert not kernels.usable(torch.device("cpu"), torch.float32)
    assert not kernels.usable(DEVICE, torch.float64)
    assert isinstance(Learner(topk(16, 2), 4, 10, 0, torch.device("cpu"), torch.float32).path, PlainPath)


def test_the_plain_path_can_be_asked_for(monkeypatch):
    monkeypatch.setattr(kernels, "usable", lambda *where: True)
    monkeypatch.setenv("SAMPLED_SAE_PATH", "plain")
    assert isinstance(Learner(topk(16, 2), 4, 10, 0, DEVICE, torch.float32).path, PlainPath)


def test_kernels_that_do_not_compile_are_left_alone(monkeypatch):
    kernels.compiles.cache_clear()
    assert kernels.compiles(DEVICE)
    kernels.compiles.cache_clear()

    def broken(f):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(masked, "counts", broken)
    with pytest.warns(UserWarning, match="cannot be used on .* so steps are slower: Failed to find C compiler"):
        assert not kernels.compiles(DEVICE)
    kernels.compiles.cache_clear()
