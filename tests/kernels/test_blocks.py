import pytest
import torch
from torch.nn.functional import silu

from sampled_sae.kernels.blocks import gated, rms_norm, rotate
from sampled_sae.models.llama import RMSNorm, angles, rotated
from tests.kernels.test_path import DEVICE

CLOSE = {"rtol": 0.03, "atol": 0.03}
BFLOAT16 = 0.99 if DEVICE.type == "cuda" else 0.0  # Triton's interpreter cuts instead of rounding


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize(("dtype", "least"), [(torch.float16, 0.99), (torch.bfloat16, BFLOAT16), (torch.float32, 0.0)])
def test_the_small_operations_of_a_block_as_torch_has_them(dtype, least):
    """In 16 bits nearly all values are the same: both round in the same places."""
    x, norm = drawn(3, 5, 24, dtype=dtype), RMSNorm(24, 1e-5)
    norm.weight.data = drawn(24, dtype=dtype)
    cos, sin = angles(5, 12, 1e4, torch.device("cpu"), dtype)
    heads = drawn(3, 5, 6, 12, dtype=dtype)
    pairs = [
        (rms_norm(x.to(DEVICE), norm.weight.data.to(DEVICE), 1e-5), norm(x)),
        (rotate(heads.to(DEVICE), cos.to(DEVICE), sin.to(DEVICE)), rotated(heads, cos, sin)),
        (gated(x.to(DEVICE), x.flip(0).to(DEVICE)), silu(x) * x.flip(0)),
    ]
    for found, wanted in pairs:
        assert found.shape == wanted.shape and found.dtype == dtype
        torch.testing.assert_close(found.cpu(), wanted, **({} if dtype == torch.float32 else CLOSE))
        assert (found.cpu() == wanted).float().mean() >= least
