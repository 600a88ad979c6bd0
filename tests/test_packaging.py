"""The wheel: one top-level name, the recipes inside, links that are links."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory) -> list[str]:
    """File names inside a wheel that is built from a copy of the tracked files."""
    source = tmp_path_factory.mktemp("source")
    wheels = tmp_path_factory.mktemp("wheels")
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True,
    ).stdout.decode().split("\0")  # fmt: skip
    for name in filter(None, files):
        if name.startswith("tests/") or not (ROOT / name).exists():
            continue
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to((ROOT / name).readlink())
        else:
            target.write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [
            sys.executable, "-c",
            "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])",
            str(wheels),
        ],
        cwd=source, check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = wheels.glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_wheel_has_one_top_level_package(wheel_names):
    tops = {name.split("/")[0] for name in wheel_names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"nvfp4"}


def test_wheel_holds_every_recipe(wheel_names):
    recipes = {p.relative_to(ROOT).as_posix() for p in (ROOT / "recipes").rglob("*.yaml")}
    assert "recipes/base.yaml" in recipes
    assert {f"nvfp4/{name}" for name in recipes} <= set(wheel_names)


def test_wheel_holds_every_module(wheel_names):
    files = {
        f"nvfp4/{top}/{p.relative_to(ROOT / top).as_posix()}"
        for top in ("models", "data")
        for p in (ROOT / top).rglob("*.py")
    }
    assert files and files <= set(wheel_names)
    assert "nvfp4/py.typed" in wheel_names


@pytest.mark.parametrize("name", ["models", "data", "recipes"])
def test_links_are_committed_as_links(name):
    link = ROOT / "nvfp4" / name
    assert link.is_symlink() and link.readlink() == Path("..") / name
    mode = subprocess.run(
        ["git", "ls-files", "-s", f"nvfp4/{name}"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()[0]
    assert mode == "120000"


def test_setup_never_imports_torch():
    assert "import torch" not in (ROOT / "setup.py").read_text()
