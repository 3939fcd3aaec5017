"""Architectures for inference against their formulas."""

import pytest
import torch

from sampled_sae.method.architectures import ARCHITECTURES, InferenceConfig
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError

X = torch.randn(30, 6, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def made(architecture: str, **settings) -> SAE:
    generator = torch.Generator().manual_seed(0)
    sae = SAE(InferenceConfig(6, 20, architecture, **settings))
    for tensor in sae.parameters():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return sae


def truth(sae: SAE) -> torch.Tensor:
    pre = (X - sae.b_dec) @ sae.W_enc
    match sae.cfg.architecture:
        case "jumprelu":
            z = torch.relu(pre + sae.b_enc)
            return z * (z > sae.threshold)
        case "standard":
            return torch.relu(pre + sae.b_enc)
        case "topk":
            kept = torch.zeros(30, 20, dtype=torch.bool)
            for row, values in zip(kept, pre + sae.b_enc, strict=True):
                row[values.argsort(descending=True)[: sae.cfg.k]] = True
            return torch.where(kept, pre + sae.b_enc, 0).relu()
        case "groupmax":
            groups = (pre + sae.b_enc).relu().unflatten(1, (sae.cfg.k, -1))
            return torch.where(groups == groups.amax(-1, keepdim=True), groups, 0).flatten(1)
        case "gated":
            return (pre + sae.b_gate > 0) * torch.relu(pre * sae.r_mag.exp() + sae.b_mag)
    raise AssertionError


@torch.no_grad()
@pytest.mark.parametrize("name", ["gated", "groupmax", "jumprelu", "standard", "topk"])
def test_codes_are_the_formula(name, tmp_path):
    assert sorted(ARCHITECTURES) == ["gated", "groupmax", "jumprelu", "standard", "topk"]
    sae = made(name, k={"topk": 12, "groupmax": 5}.get(name))
    sae.threshold.fill_(0.4 if name == "jumprelu" else 0.0)
    codes, latents = truth(sae), torch.tensor([2, 11, 5])
    torch.testing.assert_close(sae.encode(X), codes)
    torch.testing.assert_close(sae.encode_sparse(X, max_values=90).dense(), codes)
    torch.testing.assert_close(sae.encode_sparse(X, latents).dense()[:, latents], codes[:, latents])
    back = SAE.load(sae.save(tmp_path / "sae"))
    assert back.cfg == sae.cfg and torch.equal(back(X), sae(X))
    torch.testing.assert_close(sae.rescale_(3.0).encode(3 * X), 3 * codes)


def test_unknown_or_incomplete_architectures_are_refused():
    with pytest.raises(
        UserError,
        match="architecture = 'crosscoder': unknown; the architectures are gated, groupmax, jumprelu, standard",
    ):
        InferenceConfig(6, 20, "crosscoder")
    with pytest.raises(UserError, match="k = None: must be a number for 'topk' SAEs"):
        InferenceConfig(6, 20, "topk")


ABSOLUTE = """
from sampled_sae.method.architectures import ARCHITECTURES, Architecture, pick

class Absolute(Architecture):
    tensors = ("b_enc", "gain")

    def activate_(self, sae, pre, latents):
        return pre.abs_() * pick(sae.gain, latents)

ARCHITECTURES.register("absolute", Absolute(), __name__)
"""


@torch.no_grad()
def test_a_new_architecture_is_one_file(tmp_path):
    (tmp_path / "absolute.py").write_text(ABSOLUTE)
    ARCHITECTURES.load_file(tmp_path / "absolute.py")
    try:
        sae, latents = made("absolute"), torch.tensor([4, 1])
        codes = ((X - sae.b_dec) @ sae.W_enc + sae.b_enc).abs() * sae.gain
        torch.testing.assert_close(sae.encode(X), codes)
        torch.testing.assert_close(sae.encode_sparse(X, latents).dense()[:, latents], codes[:, latents])
        back = SAE.load(sae.save(tmp_path / "sae"))
        assert torch.equal(back(X), sae(X))
    finally:
        del ARCHITECTURES["absolute"]
