"""The folder of a run: recipe.yaml, env.json, plan.csv, metrics, checkpoints, latest; one run at a
time in it."""

import errno
import fcntl
import hashlib
import json
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from omegaconf import OmegaConf

from nvfp4.backends import Backend
from nvfp4.config import Recipe
from nvfp4.engine.parallel import World
from nvfp4.errors import MachineError, UserError
from nvfp4.machine import cpu_name, versions
from nvfp4.precision.audit import AuditLog
from nvfp4.precision.operands import GEMMS
from nvfp4.precision.plan import describe


def is_finished(recipe: Recipe) -> bool:
    """Whether this very recipe has been trained to its end in its folder; looks at files only."""
    folder = Path(recipe.run.dir)
    try:
        same = (folder / "recipe.yaml").read_text() == recipe.to_yaml()
        latest = folder / (folder / "latest").read_text().strip()
        return same and json.loads((latest / "checkpoint.json").read_text())["step"] == recipe.steps
    except (OSError, ValueError, KeyError):
        return False


def is_disk_full(error: BaseException) -> bool:
    """Whether an error, or one that it came from, says that the disk or the quota is used up."""
    while not (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
        before = error.__cause__ or error.__context__
        if before is None:
            return False
        error = before
    return True


def disk_full(what: str, folder: Path) -> MachineError:
    """The line for it; what is complete in the folder stays as it is."""
    return MachineError(
        f"{what} could not be written: the disk of {folder} is full; make room and give the same "
        "command again, it goes on from the last checkpoint"
    )


class RunFolder:
    """``with RunFolder(path, main=...) as folder:``; rank 0 holds the lock until the end.

    The lock is the kernel's and belongs to this process: killed runs leave none behind, and the
    checkpoint writers that Megatron forks do not inherit it.
    """

    def __init__(self, path: Path, *, main: bool):
        self.path, self.main = path, main
        self._lock = None

    def __enter__(self) -> "RunFolder":
        if self.main:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                self._lock = open(self.path / ".lock", "a+")
            except OSError as error:
                raise UserError(
                    f"run.dir {self.path} cannot be written ({error.strerror}); choose another"
                ) from None
            try:
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self._lock.seek(0)
                owner = self._lock.read().strip()
                raise UserError(
                    f"run.dir {self.path} is in use by another run (process {owner}); wait for it, "
                    "stop it, or choose another run.dir"
                ) from None
            self._lock.truncate(0)
            self._lock.write(f"{os.getpid()} on {platform.node()}")
            self._lock.flush()
        return self

    def __exit__(self, *_) -> None:
        if self._lock is not None:
            if [entry.name for entry in self.path.iterdir()] == [".lock"]:
                (self.path / ".lock").unlink()  # nothing was begun: leave no folder behind
                self.path.rmdir()
            self._lock.close()

    def refuse_if_used(self) -> None:
        """For checkpoint.resume=never: never write over an earlier run."""
        if self.main and (self.path / "metrics.jsonl").exists():
            raise UserError(
                f"run.dir {self.path} holds a run already and checkpoint.resume is never; "
                "set it to auto to go on, choose another run.dir, or delete the folder"
            )

    def write(self, name: str, text: str) -> None:
        """Replace a file at once, on rank 0."""
        if self.main:
            temporary = self.path / f".{name}.new"
            temporary.write_text(text)
            temporary.replace(self.path / name)

    def write_audit(
        self, step: int, log: AuditLog, differences: list[str], switch: str | None = None
    ) -> None:
        """Add to audit.json what each GEMM of a step executed, with counts, and what differed."""
        counts = Counter(
            (entry.name, entry.gemm, entry.backend, entry.kernel, entry.accumulate, entry.autocast,
             entry.out_dtype, entry.shape, json.dumps(entry.operands))
            for entry in log.records
        )  # fmt: skip
        rows = [
            {"linear": name, "gemm": gemm, "calls": calls, "backend": backend, "kernel": kernel,
             "accumulate": accumulate, **({"autocast": autocast} if autocast else {}),
             "output": output, "shape": list(shape), "operands": json.loads(operands)}
            for (name, gemm, backend, kernel, accumulate, autocast, output, shape, operands), calls
            in counts.items()
        ]  # fmt: skip
        entry = {"step": step, "switch": switch, "differences": differences, "gemms": rows}
        self._write_audits([*read_audits(self.path), entry])

    def drop_audits(self, step: int) -> None:
        """Forget the audits of a step and of those after it, which are to be trained again."""
        if self.main and (audits := read_audits(self.path)):
            self._write_audits([one for one in audits if one.get("step", 1) < step])

    def _write_audits(self, audits: list[dict]) -> None:
        differences = [line for one in audits for line in one["differences"]]
        content = {"differences": differences, "audits": audits}
        self.write("audit.json", json.dumps(content, indent=1) + "\n")

    def write_environment(
        self, environment: dict, echo: Callable[[str], None], *, resumed: bool
    ) -> None:
        """Replace env.json; on a resume, say which versions have changed since the run was last
        here."""
        try:
            before = json.loads((self.path / "env.json").read_text())["versions"] if resumed else {}
        except (OSError, ValueError, KeyError):
            before = {}
        now = environment["versions"]
        changed = [f"{k} {before[k]} -> {now.get(k)}" for k in before if before[k] != now.get(k)]
        if changed:
            echo(f"resuming under other versions, bits may differ: {', '.join(changed)}")
        self.write("env.json", json.dumps(environment, indent=1) + "\n")


def read_audits(folder: Path) -> list[dict]:
    """The audited steps of audit.json; none if it is missing or damaged. Versions before the
    schedule wrote the one step of the last process alone, without its number."""
    try:
        found = json.loads((folder / "audit.json").read_text())
        audits = found["audits"] if "audits" in found else [found]
        return [one for one in audits if "gemms" in one]
    except (OSError, ValueError, TypeError):
        return []


def identity(recipe: Recipe, prepared, step: int) -> dict[str, str]:
    """What makes a run this run after a step, flat: a checkpoint is continued under the same values
    or not at all.

    Model shape, numerics of every linear, data, seed, dtype and batch. Steps, schedule, learning
    rate, layout and backend may change: they do not alter what has been learnt. For the same reason
    a switch of precision belongs to it only once it has happened.
    """
    found = {
        "data": prepared.hash,
        "run.seed": recipe.run.seed,
        "train.dtype": recipe.train.dtype,
        "train.global_batch_size": recipe.train.global_batch_size,
    }
    found |= flat({"model": recipe.model_dump(mode="json", exclude={"model": {"name"}})["model"]})
    found |= {f"precision of {row.name}": row.policy.name for row in recipe.plan.rows}
    policies = dict(recipe.plan.policies)
    for switch in recipe.switches:
        if switch.step <= step:
            policies |= switch.plan.policies
            found |= {
                f"precision of {name} from step {switch.step}": switch.plan.policy_of(name).name
                for name in switch.changed
            }
    for name, policy in policies.items():
        found |= {f"policy {name} {gemm}": describe(policy, gemm) for gemm in GEMMS}
    return {key: str(value) for key, value in found.items()}


def flat(tree: dict, prefix: str = "") -> dict[str, object]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    found = {}
    for key, value in tree.items():
        found |= (
            flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
        )
    return found


def recipe_changes(checkpoint: Path, recipe: Recipe) -> list[str]:
    """`key: old -> new` for every key in which a recipe differs from that of a checkpoint."""
    before = OmegaConf.to_container(OmegaConf.load(checkpoint / "recipe.yaml"))
    assert isinstance(before, dict)
    before = flat(before)
    now = flat(recipe.model_dump(mode="json"))
    return [f"{key}: {before.get(key)} -> {now[key]}" for key in now if before.get(key) != now[key]]


def environment(recipe: Recipe, prepared, backend: Backend, world: World, parameters: int) -> dict:
    """What a reader needs to judge or repeat the run, as JSON values; see architecture: a recipe is
    data."""
    cuda = world.device.type == "cuda"
    return {
        "versions": versions(),
        "git": _git(),
        "device": torch.cuda.get_device_name(world.device) if cuda else cpu_name(),
        "processes": world.size,
        "threads": torch.get_num_threads(),
        "backend": {"name": backend.name, "reasons": list(backend.reasons)},
        "data_hash": prepared.hash,
        "unigram_entropy": prepared.unigram_entropy,
        "recipe_hash": hashlib.sha256(recipe.to_yaml().encode()).hexdigest(),
        "parameters": parameters,
    }


def _git() -> str | None:
    """Commit of the source tree this code runs from, with -dirty if it was changed; None outside of
    git."""
    file = Path(__file__).resolve()
    git = ["git", "-C", str(file.parent)]
    # Installed inside somebody else's work tree, git would describe that one.
    ours = [*git, "ls-files", "--error-unmatch", file.name]
    describe = [*git, "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        for command in (ours, describe):
            done = subprocess.run(command, capture_output=True, text=True, timeout=10)
            if done.returncode:
                return None
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
