"""SAEs as folders hold them, and what evaluations left there."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sampled_sae.evals.results import Explanation, load_live, save_firing
from sampled_sae.evals.similarity.members import open_member, open_members, top_features
from sampled_sae.utils.errors import UserError
from tests.evals.similarity.tools import explain, made, member_of, rows, seeded


def core(folder, dead: int) -> None:
    (folder / "evals").mkdir(exist_ok=True)
    (folder / "evals" / "core.json").write_text(json.dumps({"result": {"density": {"dead": dead}}}))


def test_a_folder_says_what_the_sae_says(tmp_path):
    sae = seeded(seed=3, score="l2", layer=2, training={"seed": 9, "steps": 5})
    there, here = open_member(sae.save(tmp_path / "a")), member_of(sae, "a")
    for name in ("name", "latents", "width", "configuration", "kind", "seed", "data_seed"):
        assert getattr(there, name) == getattr(here, name), name
    assert (there.kind, there.seed, there.data_seed) == ("sampled:score=l2,l=2", 3, 9)
    assert there.configuration["layer"] == 2 and there.configuration["pool.score"] == "l2"
    assert torch.equal(there.decoder(), sae.W_dec.detach())


def test_names_tell_folders_apart(tmp_path):
    folders = [seeded(seed=i).save(tmp_path / run / "saes" / "x") for i, run in enumerate(("one", "two"))]
    assert [member.name for member in open_members(folders)] == ["one/saes/x", "two/saes/x"]
    assert [member.name for member in open_members([folders[0], folders[0]])] == ["x"]


def test_runs_are_opened_as_the_command_opens_them(tmp_path, monkeypatch, capsys):
    for seed in (0, 1):
        seeded(seed=seed).save(tmp_path / "runs" / "first" / "saes" / f"b-s{seed}")
    assert [member.name for member in open_members([str(tmp_path / "runs" / "first")])] == ["b-s0", "b-s1"]
    with pytest.raises(UserError, match="there is no such folder"):
        open_members([tmp_path / "nothing"])
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[3] / "docs" / "compare.md").read_text(encoding="utf-8")
    exec(page.split("```python\n")[1].split("```")[0], {})
    assert "('b-s0', 'b-s1', " in capsys.readouterr().out, "the page's own lines"


def test_a_folder_of_another_program(tmp_path):
    folder = made(rows(5, 4)).save(tmp_path / "a")
    (folder / "sampled_sae.json").unlink()
    member = open_member(folder)
    assert member.kind is None and member.configuration == {} and (member.latents, member.width) == (5, 4)


def test_damaged_folders_are_named(tmp_path):
    with pytest.raises(UserError, match=r"sae_weights\.safetensors: missing or damaged"):
        open_member(tmp_path)
    save_file({"W_enc": torch.ones(2, 2)}, tmp_path / "sae_weights.safetensors")
    with pytest.raises(UserError, match="W_dec has shape None"):
        open_member(tmp_path)
    save_file({"W_dec": torch.ones(2)}, tmp_path / "sae_weights.safetensors")
    with pytest.raises(UserError, match=r"W_dec has shape \(2,\)"):
        open_member(tmp_path)
    save_file({"W_dec": torch.ones(2, 2)}, tmp_path / "sae_weights.safetensors")
    (tmp_path / "sampled_sae.json").write_text("[]")
    with pytest.raises(UserError, match=r"sampled_sae.json: must hold an object with named fields"):
        open_member(tmp_path)


def test_who_lives_is_read_where_it_is_known(tmp_path):
    folder = seeded(m=4).save(tmp_path / "a")
    mask, why = load_live(folder, 4)
    assert mask is None and "firing.safetensors" in why
    core(folder, 2)
    assert load_live(folder, 4).mask is None, "how many are dead does not say which"
    core(folder, 4)
    assert load_live(folder, 4).mask.tolist() == [False] * 4
    core(folder, 0)
    assert load_live(folder, 4).mask.tolist() == [True] * 4
    save_file({"sparsity": torch.tensor([-10.0, -9.0, -1.0, -10.0])}, folder / "sparsity.safetensors")
    core(folder, 2)
    assert load_live(folder, 4).mask.tolist() == [False, True, True, False]
    save_firing(folder, torch.tensor([3, 0, 0, 1]), tokens=10)
    assert load_live(folder, 4).mask.tolist() == [True, False, False, True]
    assert open_member(folder).live.source.endswith("firing.safetensors")


def test_bad_files_about_life_are_named(tmp_path):
    folder = seeded(m=4).save(tmp_path / "a")
    (folder / "evals").mkdir()
    (folder / "evals" / "core.json").write_text("{}")
    with pytest.raises(UserError, match=r"core\.json: not a result of the core evaluation"):
        load_live(folder, 4)
    save_firing(folder, torch.ones(5), tokens=1)
    with pytest.raises(UserError, match=r"fired has shape \(5,\): must be \(4,\)"):
        load_live(folder, 4)
    (folder / "evals" / "firing.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match="missing or damaged"):
        load_live(folder, 4)


def test_explanations_come_along(tmp_path):
    folder = seeded(m=4).save(tmp_path / "a")
    assert open_member(folder).explained == {}
    explain(folder, {2: "dogs", 0: "cats"}, {2: 0.9})
    assert open_member(folder).explained == {0: Explanation("cats", None), 2: Explanation("dogs", 0.9)}
    explain(folder, {1: "x"}, {1: "high"})
    with pytest.raises(UserError, match="score = 'high': must be a number"):
        open_member(folder)
    explain(folder, {4: "beyond"})
    with pytest.raises(UserError, match="explains latent 4: the SAE has 4"):
        open_member(folder)


def test_top_features_are_those_of_the_best_scores():
    scores = [0.5, None, 1.0, 0.75, 1.0]
    explained = {i: Explanation(f"e{i}", score) for i, score in enumerate(scores)}
    assert [latent for latent, _ in top_features(explained, 3)] == [2, 4, 3]
    assert len(top_features(explained)) == 4 and top_features({}) == []
