"""The notebooks: thin, stored without outputs, and executed on run folders made here."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from test_parity import write_run

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PARITY = ROOT / "notebooks" / "02_loss_parity.ipynb"


def execute(path: Path, folder: Path) -> list[dict]:
    """All outputs of a notebook that is run with `folder` as its working directory."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(folder)}})
    client.execute()
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_thin_and_stored_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert len(notebook.cells) <= 15
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)


def test_loss_parity_shows_table_and_figure(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    write_run(tmp_path / "runs" / "tiny_bf16")
    write_run(tmp_path / "runs" / "tiny_nvfp4", gap=0.005, salt=1)
    outputs = execute(PARITY, tmp_path)
    printed = "".join(output.get("text", "") for output in outputs)
    assert "PASS          tiny_nvfp4: the whole interval is within the tolerance" in printed
    assert "30 pairs in blocks of" in printed and "last  50%  PASS" in printed
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1


def test_loss_parity_says_which_command_makes_a_missing_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    write_run(tmp_path / "runs" / "tiny_bf16", steps=30)
    with pytest.raises(CellExecutionError, match="make it with: nvfp4 train tiny_nvfp4"):
        execute(PARITY, tmp_path)
