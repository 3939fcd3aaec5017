"""Where kernels cannot run, the plain path is taken."""

import re

import pytest
import torch

from sampled_sae import kernels
from sampled_sae.kernels import masked
from sampled_sae.method.presets import jumprelu, topk
from sampled_sae.training.learner import Learner
from sampled_sae.training.step import PlainPath

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_a_cpu_and_other_precisions_take_the_plain_path():
    assert not kernels.usable(torch.device("cpu"), torch.float32)
    assert not kernels.usable(DEVICE, torch.float64)
    assert isinstance(Learner(topk(16, 2), 4, 10, 0, torch.device("cpu"), torch.float32).path, PlainPath)


def test_what_has_no_kernels():
    assert not kernels.lacking(jumprelu(16, 2))
    assert kernels.lacking(jumprelu(16, 2), 2) == "there are none for JumpReLU with latents over ranks"


def test_the_plain_path_can_be_asked_for(monkeypatch):
    monkeypatch.setattr(kernels, "usable", lambda *where: True)
    monkeypatch.setenv("SAMPLED_SAE_PATH", "plain")
    assert isinstance(Learner(topk(16, 2), 4, 10, 0, DEVICE, torch.float32).path, PlainPath)


def test_kernels_that_do_not_compile_are_left_alone(monkeypatch):
    kernels.compile_error.cache_clear()
    assert not kernels.compile_error(DEVICE)
    kernels.compile_error.cache_clear()

    def broken(f):
        raise RuntimeError("Failed to find C compiler\nand more")

    monkeypatch.setattr(masked, "counts", broken)
    assert kernels.compile_error(DEVICE) == "Failed to find C compiler"
    kernels.compile_error.cache_clear()


@pytest.mark.parametrize(
    ("capability", "hip", "triton", "dtype", "reason"),
    [
        ((7, 5), None, True, torch.float32, "they need compute capability 8.0 (bfloat16), Tesla T4 has 7.5"),
        ((9, 0), "6.2", True, torch.float32, "they are written for NVIDIA GPUs"),
        ((9, 0), None, False, torch.float32, "Triton is not installed"),
        ((9, 0), None, True, torch.float64, "they need float32 weights, got float64"),
    ],
)
def test_a_gpu_without_kernels_is_one_line_with_the_reason(monkeypatch, capability, hip, triton, dtype, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: triton or None)
    line = f"training on cuda:0 without the GPU kernels, so steps are slower: {reason}"
    with pytest.warns(UserWarning, match=f"^{re.escape(line)}$"):
        assert not kernels.usable(torch.device("cuda:0"), dtype)
