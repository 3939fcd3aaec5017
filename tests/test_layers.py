"""Data flows one way through the package: a module imports only from its own layer and from the layers above it."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import sampled_sae

ROOT = Path(sampled_sae.__file__).parent
LAYERS = (
    *(
        "utils",
        "migrations",
        "config",
        "method",
        "formats",
        "hooks",
        "sae",
        "kernels",
        "models",
        "data",
        "training",
        "evals",
    ),
    *("reporting", "browser", "api", "experiments", "sweeps", "cli", ""),
)
"""Each entry may import from the ones before it; "" is the package's own `__init__` and `__main__`."""
FILES = {
    ".".join((ROOT.name, *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}


def imported(path: Path) -> Iterator[str]:
    """Modules of the package that a file imports anywhere, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in FILES)
        elif isinstance(node, ast.ImportFrom) and node.module in FILES:
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                yield inner if inner in FILES else node.module


IMPORTS = {module: set(imported(path)) - {module} for module, path in FILES.items()}


def layer(module: str) -> int:
    top = module.removeprefix(ROOT.name).removeprefix(".").split(".")[0]
    return LAYERS.index("" if top == "__main__" else top)


@pytest.mark.parametrize("module", FILES)
def test_a_module_imports_only_from_above(module):
    lower = {other for other in IMPORTS[module] if layer(other) > layer(module)}
    # Commands print the version, which belongs to the package itself.
    assert lower <= ({ROOT.name} if module.startswith(f"{ROOT.name}.cli") else set())


def test_no_import_cycle_lazy_ones_included():
    graph = {module: others - {ROOT.name} for module, others in IMPORTS.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
