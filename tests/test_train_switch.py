"""Runs whose precision switches on the way: logged, audited, drawn, resumed bit-equal."""

import json

import pytest
import torch
from engine_runs import rows, small, started

from nvfp4 import backends
from nvfp4.engine.runfolder import RunFolder, read_audits
from nvfp4.engine.train import train
from nvfp4.errors import UserError
from nvfp4.inspect import audit_lines, inspect
from nvfp4.lab.runs import load_run
from nvfp4.models.linears import RowLinear
from nvfp4.precision.audit import AuditLog

TINY = ["model.pattern='*-'", "model.seq_length=32"]
SCHEDULE = (
    "precision.schedule=[{at: {step: 4}, gemms: [dgrad, wgrad], to: bf16},"
    "{at: {step: 4}, gemms: [fprop], to: one_d},"
    "{at: 0.8, gemms: [fprop], to: bf16, kind: 'mlp.*'}]"
)
CHANGES = [
    "precision.default=nvfp4", SCHEDULE, "metrics.valid_every=3", *TINY,
    "precision.policies={one_d: {base: nvfp4, fprop: {weight: {block: 1x16}}}}",
]  # fmt: skip
TEXT = "dgrad, wgrad to bf16 in 4 of 4 linears; fprop to one_d in 4 of 4 linears"


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Six steps without interruption; switches at steps 4 and 6."""
    folder = tmp_path_factory.mktemp("switch") / "straight"
    train(small(folder, *CHANGES, "metrics.tensorboard=true"))
    return folder


def last_weights(folder) -> dict[str, bytes]:
    from megatron.core import dist_checkpointing

    with started(small(folder)):
        loaded = dist_checkpointing.load_plain_tensors(str(folder / "checkpoints" / "step_000006"))
    return {
        name: t.contiguous().view(torch.uint8).numpy().tobytes()
        for name, t in loaded.items()
        if torch.is_tensor(t)
    }


def test_a_switch_is_logged_in_the_step_it_begins(straight):
    log = rows(straight)
    assert {row["step"]: row["switch"] for row in log if "switch" in row} == {
        4: TEXT, 6: "fprop to bf16 in 2 of 4 linears",
    }  # fmt: skip
    run = load_run(straight)
    assert run.switches == ((3 * 128, TEXT), (5 * 128, "fprop to bf16 in 2 of 4 linears"))
    events = b"".join(path.read_bytes() for path in (straight / "tensorboard").glob("events*"))
    assert TEXT.encode() in events
    assert len((straight / "plan_step_000004.csv").read_text().splitlines()) == 5
    assert "nvfp4+dgrad,wgrad:bf16+fprop:one_d" in (straight / "plan_step_000004.csv").read_text()


def test_what_ran_after_a_switch_is_audited_and_shown(straight):
    content = json.loads((straight / "audit.json").read_text())
    assert content["differences"] == []
    assert [one["step"] for one in content["audits"]] == [1, 4, 6]
    first, second, _ = content["audits"]
    weight = {}
    for one in (first, second):
        for row in one["gemms"]:
            if row["linear"] == "decoder.layers.1.mlp.linear_fc1":
                weight[one["step"], row["gemm"]] = row["operands"].get("weight")
                assert row["calls"] == 2 and row["accumulate"] == "fp32" and len(row["shape"]) == 3
    # dgrad had the transpose of fprop's tiles, and no longer has anything of the rows
    assert weight[1, "fprop"] == weight[1, "dgrad"] and weight[1, "fprop"]["block"] == "16x16"
    assert weight[4, "fprop"]["block"] == "1x16" and weight[4, "dgrad"] == {"format": "bf16"}
    lines = []
    inspect(straight, lines.append)
    text = "\n".join(lines)
    for words in (
        "from step 4: ",
        "executed in step 1\n",
        f"executed in step 4, after the switch {TEXT}",
        f"({backends.choose().name}, matmul fp32, sum fp32)",
        "M x N x K 64 x 128 x 64",
    ):
        assert words in text


def test_resume_across_a_switch_is_bit_equal(straight, tmp_path, capsys):
    """Stopped two steps before the switch, right before it, and after its first step."""
    recipe = small(tmp_path, *CHANGES)
    for stop in (2, 3, 4, None):
        train(recipe, stop_after=stop)
    assert (tmp_path / "metrics.jsonl").read_bytes() == (straight / "metrics.jsonl").read_bytes()
    assert last_weights(tmp_path) == last_weights(straight)
    audits = json.loads((tmp_path / "audit.json").read_text())["audits"]
    assert [one["step"] for one in audits] == [1, 3, 4, 5, 6]
    assert capsys.readouterr().out.count(f"step 4: switch of precision: {TEXT}\n") == 1


def test_a_switch_still_to_come_may_change_and_one_that_has_happened_may_not(tmp_path):
    def run(at):
        return small(
            tmp_path, "precision.default=nvfp4", *TINY, "precision.schedule=[]" if at is None
            else f"precision.schedule=[{{at: {{step: {at}}}, gemms: [fprop], to: bf16}}]",
        )  # fmt: skip

    train(run(None), stop_after=2)
    train(run(3), stop_after=3)  # the paper's branch: from a checkpoint on, with a switch
    for other in (None, 4):
        with pytest.raises(UserError, match="was trained under another recipe") as caught:
            train(run(other), stop_after=4)
        assert "from step 3 and 3 other linears: nvfp4+fprop:bf16 -> absent" in str(caught.value)


def test_a_switch_that_does_not_reach_a_linear_is_caught(tmp_path, monkeypatch):
    attach, seen = RowLinear.attach, set()

    def once(self, policy, name, *args, **offsets):
        if name not in seen:
            seen.add(name)
            attach(self, policy, name, *args, **offsets)

    monkeypatch.setattr(RowLinear, "attach", once)
    schedule = "precision.schedule=[{at: {step: 2}, gemms: [dgrad], to: bf16}]"
    with pytest.raises(UserError, match="execution differs from the precision plan") as caught:
        train(small(tmp_path, "precision.default=nvfp4", schedule, *TINY))
    line = "linear_proj dgrad: grad_output was e2m1 1x16 stochastic, the plan says bf16"
    assert line in str(caught.value)
    audits = json.loads((tmp_path / "audit.json").read_text())["audits"]
    assert [one["step"] for one in audits] == [1, 2] and audits[-1]["differences"]
    assert rows(tmp_path)[-1]["step"] == 1  # no step that was not as planned is trained


def test_an_audit_of_an_earlier_version_is_shown_and_kept(straight, tmp_path):
    content = json.loads((straight / "audit.json").read_text())
    old = {"differences": [], "gemms": [
        {key: value for key, value in row.items() if key not in ("shape", "accumulate")}
        for row in content["audits"][0]["gemms"]
    ]}  # fmt: skip
    lines = list(audit_lines(old))
    assert "executed in the first step" in lines and "  as planned" in lines
    with RunFolder(tmp_path / "run", main=True) as folder:
        folder.write("audit.json", json.dumps(old))
        folder.write_audit(5, AuditLog(), [])
        folder.write_audit(9, AuditLog(), ["something"])
        assert [one.get("step") for one in read_audits(folder.path)] == [None, 5, 9]
        folder.drop_audits(9)  # step 9 will be trained again
        assert json.loads((folder.path / "audit.json").read_text())["differences"] == []
        assert [one.get("step") for one in read_audits(folder.path)] == [None, 5]
        folder.write("audit.json", "{damaged")
        assert read_audits(folder.path) == []
