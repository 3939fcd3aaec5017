"""What is found in folders, and what is said of the rest."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sampled_sae.method import presets
from sampled_sae.reporting.collect import collect
from sampled_sae.utils.errors import UserError
from tests.reporting.made_up_sweep import K, M, core, grid, put, write_run, write_sae, write_sweep

BASE = presets.named([presets.batchtopk(M, K)], 0)[0]


def test_a_run_with_all_that_belongs_to_it(tmp_path: Path) -> None:
    found = collect([write_sweep(tmp_path / "run")])
    assert [sae.name for sae in found.saes] == sorted(str(config.name) for config in grid())
    assert {sae.run.folder for sae in found.saes if sae.run} == {(tmp_path / "run").resolve()}
    assert not found.notes and len(found.runs) == 1
    sae = found.saes[0]
    assert set(sae.results) == {"core", "probing", "absorption", "autointerp", "training"}
    assert (sae.width, sae.latents, sae.finished) == (16, M, True)
    assert sae.run is not None and len(sae.run.log[sae.name]) == 3


def test_passes_and_layers(tmp_path: Path) -> None:
    for folder in ("pass-1", "pass-2/layer-3", "pass-2/layer-4"):
        write_run(tmp_path / folder, [BASE])
        write_sae(tmp_path / folder / "saes" / str(BASE.name), BASE, core=core())
    found = collect([tmp_path])
    assert len(found.saes) == len(found.runs) == 3


def test_an_sae_by_itself_still_finds_its_run(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    found = collect([tmp_path / "saes" / "topk-s0"])
    assert [sae.name for sae in found.saes] == ["topk-s0"]
    assert found.saes[0].run is not None and "topk-s0" in found.saes[0].run.log


def test_results_without_weights_or_settings(tmp_path: Path) -> None:
    folder = write_sae(tmp_path / "copied", BASE, core=core(0.3))
    (folder / "sampled_sae.json").unlink()
    (folder / "cfg.json").unlink()
    (sae,) = collect([tmp_path]).saes
    assert sae.config is not None and sae.config["d_sae"] == M and sae.name == BASE.name
    assert sae.results["core"]["result"]["normal"]["fvu"]["value"] == 0.3


def test_an_sae_of_another_trainer(tmp_path: Path) -> None:
    put(tmp_path / "foreign" / "cfg.json", {"d_in": 8, "d_sae": 32, "metadata": {"model_name": "gpt2", "x": None}})
    put(tmp_path / "foreign" / "sae_weights.safetensors", "not read")
    (sae,) = collect([tmp_path]).saes
    assert (sae.name, sae.config, sae.width, sae.latents) == ("foreign", None, 8, 32)
    assert sae.metadata == {"model_name": "gpt2"} and not sae.results


def test_a_run_that_is_not_finished(tmp_path: Path) -> None:
    found = collect([write_run(tmp_path, [BASE], finished=False)])
    (sae,) = found.saes
    assert not sae.finished and sae.config is not None and sae.run is not None
    assert not found.notes


@pytest.mark.parametrize(
    "text", ['{"result": {"norm', "", "\0\0", "[1, 2]", "{}", '"text"', '{"asked": {}}', '{"result": 3}']
)
def test_a_damaged_result_is_named_and_left_out(tmp_path: Path, text: str) -> None:
    write_sweep(tmp_path)
    bad = tmp_path / "saes" / "topk-s0" / "evals" / "core.json"
    put(bad, text)
    found = collect([tmp_path])
    (note,) = found.notes
    assert str(bad) in note and "left out" in note and "\n" not in note
    (sae,) = [sae for sae in found.saes if sae.name == "topk-s0"]
    assert "core" not in sae.results and "probing" in sae.results


def test_other_damaged_files_are_named(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    put(tmp_path / "run.json", "{")
    put(tmp_path / "saes" / "topk-s0" / "sampled_sae.json", "[]")
    put(tmp_path / "compare.json", "{")
    found = collect([tmp_path])
    assert len(found.notes) == 3 and not found.comparisons
    assert len(found.saes) == len(grid())


def test_an_saes_file_without_settings_is_named(tmp_path: Path) -> None:
    """It was left out of the report without a word."""
    write_sweep(tmp_path)
    put(tmp_path / "saes" / "topk-s0" / "sampled_sae.json", {"": {}})
    notes = collect([tmp_path]).notes
    assert len(notes) == 2 and all("sampled_sae.json" in note and "left out" in note for note in notes)


def test_comparisons_are_found(tmp_path: Path) -> None:
    put(tmp_path / "a" / "compare.json", {"seeds": []})
    found = collect([tmp_path])
    assert [folder.name for folder, _ in found.comparisons] == ["a"] and not found.saes


def test_a_folder_that_is_named_twice_counts_once(tmp_path: Path) -> None:
    write_sweep(tmp_path / "run")
    found = collect([tmp_path, tmp_path / "run", tmp_path / "run" / "saes" / "topk-s0"])
    assert len(found.saes) == len(grid()) and len(found.runs) == 1


def test_what_is_being_written_is_not_read(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    shutil.copytree(tmp_path / "saes" / "topk-s0", tmp_path / "saes" / ".topk-s9.tmp")
    shutil.copytree(tmp_path / "saes" / "topk-s0", tmp_path / "checkpoints" / "x")
    assert len(collect([tmp_path]).saes) == len(grid())


def test_bad_folders_are_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        collect([tmp_path])
    with pytest.raises(UserError, match="no such folder"):
        collect([tmp_path / "nowhere"])
    with pytest.raises(UserError, match="at least one"):
        collect([])
