"""Folders of sparsify, loaded here. Runs in that peer's environment."""

import os

os.environ["SPARSIFY_DISABLE_TRITON"] = "1"  # there is no GPU

import pytest
import torch
from sparsify import SparseCoder, SparseCoderConfig

import sampled_sae as ss

D, M, K = 24, 96, 8


@torch.no_grad()
@pytest.mark.parametrize("fields", [{}, {"normalize_decoder": False}, {"multi_topk": True}, {"activation": "groupmax"}])
@pytest.mark.parametrize("size", [{"num_latents": M}, {"expansion_factor": 4}])
def test_we_load_what_sparsify_saves_and_compute_the_same(tmp_path, fields, size):
    generator = torch.Generator().manual_seed(0)
    theirs = SparseCoder(D, SparseCoderConfig(k=K, **size, **fields))
    for parameter in theirs.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    theirs.save_to_disk(tmp_path / "layers.5")
    x = torch.randn(300, D, generator=generator)
    out = theirs.encode(x)
    codes = torch.zeros(300, M).scatter(1, out.top_indices, out.top_acts)
    ours = ss.SAE.load(tmp_path / "layers.5")
    torch.testing.assert_close(ours.encode(x), codes, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.encode_sparse(x).dense(), codes, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours(x), theirs.decode(out.top_acts, out.top_indices), rtol=1e-4, atol=1e-4)
    if not theirs.cfg.multi_topk:  # its forward pass then returns the reconstruction by 4 K latents of the second loss
        torch.testing.assert_close(ours(x), theirs(x).sae_out, rtol=1e-4, atol=1e-4)
    assert ours.cfg.metadata == {"hook_name": "blocks.5.hook_resid_post"} and ours.cfg.k == K


@pytest.mark.parametrize("field, kind", [("transcode", "a transcoder"), ("skip_connection", "a skip transcoder")])
def test_transcoders_are_refused(tmp_path, field, kind):
    SparseCoder(D, SparseCoderConfig(k=K, num_latents=M, **{field: True})).save_to_disk(tmp_path)
    with pytest.raises(ss.UserError, match=f"{field} = true: {kind}; only SAEs can be loaded"):
        ss.SAE.load(tmp_path)
