"""Package discovery, the symlink guard and the optional C++ kernels; metadata is in pyproject.toml.

Never imports torch: the kernels have a plain C interface. Without a compiler, or where it fails,
installation goes on, and `nvfp4 doctor` says that the CPU backend is missing.
"""

import hashlib
from pathlib import Path

from setuptools import Extension, find_namespace_packages, setup

for name in ("models", "data", "recipes"):
    if not Path("nvfp4", name).is_dir():
        raise SystemExit(
            f"nvfp4/{name} is not a folder: this checkout lost its symbolic links; "
            "run: git config core.symlinks true && git checkout ."
        )

SOURCES = sorted(Path("nvfp4/backends").glob("cpu_*.[ch]*"))  # cpu_kernels.cpp and its headers
KERNELS = Extension(
    "nvfp4.backends._cpu_kernels",
    sources=["nvfp4/backends/cpu_kernels.cpp"],
    depends=[str(path) for path in SOURCES],
    # what backends/cpu_library.py recognises the library of these sources by
    define_macros=[
        ("SOURCES", hashlib.sha256(b"".join(p.read_bytes() for p in SOURCES)).hexdigest())
    ],
    # no fast-math, no contraction to fma: the bits are those of numerics/
    extra_compile_args=[
        "-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
        "-g0", "-Wno-psabi",
    ],
    libraries=["dl", "pthread"],
    optional=True,
)  # fmt: skip

setup(
    # explicit, so that `pip install -e` writes a plain .pth file that type checkers can follow
    package_dir={"": "."},
    packages=find_namespace_packages(include=["nvfp4", "nvfp4.*"]),
    package_data={
        "nvfp4": ["py.typed"],
        "nvfp4.backends": ["*.cpp", "*.h"],
        "nvfp4.recipes": ["*.yaml", "*/*.yaml", "*.md"],
    },
    ext_modules=[KERNELS],
)
