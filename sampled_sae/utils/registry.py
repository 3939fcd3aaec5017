"""Plug-ins by name: from the modules of a folder, from entry points of other packages, from users' Python files.

    SCORES: Registry[Score] = Registry("score", "sampled_sae.method.scores", "sampled_sae.scores")
    SCORES.register("l2", score, module=__name__)     # in a module of the folder, of another package, or of a user
    SCORES.find("l2")

A new built-in plug-in is a module in the folder that registers itself when it is imported. Another package names the
module that registers its plug-in in its pyproject.toml, under the name of the plug-in:

    [project.entry-points."sampled_sae.scores"]
    variance = "my_package.scores"
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import runpy
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import TypeVar

from sampled_sae.utils.errors import UserError

T = TypeVar("T")


class Registry(MutableMapping[str, T]):
    """A dictionary of plug-ins that imports them when they are needed."""

    def __init__(self, what: str, package: str, group: str, folders: bool = False, hint: str = ""):
        """`what` is the plug-ins' name in error messages, `package` the folder, `group` that of the entry points.

        With `folders` a plug-in is a folder of the package and not a module. `hint` ends the error of an unknown name.
        """
        self.what, self.package, self.group, self.folders, self.hint = what, package, group, folders, hint
        self.builtin: set[str] = set()
        self.failed: dict[str, str] = {}  # entry points that could not be loaded, by name, with the reason
        self._items: dict[str, T] = {}
        self._imported = self._entered = False

    def register(self, name: str, item: T, module: str) -> None:
        """Add a plug-in that `module` defines. It may replace an earlier one of the same name, but no built-in one."""
        if module.startswith(f"{self.package}."):
            self.builtin.add(name)
        else:
            self._import_folder()
            if name in self.builtin:
                right = f"is the name of a built-in {self.what}; register yours under another name"
                raise UserError(f"{self.what} = {name!r}: {right}")
        self._items[name] = item

    def find(self, name: str) -> T:
        """The plug-in of that name; `UserError` with the known names if there is none."""
        if name in self:
            return self[name]
        if name in self.failed:
            raise UserError(f"{self.what} = {name!r}: {self.failed[name]}")
        raise UserError(f"{self.what} = {name!r}: unknown; the {self.what}s are {', '.join(self)}{self.hint}")

    def load_file(self, path: Path) -> None:
        """Run a user's Python file, so that the plug-ins that it registers become known."""
        where = f"{self.what}s from {str(path)!r}"
        if not path.is_file():
            raise UserError(f"{where}: no such Python file")
        try:
            runpy.run_path(str(path))
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        except Exception as error:
            raise UserError(f"{where}: {_line(error)}") from error

    def __getitem__(self, name: str) -> T:
        self._import_folder()
        if name not in self._items:
            self._load_entry_points()
        return self._items[name]

    def __setitem__(self, name: str, item: T) -> None:
        self._items[name] = item

    def __delitem__(self, name: str) -> None:
        del self._items[name]

    def __iter__(self) -> Iterator[str]:
        self._import_folder()
        self._load_entry_points()
        return iter(list(self._items))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def _import_folder(self) -> None:
        if not self._imported:
            package = importlib.import_module(self.package)
            for module in sorted(pkgutil.iter_modules(package.__path__), key=lambda module: module.name):
                if module.ispkg or not self.folders:
                    importlib.import_module(f"{self.package}.{module.name}")
            self._imported = True

    def _load_entry_points(self) -> None:
        """A package that cannot be imported does not keep the others from being used."""
        if not self._entered:
            self._entered = True
            for entry in importlib.metadata.entry_points(group=self.group):
                try:
                    entry.load()
                except Exception as error:
                    self.failed[entry.name] = f"its package cannot be loaded: {_line(error)}"


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
