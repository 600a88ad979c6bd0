"""A full disk, damaged checkpoints: the last good state is left, and one line says so."""

import errno

import pytest
from engine_runs import rows, small

from nvfp4.engine.train import train
from nvfp4.errors import MachineError, UserError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def stopped(tmp_path):
    """A run that was stopped after step 2 of 6 and has one checkpoint."""
    recipe = small(tmp_path / "run", "checkpoint.every=2")
    train(recipe, stop_after=2)
    return recipe, tmp_path / "run"


def test_no_complete_checkpoint_is_no_fresh_start(stopped):
    recipe, folder = stopped
    before = (folder / "metrics.jsonl").read_bytes()
    shard = next((folder / "checkpoints" / "step_000002").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:10])
    with pytest.raises(UserError, match="no checkpoint in it is complete; restore one, or delete"):
        train(recipe)
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_a_full_disk_while_saving(stopped, monkeypatch):
    from megatron.core import dist_checkpointing

    recipe, folder = stopped
    save = dist_checkpointing.save

    def run_out(state, path, **kwargs):
        save(state, path, **kwargs)
        full = OSError(errno.ENOSPC, "No space left on device")
        raise RuntimeError("Worker failure: PytorchStreamWriter failed\nTraceback ...") from full

    with monkeypatch.context() as patch:
        patch.setattr(dist_checkpointing, "save", run_out)
        with pytest.raises(MachineError, match="is full; make room") as caught:
            train(recipe)
    assert caught.value.exit_code == 3 and "\n" not in str(caught.value)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_000002"]
    assert (folder / "latest").read_text() == "checkpoints/step_000002\n"
    train(recipe)
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4, 5, 6]


def test_a_full_disk_while_logging(stopped, monkeypatch):
    recipe, _ = stopped

    def run_out(self, row, seconds, tokens):
        raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")

    monkeypatch.setattr("nvfp4.engine.metrics.Metrics.write", run_out)
    with pytest.raises(MachineError, match="metrics.jsonl could not be written: the disk of"):
        train(recipe)


def test_other_errors_of_a_save_stay_what_they_are(stopped, monkeypatch):
    from megatron.core import dist_checkpointing

    def broken(*_, **__):
        raise RuntimeError("a fault of ours")

    recipe, folder = stopped
    monkeypatch.setattr(dist_checkpointing, "save", broken)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        train(recipe)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_000002"]


def test_a_run_that_could_not_begin_leaves_no_folder(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        train(small(tmp_path / "run", "data.train=nowhere.txt"))
    assert not (tmp_path / "run").exists()
