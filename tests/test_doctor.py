"""`nvfp4 doctor`: what it says of a backend is what the backend did."""

from dataclasses import replace

import pytest
import torch

from nvfp4 import backends, doctor, features
from nvfp4.backends import reference
from nvfp4.numerics import gemm
from nvfp4.numerics import quantize as definition


def lines_of(function):
    lines = []
    return function(lines.append), lines


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_backend_has_a_line():
    code, lines = lines_of(doctor.doctor)
    assert code == 0 and lines[-1].endswith("ok: nvfp4 train tiny_nvfp4")
    text = "\n".join(lines)
    for name in (*backends.NAMES, "te"):
        assert f"\n  {name} " in text
    assert f"run.backend=auto takes {backends.choose().reasons[-1]}" in text
    ran = ["ok", "ok", "ok", "emulated", "emulated", "emulated"]
    assert next(line.split()[1:] for line in lines if line.startswith("  reference ")) == ran
    assert "  te         no: needs the package transformer-engine and a Blackwell GPU" in text


def wrong_quantize(change):
    def quantize(x, spec, **given):
        q = definition.quantize(x, spec, **given)
        return replace(q, codes=q.codes ^ 1) if change(spec) else q

    return quantize


@pytest.mark.parametrize(
    "broken, words",
    [
        ({"quantize": wrong_quantize(lambda s: s.hadamard and s.rounding == "nearest")},
         ["ok", "WRONG", "ok", "emulated", "emulated", "WRONG"]),
        ({"quantize": wrong_quantize(lambda s: s.rounding == "stochastic")},
         ["ok", "ok", "WRONG", "emulated", "WRONG", "WRONG"]),
        ({"gemm": lambda a, b, **o: gemm.gemm(a, b, **o) * (a.shape[0] != 48)},
         ["ok", "ok", "ok", "emulated", "emulated", "WRONG"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(monkeypatch, broken, words):
    for name, function in broken.items():
        monkeypatch.setattr(reference, name, function)
    monkeypatch.setattr(backends, "NAMES", ("reference",))
    found = []
    assert not features.features(found.append)
    assert list(found[0].cells) == words
    code, lines = lines_of(doctor.doctor)
    assert code == 3 and lines[-1].endswith("the numerics are wrong here")


def test_a_missing_backend_says_why(monkeypatch):
    monkeypatch.setattr(backends, "unsupported_reason", lambda name: "no compiler")
    one = features.feature("cpu")
    assert one.reason == "no compiler" and set(one.cells) == {"-"} and not one.wrong


def test_nothing_stays_changed():
    before = backends.active()
    features.feature("reference")
    assert backends.active() is before and torch.is_grad_enabled()
