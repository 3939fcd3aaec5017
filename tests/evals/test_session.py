import json

import pytest
import torch

from sampled_sae import cli
from sampled_sae.data.text import TextSource
from sampled_sae.evals.autointerp import Autointerp
from sampled_sae.evals.autointerp.schema import AutointerpConfig
from sampled_sae.evals.core import Core
from sampled_sae.evals.core.schema import CoreConfig
from sampled_sae.evals.results import find_saes, names_of, result_path
from sampled_sae.evals.session import CONTEXTS, Request, Session, Subject, evaluate_saes, layer_of
from sampled_sae.formats import describe
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import read_json
from tests.models.tiny_models import make_model, make_tokenizer


def saved(folder, **metadata):
    sae = SAE(InferenceConfig(4, 6))
    sae.cfg.metadata.update({"model_name": "tiny"} | metadata)
    return sae.save(folder)


def layers(folders, layer=None):
    return [layer_of(describe(folder), layer, folder) for folder in folders]


def test_what_a_killed_save_leaves_is_no_sae(tmp_path):
    """New folders wait under a name with a dot, and old ones below a folder with such a name."""
    whole = saved(tmp_path / "run" / "sae")
    saved(tmp_path / "run" / ".sae.x.tmp")
    saved(tmp_path / "run" / ".sae.x.old" / "sae")
    assert find_saes([tmp_path / "run"]) == [whole]
    with pytest.raises(UserError, match="there is no such folder"):
        find_saes([tmp_path / "run" / "nothing"])
    (tmp_path / "begun").mkdir()
    with pytest.raises(UserError, match="holds no SAE"):
        find_saes([tmp_path / "begun"])
    (tmp_path / "begun" / "run.json").write_text("{}")
    with pytest.raises(UserError, match="the run has no SAE yet; sampled-sae resume continues it"):
        find_saes([tmp_path / "begun"])


def test_a_run_below_a_hidden_folder_is_found(tmp_path):
    whole = saved(tmp_path / ".cache" / "run" / "sae")
    assert find_saes([whole.parent, whole]) == [whole]


def test_the_layer_may_be_said_by_the_hook_alone(tmp_path):
    own, foreign = saved(tmp_path / "own", layer=3), saved(tmp_path / "foreign", hook_name="blocks.4.hook_resid_pre")
    silent, other = saved(tmp_path / "silent"), saved(tmp_path / "other", hook_name="blocks.4.hook_mlp_out")
    assert layers([own, foreign]) == [3, 3]
    assert layers([own, foreign, silent], layer=3) == [3, 3, 3]
    with pytest.raises(UserError, match=r"layer = 2: .*foreign is of layer 3; leave the flag out"):
        layers([foreign], layer=2)
    with pytest.raises(UserError, match=r"silent: does not name its layer; give --layer, or --hook"):
        layers([silent])
    assert layers([other]) == ["blocks.4.hook_mlp_out"]
    assert layers([silent, other], layer="model.layers.4.mlp") == ["model.layers.4.mlp"] * 2
    with pytest.raises(UserError, match=r"layer = model\.layers\.4\.mlp: .*own is of layer 3; leave the flag out"):
        layers([own], layer="model.layers.4.mlp")


def test_no_sae_reads_the_text_that_another_one_was_not_trained_on(tmp_path):
    """Two SAEs with as many contexts held out, each of its own text."""
    lm = LanguageModel(make_model("llama"), make_tokenizer(), "tiny")
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("the sea " * 200)
    held = {"layer": 0, "context_size": 10, "heldout_contexts": 3}
    folders = []
    for name in "ba":
        sae = SAE(InferenceConfig(lm.width, 6))
        sae.cfg.metadata.update({"model_name": "tiny", "text": str(tmp_path / f"{name}.txt")} | held)
        folders.append(sae.save(tmp_path / name))
    found = evaluate_saes(folders, lm, [CoreConfig(resamples=0, loss=False)], text=str(tmp_path / "a.txt"))
    assert [one["core"]["contexts"] for one in found] == [CONTEXTS, 3]


