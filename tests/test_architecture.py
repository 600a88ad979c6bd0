"""Imports point down only, recipes are checked without torch, no file outgrows its room."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A module may import modules of its own floor or of a lower one.
FLOORS = {
    "errors": 0, "machine": 0, "numerics": 1, "backends": 2, "precision": 3, "models": 4, "data": 4,
    "config": 5, "engine": 6, "lab": 7, "export": 7, "features": 7, "doctor": 8, "inspect": 8,
    "cli": 9, "__init__": 10, "__main__": 10,
}  # fmt: skip
WITHOUT_TORCH = [
    "nvfp4", "nvfp4.config", "nvfp4.numerics.spec", "nvfp4.precision.policy",
    "nvfp4.precision.presets", "nvfp4.models.configs", "nvfp4.models.pattern", "nvfp4.data.config",
    "nvfp4.cli",
]  # fmt: skip


def modules() -> dict[str, Path]:
    """Dotted name without `nvfp4.` -> file, for every module of the package."""
    found = {}
    for top, prefix in (("nvfp4", ""), ("models", "models."), ("data", "data.")):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT / top).with_suffix("").parts
            if top == "nvfp4" and parts[0] in ("models", "data", "recipes"):
                continue  # the symbolic links; their files are visited at the top level
            found[prefix + ".".join(parts)] = path
    return found


def imported(path: Path) -> set[str]:
    """First component after `nvfp4.` of everything a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("nvfp4.")}


def family_of(module: str) -> str:
    name = module.split(".")[0]
    return next((family for family in ("config", "cli") if name.startswith(family)), name)


@pytest.mark.parametrize("module", modules())
def test_imports_point_down(module):
    here = FLOORS[family_of(module)]
    for name in imported(modules()[module]):
        if name not in FLOORS and not name.startswith("config"):
            continue  # an attribute of the package itself, such as __version__
        there = FLOORS[family_of(name)]
        assert there <= here, f"{module} (floor {here}) imports nvfp4.{name} (floor {there})"
        if there == here:
            same = family_of(name) == family_of(module)
            assert same, (
                f"{module} and nvfp4.{name} stand side by side and must not import each other"
            )


def test_recipes_are_checked_without_torch():
    code = (
        f"import sys, importlib; [importlib.import_module(m) for m in {WITHOUT_TORCH!r}]; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_files_fit_their_room():
    too_long = {m: n for m, p in modules().items() if (n := len(p.read_text().splitlines())) > 300}
    assert not too_long


@pytest.mark.parametrize("name", ["models", "data"])
def test_linked_packages_refuse_a_second_name(name):
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"import nvfp4.{name}, not {name}" in done.stderr
