import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import sampled_sae as ss
from sampled_sae.method.config import JumpReLUConfig
from sampled_sae.training import estimate
from sampled_sae.utils.errors import UserError


def test_memory_is_estimated_and_refused():
    small = estimate.memory_needed([ss.batchtopk(64, 4)], 16, 200, torch.float32)
    assert 3 * 2 * 64 * 16 * 4 < small - estimate.LIBRARIES < 10**6
    assert estimate.memory_needed([ss.batchtopk(64, 4)] * 5, 16, 200, torch.float32) < 5 * small
    with pytest.raises(UserError, match=r"GiB on cpu needed for 1 SAEs at batch_size = 4096, but only"):
        estimate.check_memory([ss.batchtopk(2**27, 4)], 4096, 4096, torch.device("cpu"), torch.float32)


MEASURE = """
import pathlib, torch, sampled_sae as ss
from sampled_sae.training import estimate
torch.set_num_threads(1)
def peak():  # of this process alone; getrusage would begin with the parent's
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
x = torch.randn(8000, 128)
off = ss.AuxKConfig(alpha=0)
def train(config, n): ss.train(x[:n], [config], steps=3, batch_size=1000, progress=False, device="cpu")
train(ss.batchtopk(64, 4), 2000)  # load what torch loads
before, config = peak(), ss.batchtopk(2**16, 16, auxk=off)
train(config, 8000)
print((peak() - before) / estimate.memory_needed([config], 128, 1000, torch.float32))
"""


def test_the_fast_path_of_jumprelu_needs_more_where_half_of_the_activations_are_kept():
    def needed(*configs):
        return estimate.memory_needed(configs, 768, 4096, torch.float32, fast=True)

    relative = ss.jumprelu(16_384, 60)
    absolute = replace(relative, jumprelu=JumpReLUConfig(variant="dictionary_learning"))
    assert needed(ss.batchtopk(16_384, 60)) < needed(relative) < needed(absolute) - 16_384 // 2 * 4096 * 60
    z = 4 * 16_384 * 4096
    of_batchtopk = needed(*[ss.batchtopk(16_384, 60)] * 2) - needed(ss.batchtopk(16_384, 60))
    assert needed(relative, relative) - needed(relative) == pytest.approx(of_batchtopk + z, rel=0.01), "z of each SAE"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_the_estimate_is_near_what_a_run_takes():
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, timeout=120)
    assert 0.6 < float(done.stdout) < 1.05, done.stderr
