from pathlib import Path

import pytest

from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import alone_in, new_folder, read_json, write_json, write_text


def test_a_failure_halfway_leaves_the_old_folder(tmp_path):
    with new_folder(tmp_path / "x") as folder:
        (folder / "a").write_text("old")
    with pytest.raises(RuntimeError), new_folder(tmp_path / "x") as folder:
        (folder / "a").write_text("new")
        raise RuntimeError("power cut")
    assert (tmp_path / "x" / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_replacement_that_fails_puts_the_old_folder_back(tmp_path, monkeypatch):
    with new_folder(tmp_path / "x") as folder:
        (folder / "a").write_text("old")
    real = Path.rename

    def refuse(self, target):
        if self.name.endswith(".tmp"):
            raise OSError(13, "Permission denied")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(UserError, match="cannot write there"), new_folder(tmp_path / "x") as folder:
        (folder / "a").write_text("new")
    assert (tmp_path / "x" / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_text_and_json(tmp_path):
    write_text(tmp_path / "t", "é")
    assert (tmp_path / "t").read_text(encoding="utf-8") == "é"
    write_json(tmp_path / "j", {"a": [1, None]})
    assert read_json(tmp_path / "j") == {"a": [1, None]}
    with pytest.raises(ValueError, match="Out of range float"):
        write_json(tmp_path / "j", {"a": float("nan")})
    assert read_json(tmp_path / "j") == {"a": [1, None]}
    (tmp_path / "j").write_text('{"a": [1')
    with pytest.raises(UserError, match="not valid JSON"):
        read_json(tmp_path / "j")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["j", "t"]


def test_one_process_at_a_time(tmp_path):
    with alone_in(tmp_path / "run"), pytest.raises(UserError, match="another process is at work there"):  # noqa: SIM117
        with alone_in(tmp_path / "run"):
            pass
    with alone_in(tmp_path / "run"):
        pass
