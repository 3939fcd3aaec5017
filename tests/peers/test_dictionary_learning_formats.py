"""Folders of dictionary_learning, loaded here and saved here. Runs in that peer's environment."""

import json

import pytest
import torch
from dictionary_learning.trainers.batch_top_k import BatchTopKTrainer
from dictionary_learning.trainers.gdm import GatedSAETrainer
from dictionary_learning.trainers.jumprelu import JumpReluTrainer
from dictionary_learning.trainers.matryoshka_batch_top_k import MatryoshkaBatchTopKTrainer
from dictionary_learning.trainers.standard import StandardTrainer, StandardTrainerAprilUpdate
from dictionary_learning.trainers.top_k import TopKTrainer
from dictionary_learning.utils import load_dictionary

import sampled_sae as ss
from sampled_sae.method.architectures import InferenceConfig
from tests.formats import foreign

D, M = 24, 96
SETTINGS = {"activation_dim": D, "dict_size": M, "layer": 3, "lm_name": "tiny", "device": "cpu", "steps": 10_000}
TRAINERS = {
    StandardTrainer: {"lr": 1e-3, "l1_penalty": 0.1},
    StandardTrainerAprilUpdate: {"lr": 1e-3, "l1_penalty": 0.1},
    GatedSAETrainer: {"lr": 1e-3, "l1_penalty": 0.1},
    JumpReluTrainer: {},
    TopKTrainer: {"k": 5},
    BatchTopKTrainer: {"k": 5},
    MatryoshkaBatchTopKTrainer: {"k": 5, "group_fractions": [0.25, 0.75]},
}
X = torch.randn(300, D, generator=torch.Generator().manual_seed(1))


def equal(ours: ss.SAE, theirs: torch.nn.Module) -> None:
    codes = theirs.encode(X)
    assert 0 < int((codes > 0).sum()) < codes.numel()
    torch.testing.assert_close(ours.encode(X), codes, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.encode_sparse(X).dense(), codes, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours(X), theirs.decode(codes), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("trainer_class", TRAINERS)
def test_we_load_what_its_trainers_save(tmp_path, trainer_class):
    """Weights and settings as `trainSAE` writes them; also after it multiplied biases and threshold by a norm."""
    generator = torch.Generator().manual_seed(0)
    trainer = trainer_class(**SETTINGS, **TRAINERS[trainer_class])
    for name, parameter in trainer.ae.named_parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
        if name == "threshold":
            parameter.abs_()
    if hasattr(trainer.ae, "threshold") and trainer.ae.threshold.ndim == 0:
        trainer.ae.threshold.fill_(0.4)
    trainer.ae.scale_biases(1.7)
    torch.save({k: v.cpu() for k, v in trainer.ae.state_dict().items()}, tmp_path / "ae.pt")
    (tmp_path / "config.json").write_text(json.dumps({"trainer": trainer.config, "buffer": {"ctx_len": 64}}))
    theirs, _ = load_dictionary(str(tmp_path), "cpu")
    ours = ss.SAE.load(tmp_path)
    equal(ours, theirs)
    wanted = {"model_name": "tiny", "hook_name": "blocks.3.hook_resid_post", "context_size": 64}
    assert ours.cfg.metadata == wanted
    assert ours.cfg.prefixes == ((24, 96) if trainer_class is MatryoshkaBatchTopKTrainer else ())


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in foreign.FOREIGN if "groupmax" not in name])
def test_it_loads_every_sae_that_we_convert(tmp_path, name):
    sae = ss.SAE.load(foreign.FOREIGN[name](tmp_path / "sae", foreign.weights(D, M)).path)
    theirs, config = load_dictionary(str(sae.save(tmp_path / "saved", format="dictionary_learning")), "cpu")
    equal(sae, theirs)
    equal(ss.SAE.load(tmp_path / "saved"), theirs)
    assert config["trainer"]["lm_name"] == sae.cfg.metadata["model_name"] and config["trainer"]["layer"] == 1


def test_it_loads_what_we_train(tmp_path):
    generator = torch.Generator().manual_seed(0)
    x = 5 + (torch.rand(2000, 64, generator=generator) < 0.1).float() @ torch.randn(64, D, generator=generator)
    for config in (ss.batchtopk(M, 4), ss.topk(M, 4), ss.released(M, 4)):
        sae = ss.train(x, config, steps=50, batch_size=200, device="cpu", progress=False)
        theirs, _ = load_dictionary(str(sae.save(tmp_path / str(config.pool), format="dictionary_learning")), "cpu")
        assert type(theirs).__name__ == "BatchTopKSAE" and float(theirs.threshold) == float(sae.threshold)
        torch.testing.assert_close(theirs.encode(x), sae.encode(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(theirs(x), sae(x), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_matryoshka_keeps_its_groups(tmp_path):
    sae = ss.SAE(InferenceConfig(D, M, k=5, prefixes=(10, 40, 96)))
    for tensor in sae.parameters():
        tensor.normal_()
    sae.threshold.fill_(0.5)
    theirs, _ = load_dictionary(str(sae.save(tmp_path / "saved", format="dictionary_learning")), "cpu")
    assert theirs.group_sizes.tolist() == [10, 30, 56]
    equal(sae, theirs)
    assert ss.SAE.load(tmp_path / "saved").cfg.prefixes == (10, 40, 96)
