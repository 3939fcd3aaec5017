from importlib.metadata import version
from pathlib import Path

import pytest

from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import alone_in, checksum, new_folder, read_json, remove_leftovers, write_json, write_text


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


def test_a_lock_that_is_a_link_is_refused_and_its_target_stays(tmp_path):
    (tmp_path / "target").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "target")
    with pytest.raises(UserError, match=r"\.lock: cannot write there"), alone_in(tmp_path / "run"):
        pass
    assert (tmp_path / "target").read_text() == "precious"
    if version("filelock") < "4.2":  # the last one for Python 3.10 empties a file that .lock is a hard link to
        return
    (tmp_path / "run" / ".lock").unlink()
    (tmp_path / "run" / ".lock").hardlink_to(tmp_path / "target")
    with alone_in(tmp_path / "run"):
        pass
    assert (tmp_path / "target").read_text() == "precious"


def test_leftovers_of_killed_writers_are_removed(tmp_path):
    for name in (".x.12.tmp", ".y.12.tmp"):
        (tmp_path / name).write_text("half")
    (tmp_path / ".x.ab.tmp").mkdir()
    (tmp_path / ".x.cd.old" / "x").mkdir(parents=True)  # killed between the two renames: the old one is all there is
    (tmp_path / ".x.cd.old" / "x" / "a").write_text("old")
    remove_leftovers(tmp_path, "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".y.12.tmp", "x"]
    assert (tmp_path / "x" / "a").read_text() == "old"
    remove_leftovers(tmp_path / "nothing")


def test_a_checksum_sees_every_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr("sampled_sae.utils.files.CHUNK", 16)
    path, found = tmp_path / "f", set()
    for data in (b"", b"a" * 40, b"a" * 39 + b"b", b"b" + b"a" * 39, b"a" * 16 + b"b" * 16, b"b" * 16 + b"a" * 16):
        path.write_bytes(data)
        found.add(checksum(path))
    assert len(found) == 6


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, "{", "\udcff"])
def test_json_that_cannot_be_read_is_one_line(text, tmp_path):
    (tmp_path / "j").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=r"not valid JSON|not UTF-8"):
        read_json(tmp_path / "j")


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', "NaN", "[-Infinity]", "1e999", "9" * 400, "9" * 5000, "[" * 9999])
def test_json_that_is_not_standard_is_one_line(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match="not valid JSON") as error:
        read_json(tmp_path / "a.json")
    assert "\n" not in str(error.value)
