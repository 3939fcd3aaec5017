"""What other commands left about an SAE."""

import json

import pytest
import torch
from safetensors.torch import save_file

from sampled_sae.evals.results import (
    read_density,
    read_explanations,
    read_result,
    read_unique,
    result_path,
    save_explanations,
    save_firing,
    write_result,
)
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.migrations import OLD_INIT, OLD_OPTIMIZER
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError


def test_results_of_version_0_and_of_now(tmp_path):
    """Version 0 had no format_version, `latents` in the SAE's settings, and `interp_tokens`."""
    path = result_path(tmp_path, "autointerp")
    path.parent.mkdir()
    old = {"result": {"tokens": 5}, "sae": {"latents": 64, "k": 4}, "asked": {"interp_tokens": 256, "seed": 0}}
    path.write_text(json.dumps(old))
    found = read_result(tmp_path, "autointerp")
    sae = {"d_sae": 64, "k": 4, "optimizer": OLD_OPTIMIZER, "init": OLD_INIT}
    assert found == {"result": {"tokens": 5}, "sae": sae, "asked": {"tokens": 256, "seed": 0}}
    write_result(tmp_path, "autointerp", found)
    assert json.loads(path.read_text())["format_version"] == 4 and read_result(tmp_path, "autointerp") == found
    for damaged in ("[]", "{}", '{"result": 3}'):
        path.write_text(damaged)
        assert read_result(tmp_path, "autointerp") is None
    path.write_text(json.dumps(found | {"format_version": 99}))
    with pytest.raises(UserError, match="written by a newer version"):
        read_result(tmp_path, "autointerp")


def test_density(tmp_path):
    assert read_density(tmp_path, 3) is None
    path = save_firing(tmp_path, torch.tensor([0, 5, 2]), 100)
    found = read_density(tmp_path, 3)
    assert found is not None and found.fired.tolist() == [0, 5, 2] and found.tokens == 100
    with pytest.raises(UserError, match="fired has shape \\(3,\\): must be \\(4,\\)"):
        read_density(tmp_path, 4)
    save_file({"fired": torch.zeros(3)}, path)
    with pytest.raises(UserError, match="missing or damaged"):
        read_density(tmp_path, 3)


def test_meanings(tmp_path):
    folder = SAE(InferenceConfig(4, 6)).save(tmp_path / "sae")
    assert read_explanations(folder) == {}
    entries = {2: {"explanation": "cats", "score": 0.5, "scores": {"detection": 0.5, "other": None}}}
    save_explanations(folder, entries | {4: {"explanation": "dogs", "score": None}})
    found = read_explanations(folder)
    assert (found[2].text, found[2].score, found[2].scores) == ("cats", 0.5, {"detection": 0.5})
    assert (found[4].text, found[4].score, found[4].scores) == ("dogs", None, {})


def test_unique(tmp_path):
    def row(latent, overall):
        return {"latent": latent, "overall": overall, "decoder": 0.1, "text": 0.2, "match": 9, "match_explanation": "x"}

    tables = [
        {"of": "run/a", "against": "run/b", "table": [row(1, 0.5), row(2, 0.4) | {"nearest": 0.6}]},
        {"of": "run/a", "against": "run/c", "table": [row(1, 0.3)]},
        {"of": "run/b", "against": "run/a", "table": [row(3, 0.1)]},
    ]
    content = {"saes": [{"name": f"run/{name}"} for name in "abc"], "pairs": [{"unique": tables}]}
    (tmp_path / "compare.json").write_text(json.dumps(content))
    found = read_unique(tmp_path, tmp_path / "run" / "a", 10)
    assert {latent: (item.against, item.overall) for latent, item in found.items()} == {
        1: ("run/c", 0.3),
        2: ("run/b", 0.4),
    }
    assert found[2].nearest == 0.6 and found[1].nearest is None, "an older version does not say"
    assert read_unique(tmp_path / "compare.json", tmp_path / "run" / "a", 10) == found
    with pytest.raises(UserError, match="is about run/a, run/b, run/c: not about"):
        read_unique(tmp_path, tmp_path / "other" / "x", 10)
    with pytest.raises(UserError, match="names latent 2: the SAE has 2"):
        read_unique(tmp_path, tmp_path / "run" / "a", 2)
    with pytest.raises(UserError, match="no such file"):
        read_unique(tmp_path / "absent.json", tmp_path / "run" / "a", 2)
    (tmp_path / "compare.json").write_text("{}")
    with pytest.raises(UserError, match="not a result of `sampled-sae compare`"):
        read_unique(tmp_path, tmp_path / "run" / "a", 2)
