"""Material for a GPU machine without internet arrives whole, or not at all."""

import argparse
import sys
import tarfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import offline


@pytest.fixture
def pieces(tmp_path) -> Path:
    """Pieces of an archive with one file of 10,000 bytes."""
    folder = tmp_path / "material"
    folder.mkdir()
    (folder / "smollm2.gguf").write_bytes(bytes(range(250)) * 40)
    archive = tmp_path / "material.tar.xz"
    with tarfile.open(archive, "w:xz", preset=1) as tar:
        tar.add(folder, "")
    offline.split(archive, tmp_path / "pieces", "smollm2", 100)
    return tmp_path / "pieces"


def test_pieces_are_joined_beside_the_committed_results(pieces, tmp_path):
    assert len(list(pieces.glob("smollm2-*"))) > 2
    offline.unpack(pieces, "smollm2", tmp_path / "out")
    assert (tmp_path / "out" / "smollm2.gguf").read_bytes() == bytes(range(250)) * 40
    for copy, path in offline.COMMITTED.items():
        assert (tmp_path / "out" / copy).read_bytes() == (offline.ROOT / "docs" / path).read_bytes()


def test_everything_that_is_packed_arrives(tmp_path, monkeypatch):
    monkeypatch.setattr(offline, "token_ids", lambda folder, *_: (folder.mkdir(), (folder / "ids.npz").touch()))
    monkeypatch.setattr(offline, "packages", lambda folder, *_: (folder.mkdir(), (folder / "gguf.py").touch()))
    for name in ("model.gguf", "labels.parquet", "text.txt"):
        (tmp_path / name).write_text(name)
    texts = [word for flag in ("--text", "--select-text", "--report-text") for word in (flag, "text.txt")]
    more = ["--gguf", "model.gguf", "--probing", "labels.parquet", "--files", "text.txt", "--piece-mb", "1"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["offline.py", "pack", "pieces", "gemma", *texts, *more])
    offline.main()
    monkeypatch.setattr(sys, "argv", ["offline.py", "unpack", "pieces", "gemma", "out"])
    offline.main()
    found = {str(path.relative_to("out")) for path in Path("out").rglob("*") if path.is_file()}
    material = {"gemma.gguf", "ids.npz", "probing/labels.parquet", "files/text.txt", "packages/gguf.py"}
    assert found == material | set(offline.COMMITTED)
    assert Path("out/gemma.gguf").read_text() == "model.gguf"


def test_results_of_an_earlier_call_stay(pieces, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.jsonl").write_text("further\n")
    offline.unpack(pieces, "smollm2", tmp_path / "out")
    assert (tmp_path / "out" / "results.jsonl").read_text() == "further\n"


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"other")])
def test_a_missing_or_damaged_piece_is_named(pieces, tmp_path, damage):
    damage(pieces / "smollm2-01")
    with pytest.raises(SystemExit, match="smollm2-01: missing or damaged"):
        offline.unpack(pieces, "smollm2", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_study_takes_the_texts_of_the_models_that_are_there(tmp_path, monkeypatch):
    import numpy as np

    from sampled_sae.experiments import study

    (tmp_path / "probing").mkdir()
    (tmp_path / "probing" / "b.parquet").touch()
    (tmp_path / "probing" / "a.parquet").touch()
    (tmp_path / "gemma.gguf").touch()
    ids = {name: np.full((3, 512), n) for n, name in enumerate(("train", "select", "wide"))}
    np.savez(tmp_path / offline.contexts_file("gemma"), **ids)
    given = {}
    monkeypatch.setattr(study, "run_study", lambda *parts, **how: given.update(parts=parts, how=how) or True)
    design = offline.ROOT / "docs" / "results" / "design.json"
    offline.study(tmp_path, argparse.Namespace(design=design, stages=["default"], until=60.0, words=None))
    _, material, out, stages = given["parts"]
    assert (out, stages, given["how"]) == (tmp_path, ["default"], {"until": 60.0})
    assert [Path(path).name for path in material.probing] == ["a.parquet", "b.parquet"]
    assert list(material.train) == ["google/gemma-3-270m"] == list(material.models)
    assert material.report["google/gemma-3-270m"][0, 0] == 2  # the wide set, as in the committed results
