"""Plug-ins: a module in a folder, an entry point of another package, a user's file."""

import sys

import pytest

from sampled_sae.utils.errors import UserError
from sampled_sae.utils.registry import Registry

PACKAGE = """
from sampled_sae.utils.registry import Registry
KINDS = Registry("kind", __name__, "plug.kinds")
"""
MODULE = "from plug import KINDS\nKINDS.register({name!r}, {value}, __name__)\n"


@pytest.fixture
def kinds(tmp_path, monkeypatch):
    """An empty registry in a package `plug`, which a test may add files to."""
    (tmp_path / "plug").mkdir()
    (tmp_path / "plug" / "__init__.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] in ("plug", "other")]:
        monkeypatch.delitem(sys.modules, name)
    import plug

    return plug.KINDS


def entry_point(folder, name, module):
    (folder / f"{name}-1.dist-info").mkdir()
    (folder / f"{name}-1.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 1\n")
    (folder / f"{name}-1.dist-info" / "entry_points.txt").write_text(f"[plug.kinds]\n{name} = {module}\n")


def test_a_file_in_the_folder_is_enough(kinds, tmp_path):
    (tmp_path / "plug" / "first.py").write_text(MODULE.format(name="one", value=1))
    (tmp_path / "plug" / "second.py").write_text(MODULE.format(name="two", value=2))
    assert kinds.find("two") == 2
    assert dict(kinds) == {"one": 1, "two": 2}
    with pytest.raises(UserError, match=r"^kind = 'three': unknown; the kinds are one, two$"):
        kinds.find("three")
    with pytest.raises(UserError, match=r"^kind = 'one': is the name of a built-in kind; register yours under another"):
        kinds.register("one", 5, "mine")


def test_other_packages_register_through_entry_points(kinds, tmp_path):
    (tmp_path / "other.py").write_text(MODULE.format(name="theirs", value=3))
    entry_point(tmp_path, "theirs", "other")
    entry_point(tmp_path, "broken", "absent_package")
    assert kinds.find("theirs") == 3
    with pytest.raises(UserError, match=r"^kind = 'broken': its package cannot be loaded: ModuleNotFoundError: .*$"):
        kinds.find("broken")
    assert list(kinds) == ["theirs"]


def test_users_files(kinds, tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(MODULE.format(name="mine", value=4))
    kinds.load_file(script)
    assert kinds.find("mine") == 4
    script.write_text("1 / 0")
    with pytest.raises(UserError, match=r"^kinds from '.*mine.py': ZeroDivisionError: division by zero$"):
        kinds.load_file(script)
    with pytest.raises(UserError, match="no such Python file"):
        kinds.load_file(tmp_path / "absent.py")


def test_only_folders_may_be_plug_ins(kinds, tmp_path):
    (tmp_path / "plug" / "helper.py").write_text("raise RuntimeError")
    (tmp_path / "plug" / "kind").mkdir()
    (tmp_path / "plug" / "kind" / "__init__.py").write_text("")
    only: Registry[int] = Registry("kind", "plug", "plug.kinds", folders=True)
    assert list(only) == []
    assert "plug.kind" in sys.modules
