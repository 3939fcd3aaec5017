"""Folders that are saved here and loaded by SAELens, and the other way. Runs in that peer's environment."""

import warnings

import pytest
import torch
from sae_lens import SAE as SAELensSAE
from sae_lens.registry import get_sae_class

import sampled_sae as ss


def test_saelens_loads_what_we_save_and_computes_the_same(tmp_path):
    generator = torch.Generator().manual_seed(0)
    x = 5 + 3 * (torch.rand(4000, 64, generator=generator) < 0.1).float() @ torch.randn(64, 24, generator=generator)
    saes = ss.train(
        x,
        [ss.batchtopk(96, 6), ss.topk(96, 6), ss.sampled(96, 6, "entropy", l=4), ss.released(96, 6)],
        steps=100,
        batch_size=400,
        out=tmp_path / "run",
        device="cpu",
        progress=False,
    )
    for sae in saes:
        sae.cfg.metadata.update({"model_name": "pythia-160m-deduped", "hook_name": "blocks.6.hook_resid_post"})
        folder = sae.save(tmp_path / "saved" / sae.cfg.training.name)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            theirs = SAELensSAE.load_from_disk(str(folder))
        codes = theirs.encode(x)
        assert (codes > 0).sum() == (sae.encode(x) > 0).sum() > 0
        torch.testing.assert_close(codes, sae.encode(x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(theirs.decode(codes), sae(x), rtol=1e-5, atol=1e-5)
        assert theirs.cfg.metadata.hook_name == "blocks.6.hook_resid_post"
        assert theirs.cfg.architecture() == "jumprelu"


CASES = [
    ("standard", {}),
    ("standard", {"apply_b_dec_to_input": False}),
    ("jumprelu", {}),
    ("jumprelu", {"apply_b_dec_to_input": False}),
    ("topk", {"k": 5}),
    ("topk", {"k": 5, "rescale_acts_by_decoder_norm": True}),
    ("gated", {"apply_b_dec_to_input": False}),
]


@torch.no_grad()
@pytest.mark.parametrize("name, fields", CASES)
def test_we_load_what_saelens_saves_and_compute_the_same(tmp_path, name, fields):
    generator = torch.Generator().manual_seed(0)
    sae_class, config_class = get_sae_class(name)
    theirs = sae_class(config_class(d_in=24, d_sae=96, **fields))
    for parameter in theirs.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    x = torch.randn(300, 24, generator=generator)
    theirs.save_model(tmp_path / "theirs")
    codes = theirs.encode(x)
    codes = codes.to_dense() if codes.is_sparse else codes
    ours = ss.SAE.load(tmp_path / "theirs")
    assert ours.cfg.architecture == name
    torch.testing.assert_close(ours.encode(x), codes, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.encode_sparse(x).dense(), codes, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)
    back = SAELensSAE.load_from_disk(str(ours.save(tmp_path / "ours")))
    torch.testing.assert_close(back(x), ours(x), rtol=1e-4, atol=1e-4)
