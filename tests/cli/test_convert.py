"""`sampled-sae convert`."""

import json

import pytest
import torch

from sampled_sae import cli
from sampled_sae.sae import SAE
from tests.formats.foreign import FOREIGN, weights

D, M = 12, 40
W = weights(D, M)
X = torch.randn(50, D, generator=torch.Generator().manual_seed(0))


def run(*words) -> None:
    cli.main([str(word) for word in words])


@torch.no_grad()
@pytest.mark.parametrize("format", ["saelens", "dictionary_learning"])
@pytest.mark.parametrize("name", ["gemma_scope", "llama_scope", "sparsify topk", "saelens gated", "saelens standard"])
def test_one_sae(name, format, tmp_path, capsys):
    path = FOREIGN[name](tmp_path / "in", W).path
    run("convert", path, tmp_path / "out", "--format", format)
    assert capsys.readouterr().out.strip() == str(tmp_path / "out")
    before, after = SAE.load(path), SAE.load(tmp_path / "out")
    torch.testing.assert_close(after.encode(X), before.encode(X), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after(X), before(X), rtol=1e-4, atol=1e-4)
    kept = {"model_name": before.cfg.metadata["model_name"], "hook_name": before.cfg.metadata["hook_name"]}
    assert kept.items() <= after.cfg.metadata.items()


def test_several_saes(tmp_path, capsys):
    for folder, name in (("a", "gemma_scope_2"), ("b", "dictionary_learning topk"), ("c", "qwen_scope")):
        FOREIGN[name](tmp_path / "in" / folder, W)
    run("convert", tmp_path / "in", tmp_path / "out")
    names = ["layer_1_width_16k_l0_small", "b", "layer1.sae.pt"]
    assert capsys.readouterr().out.split() == [str(tmp_path / "out" / name) for name in names]
    assert all(SAE.load(tmp_path / "out" / name).d_sae == M for name in names)


def test_the_number_of_active_latents(tmp_path):
    path = FOREIGN["qwen_scope"](tmp_path, W).path
    file = path.rename(tmp_path / path.name)
    run("convert", file, tmp_path / "out", "--k", 9)
    assert json.loads((tmp_path / "out" / "cfg.json").read_text())["k"] == 9


def test_refusals_are_one_line_and_leave_nothing(tmp_path, capsys):
    path = FOREIGN["sparsify groupmax"](tmp_path / "in", W).path
    for words, line in (
        (("--format", "zip"), "format = 'zip': unknown; the formats are "),
        (("--format", "sparsify"), "format = 'sparsify': can be read, but not written"),
        (
            ("--format", "dictionary_learning"),
            "architecture = 'groupmax', normalize_activations = 'none': dictionary_l",
        ),
        (("--k", 3), "k = 3: "),
    ):
        with pytest.raises(SystemExit) as stop:
            run("convert", path, tmp_path / "out", *words)
        error = capsys.readouterr().err
        assert stop.value.code == 2 and line in error and error.count("\n") == 1
        assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit):
        run("convert", tmp_path / "nothing", tmp_path / "out")
    assert "there is no such folder" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").touch()
    for format in ("saelens", "dictionary_learning"):
        with pytest.raises(SystemExit):
            run("convert", FOREIGN["gemma_scope"](tmp_path / "g", W).path, tmp_path / "out", "--format", format)
        assert "holds something else than an SAE" in capsys.readouterr().err


@pytest.mark.parametrize("inside", ["", "converted"])
def test_the_source_is_no_place_for_the_result(inside, tmp_path, capsys):
    FOREIGN["gemma_scope"](tmp_path / "in", W)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as stopped:
        run("convert", tmp_path / "in", tmp_path / "in" / inside)
    out, line = tmp_path / "in" / inside, capsys.readouterr().err.strip()
    assert stopped.value.code == 2 and line.endswith(
        f"out = {str(out)!r}: is in the folder that is converted, where reports would show each SAE twice; name "
        "another folder"
    )
    assert sorted(tmp_path.rglob("*")) == before
