"""Package discovery and the symlink guard; metadata is in pyproject.toml. Never imports torch."""

from pathlib import Path

from setuptools import find_namespace_packages, setup

for name in ("models", "data", "recipes"):
    if not Path("nvfp4", name).is_dir():
        raise SystemExit(
            f"nvfp4/{name} is not a folder: this checkout lost its symbolic links; "
            "run: git config core.symlinks true && git checkout ."
        )

setup(
    # explicit, so that `pip install -e` writes a plain .pth file that type checkers can follow
    package_dir={"": "."},
    packages=find_namespace_packages(include=["nvfp4", "nvfp4.*"]),
    package_data={"nvfp4": ["py.typed"], "nvfp4.recipes": ["*.yaml", "*/*.yaml", "*.md"]},
)
