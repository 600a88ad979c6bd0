"""Every command block of README.md runs: short ones here, long ones in `make test-long`.

A block is ```bash ...``` or ```python ...```. The HTML comment before it says how it is run:

    <!-- test -->              run in an empty folder, in `make test`
    <!-- test: python -->      run by the interpreter, in `make test`
    <!-- test: long -->        as the first, in `make test-long`
    <!-- test: clone -->       run in a fresh clone without an environment, in `make test-long`
    <!-- test: suite -->       it is what runs these tests; checked against .ci/run
    <!-- test: nodes -->       run twice at once as two nodes of this machine, in `make test-long`
    <!-- test: slurm -->       run with a stand-in for srun, in `make test-long`

A block without such a comment fails the suite.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCK = re.compile(
    r"(?:<!-- (?P<how>test[^\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
BLOCKS = [m.groupdict() for m in BLOCK.finditer(README)]
COMMANDS = [b for b in BLOCKS if b["language"] in ("bash", "sh", "shell", "console", "python")]
# Small values for the variables that README's cluster blocks leave to the reader.
ON_THIS_MACHINE = {
    "NODES": "2", "GPUS": "1", "HOST": "localhost", "PORT": "29611",
    "RECIPE": "tiny_nvfp4 train.steps=2 schedule.warmup_steps=1 run.dir=runs/cluster",
}  # fmt: skip


def blocks(how: str) -> list:
    chosen = [b["code"] for b in COMMANDS if b["how"] == how]
    return [pytest.param(code, id=code.strip().splitlines()[-1][:60]) for code in chosen]


def environment(**more: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "COLUMNS": "120", **more}


def run(code: str, cwd: Path, **more: str) -> str:
    """Runs a block as a script that stops at the first failure; returns its output."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=cwd, env=environment(**more), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def test_every_block_is_run():
    known = {"test", *(f"test: {how}" for how in "python long clone suite nodes slurm".split())}
    assert COMMANDS, "README has no command blocks"
    assert [b["code"] for b in COMMANDS if b["how"] not in known] == []
    assert all(b["language"] for b in BLOCKS), "every block names its language (text, yaml, bash)"


def test_suite_block_is_what_ci_runs():
    (block,) = [b["code"].strip() for b in COMMANDS if b["how"] == "test: suite"]
    assert block.split("#")[0].strip() == "make test"
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == "exec make test"


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """An empty folder that holds what README's commands refer to: a text of the reader's own."""
    (tmp_path / "my_text").mkdir()
    source = "\n\n".join(p.read_text() for p in sorted(Path(os.__file__).parent.glob("a*.py")))
    for i in range(40):
        (tmp_path / "my_text" / f"{i}.txt").write_text(source[i * 4000 : (i + 1) * 4000])
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    return tmp_path


@pytest.mark.parametrize("code", blocks("test"))
def test_short_blocks(code, workplace):
    run(code, workplace)


@pytest.mark.parametrize("code", blocks("test: python"))
def test_python_blocks(code, workplace):
    (workplace / "block.py").write_text(code)
    run("python block.py", workplace)


@pytest.mark.long
@pytest.mark.parametrize("code", blocks("test: long"))
def test_long_blocks(code, workplace):
    run(code, workplace)


@pytest.mark.long
@pytest.mark.parametrize("code", blocks("test: clone"))
def test_blocks_in_a_fresh_clone(code, tmp_path):
    run(f"git clone --quiet '{ROOT}' clone", tmp_path)
    run(code, tmp_path / "clone", XDG_CACHE_HOME=str(tmp_path / "cache"))


@pytest.mark.long
@pytest.mark.parametrize("code", blocks("test: nodes"))
def test_two_nodes_on_this_machine(code, workplace):
    nodes = [
        subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", code], cwd=workplace, text=True,
            env=environment(**ON_THIS_MACHINE), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for _ in range(2)
    ]  # fmt: skip
    outputs = [node.communicate()[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs[0][-3000:] + outputs[1][-3000:]
    assert "2 data-parallel" in "".join(outputs)


@pytest.mark.long
@pytest.mark.parametrize("code", blocks("test: slurm"))
def test_slurm_script_with_a_stand_in(code, workplace):
    """`srun CMD` runs CMD once: one node whose name is localhost."""
    commands = workplace / "commands"
    commands.mkdir()
    for name, body in {"srun": 'exec "$@"', "scontrol": "echo localhost"}.items():
        (commands / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (commands / name).chmod(0o755)
    one_node = {**ON_THIS_MACHINE, "NODES": "1", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "a"}
    one_node |= {"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "1"}
    path = f"{commands}{os.pathsep}{environment()['PATH']}"
    assert "finished" in run(code, workplace, **one_node, PATH=path)