def test_positions_that_training_skipped_can_be_measured(tmp_path):
    lm = LanguageModel(make_model("llama"), make_tokenizer(), "tiny")
    (tmp_path / "a.txt").write_text("the sea " * 200)
    sae = SAE(InferenceConfig(lm.width, 6))
    sae.cfg.metadata.update({"model_name": "tiny", "layer": 0, "context_size": 10, "skip_first": 4})
    few = {"contexts": 3, "resamples": 0, "loss": False, "left_out": (-1,)}
    for skip_first, each in ((None, 6), (0, 10), (2, 8)):
        [found] = evaluate_saes([sae], lm, [CoreConfig(skip_first=skip_first, **few)], text=str(tmp_path / "a.txt"))
        assert found["core"]["measured"]["tokens"] == 3 * each
        chosen = Autointerp().settings_for(AutointerpConfig(skip_first=skip_first), sae.cfg, lm)
        assert chosen.skip_first == 10 - each


def test_special_tokens_can_be_measured(tmp_path):
    lm = LanguageModel(make_model("llama"), make_tokenizer(), "tiny")
    (tmp_path / "a.txt").write_text("the sea " * 200)
    sae = SAE(InferenceConfig(lm.width, 6))
    sae.cfg.metadata.update({"model_name": "tiny", "layer": 0, "context_size": 10, "prepend_bos": True})
    given = {"--core.left-out": 10, "--core.left-out -1": 10, "": 9}
    for words, each in given.items():
        few = f"sae --core.contexts 3 --core.resamples 0 --core.no-loss {words}".split()
        config = cli.parse(cli.load("eval"), few, "eval").core
        [found] = evaluate_saes([sae], lm, [config], text=str(tmp_path / "a.txt"))
        assert found["core"]["measured"]["tokens"] == 3 * each
    left_out = [Autointerp().settings_for(AutointerpConfig(left_out=ids), sae.cfg, lm).left_out for ids in (None, ())]
    assert lm.tokenizer.bos_token_id in left_out[0] and left_out[1] == ()


@pytest.mark.parametrize(("name", "before", "version"), [("skip_first", 0, 2), ("left_out", [], 3)])
def test_results_with_the_default_of_an_earlier_version_are_reused(tmp_path, name, before, version):
    lm = LanguageModel(make_model("llama"), make_tokenizer(), "tiny")
    (tmp_path / "a.txt").write_text("the sea " * 200)
    sae = SAE(InferenceConfig(lm.width, 6))
    sae.cfg.metadata.update({"model_name": "tiny", "layer": 0, "context_size": 10})
    folder, few = sae.save(tmp_path / "sae"), {"contexts": 3, "resamples": 0, "loss": False}

    def measured(**settings) -> float:
        [found] = evaluate_saes([folder], lm, [CoreConfig(**few, **settings)], text=str(tmp_path / "a.txt"))
        return found["core"]["median_norm"]

    measured()
    content = read_json(path := result_path(folder, "core"))
    assert content.pop("checksum") and content["asked"][name] is None
    content["asked"][name], content["format_version"], content["result"]["median_norm"] = before, version, -1.0
    path.write_text(json.dumps(content))
    assert measured() == -1.0
    assert measured(**{name: before}) > 0


def test_a_changed_text_is_another_question_also_if_other_files_are_read(tmp_path):
    class Both(Core):
        name = "both"

        def files(self, config):
            return [str(tmp_path / "labels.txt")]

    for name in ("text.txt", "labels.txt"):
        (tmp_path / name).write_text("the sea")
    sae = Subject("sae", InferenceConfig(4, 6), None, lambda device: SAE(InferenceConfig(4, 6)))
    session = Session([sae], None, torch.device("cpu"), torch.float32, None, TextSource(str(tmp_path / "text.txt")))
    asked = []
    for name in ("text.txt", "labels.txt"):
        asked.append(session.asked(Request(Both(), CoreConfig()), sae))
        (tmp_path / name).write_text("the land and the sea")
    asked.append(session.asked(Request(Both(), CoreConfig()), sae))
    assert asked[0] != asked[1] != asked[2]


def test_names_are_as_long_as_it_takes(tmp_path):
    folders = [tmp_path / "a" / "sae", tmp_path / "b" / "sae", tmp_path / "b" / "other"]
    assert names_of(folders[1:]) == ["sae", "other"]
    assert names_of(folders) == ["a/sae", "b/sae", "b/other"]
    assert names_of([]) == []
