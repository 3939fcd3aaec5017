"""A format in one file."""

import pytest
import torch

from sampled_sae.formats import FORMATS, describe
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError

ARRAYS = """
import numpy as np
import torch
from sampled_sae.formats import FORMATS, StoredSAE
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.utils.errors import UserError

class Arrays:
    def recognize(self, path):
        return path.suffix == ".npz"

    def describe(self, path):
        return self.load(path).cfg

    def load(self, path):
        tensors = {name: torch.from_numpy(array) for name, array in np.load(path, allow_pickle=False).items()}
        return StoredSAE(InferenceConfig(*tensors["W_enc"].shape), tensors)

    def save(self, sae, path):
        if sae.cfg.architecture != "jumprelu":
            raise UserError(f"architecture = {sae.cfg.architecture!r}: only 'jumprelu' can be saved as arrays")
        np.savez(path, **{name: tensor.numpy() for name, tensor in sae.tensors.items()})
        return path

FORMATS.register("arrays", Arrays(), __name__)
"""


@torch.no_grad()
def test_a_new_format_is_one_file(tmp_path):
    (tmp_path / "arrays.py").write_text(ARRAYS)
    FORMATS.load_file(tmp_path / "arrays.py")
    try:
        sae, x = SAE(InferenceConfig(6, 20)), torch.randn(9, 6)
        sae.W_enc.normal_()
        sae.W_dec.normal_()
        path = sae.save(tmp_path / "sae.npz", format="arrays")
        assert (describe(path).d_in, describe(path).d_sae) == (6, 20)
        assert torch.equal(SAE.load(path)(x), sae(x))
        with pytest.raises(UserError, match="architecture = 'standard': only 'jumprelu' can be saved as arrays"):
            SAE(InferenceConfig(6, 20, "standard")).save(path, format="arrays")
    finally:
        del FORMATS["arrays"]
