"""A folder that we save, loaded by SAELens with no conversion. Runs in that peer's environment."""

import warnings

import torch
from sae_lens import SAE as SAELensSAE

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
