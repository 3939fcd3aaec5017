"""Files that an option of the optimizer or a variant of AuxK touches, plain path and GPU path together."""

import ast
from pathlib import Path

import pytest

import sampled_sae

PACKAGE = Path(sampled_sae.__file__).parent


def users(*names: str) -> set[str]:
    """Modules that read an attribute, or define a field or a function, of one of these names."""
    found = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            field = isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id
            name = field or getattr(node, "attr" if isinstance(node, ast.Attribute) else "name", None)
            if name in names:
                found.add(file.relative_to(PACKAGE).as_posix())
    return found


@pytest.mark.parametrize("option", ["beta1", "beta2", "clip"])
def test_an_optimizer_option_is_in_three_files(option):
    assert users(option) == {"method/config.py", "training/optimizer.py", "kernels/adam.py"}


def test_auxk_is_computed_in_two_files():
    assert users("add_auxk", "_with_auxk") == {"training/step.py", "kernels/gradients.py"}
