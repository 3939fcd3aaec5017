import math
from types import SimpleNamespace

import pytest
import torch

from sampled_sae.evals.core import Core, contexts_at_once
from sampled_sae.evals.core.schema import CoreConfig, special_tokens
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.utils.errors import UserError


def test_special_tokens():
    assert special_tokens(SimpleNamespace(bos_token_id=3, eos_token_id=0, pad_token_id=0)) == (0, 3)
    assert special_tokens(SimpleNamespace(bos_token_id=None)) == ()


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"skip_first": -1}, "skip_first = -1: must not be negative"),
        ({"skip_first": 1.5}, "skip_first = 1.5: must be a whole number"),
        ({"resamples": -1}, "resamples = -1: must not be negative"),
        ({"norm_factor": 0.5}, "norm_factor = 0.5: must be at least 1"),
        ({"norm_factor": math.nan}, "norm_factor = nan: must be a number"),
        ({"put_in": "no"}, "put_in = 'no': must be 'saebench', 'measured', 'normal' or 'everywhere'"),
        ({"level": 1}, "level = 1.0: must be a share between 0 and 1"),
        ({"seed": 2**64}, "seed = .*: must fit into 64 bits"),
        ({"left_out": ("a",)}, r"left_out\[0\] = 'a': must be a whole number"),
        ({"left_out": 3}, "left_out = 3: must be a list"),
        ({"loss": 1}, "loss = 1: must be True or False"),
        *(
            ({name: 0}, f"{name} = 0: must be at least 1")
            for name in ("cut_batch", "legacy_batch", "contexts_at_once", "tokens_at_once")
        ),
    ],
)
def test_bad_settings(given, line):
    with pytest.raises(UserError, match=line):
        CoreConfig(**given)


@pytest.mark.parametrize(
    ("gib", "vocabulary", "context", "contexts"),
    [(24, 256_000, 1024, 4), (139, 49_152, 512, 64), (2, 256_000, 8192, 1)],
)
def test_contexts_in_one_pass_follow_from_the_gpus_memory(monkeypatch, gib, vocabulary, context, contexts):
    found = SimpleNamespace(total_memory=gib * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    model = SimpleNamespace(device=torch.device("cuda"), vocabulary=vocabulary)
    assert contexts_at_once(model, context) == contexts


def test_a_factor_that_is_given_is_used_although_training_saved_a_limit():
    model = SimpleNamespace(device=torch.device("cpu"), tokenizer=SimpleNamespace(bos_token_id=0))
    trained, other = InferenceConfig(4, 8, metadata={"high_norm_limit": 50.0}), InferenceConfig(4, 8)

    def used(sae, **given):
        found = Core().settings_for(CoreConfig(**given), sae, model)
        return found.norm_limit, found.norm_factor, found.put_in

    assert used(trained) == (50.0, 10.0, "normal")
    assert used(trained, norm_factor=math.inf) == (None, math.inf, "normal")
    assert used(trained, norm_factor=5, norm_limit=7) == (7.0, 5.0, "normal")
    assert used(other) == (None, 10.0, "saebench")
    assert used(other, norm_factor=5) == (None, 5.0, "saebench")
