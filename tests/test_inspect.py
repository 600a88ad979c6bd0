"""`nvfp4 inspect` and `nvfp4 doctor` say what is there, and one line when nothing is."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from nvfp4.doctor import doctor
from nvfp4.errors import UserError
from nvfp4.inspect import inspect, sqnr_db, underflow_pct


def test_sqnr_of_a_known_error():
    x = torch.full((16, 16), 2.0)
    assert sqnr_db(x, x * 0.9) == pytest.approx(20.0)  # noise amplitude 10 % of the signal: 20 dB


def test_underflow_counts_only_what_was_not_zero():
    x = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0])
    assert underflow_pct(x, torch.tensor([0.0, 0.0, 2.0, 3.0, 4.0])) == 25.0


def test_safetensors_report(tmp_path):
    # 1 and 6 are grid points of NVFP4 where amax is 6 and the block scale 448: one value is lost.
    x = torch.ones(16, 16)
    x[0, 0] = 6.0
    x[1, 1] = 1e-3
    save_file(
        {"w": x, "n": torch.full((3,), float("nan")), "ids": torch.arange(4)},
        tmp_path / "a.safetensors",
    )
    lines = []
    assert inspect(tmp_path / "a.safetensors", lines.append) == 0
    table = {line.split()[0]: line for line in lines[1:]}
    assert "not finite" in table["n"] and "int64" in table["ids"]
    assert table["w"].split()[-1] == f"{100 / 256:.2f}"


def test_npz_report(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((16, 32), np.float32))
    lines = []
    assert inspect(tmp_path / "a.npz", lines.append) == 0
    assert "(16, 32)" in lines[1]


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors"])
def test_broken_tensor_files_are_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"not a tensor file at all")
    with pytest.raises(UserError, match=f"{name}: not a readable"):
        inspect(tmp_path / name)


def test_damaged_npz_is_one_line(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(4096, dtype=np.float32))
    whole = (tmp_path / "a.npz").read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 1
    for content in (whole[: len(whole) // 2], bytes(damaged)):
        (tmp_path / "a.npz").write_bytes(content)
        with pytest.raises(UserError, match="a.npz: not a readable .npz file") as caught:
            inspect(tmp_path / "a.npz")
        assert "\n" not in str(caught.value)
    np.savez(tmp_path / "a.npz", x=np.array(["text"]))
    with pytest.raises(UserError, match="x holds <U4, not numbers"):
        inspect(tmp_path / "a.npz")


def test_unknown_paths_are_named(tmp_path):
    with pytest.raises(UserError, match="nowhere: does not exist; inspect takes a run folder"):
        inspect(tmp_path / "nowhere")
    for path in (tmp_path, ".", "/"):
        with pytest.raises(UserError, match="cannot tell what this is"):
            inspect(path)


def test_doctor_finds_a_working_machine():
    lines = []
    assert doctor(lines.append) == 0
    report = "\n".join(lines)
    assert "compared with the definition bit by bit" in report and "megatron-core" in report
    assert lines[-1].strip().startswith("result    ok")


def test_doctor_says_what_is_missing(monkeypatch):
    monkeypatch.setattr("nvfp4.doctor.REQUIRED", ("torch", "a-package-nobody-has"))
    lines = []
    assert doctor(lines.append) == 3
    assert any("a-package-nobody-has" in line and "MISSING" in line for line in lines)


def test_doctor_names_transformer_engine_on_a_cpu(monkeypatch):
    versions = {"transformer-engine": "2.20.2"}
    real = __import__("nvfp4.doctor", fromlist=["x"]).version_of
    monkeypatch.setattr("nvfp4.doctor.version_of", lambda p: versions.get(p) or real(p))
    lines = []
    assert doctor(lines.append) == 3
    assert "pip uninstall transformer-engine" in lines[-1]
