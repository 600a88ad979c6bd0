"""Each remedy of nvfp4.engine.cpu: with it its caller in Megatron-Core works, without it not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine_runs import small, started

from nvfp4.engine import cpu

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the remedies are for machines without CUDA"
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return small(tmp_path_factory.mktemp("cpu"), "parallel.distributed_optimizer=true")


@pytest.fixture(scope="module")
def world(recipe):
    with started(recipe) as world:
        yield world


@pytest.fixture
def model(recipe, world):
    from nvfp4.engine.step import build_model

    return build_model(recipe, world)[0]


def without(monkeypatch, owner: object, attribute: str) -> None:
    """Put back for one test what a remedy replaced."""
    monkeypatch.setattr(owner, attribute, cpu.ORIGINALS[owner, attribute])


def without_rewrite(monkeypatch, name: str) -> None:
    monkeypatch.setattr(cpu.CudaNames, "rewrites", cpu.CudaNames.rewrites - {name})


def build_plain_optimizer(recipe, world):
    """Float16OptimizerWithFloat16Params instead of the DistributedOptimizer."""
    from nvfp4.engine.optimizer import build_optimizer
    from nvfp4.engine.step import build_model

    layout = recipe.parallel.model_copy(update={"distributed_optimizer": False})
    plain = recipe.model_copy(update={"parallel": layout})
    return build_optimizer(plain, build_model(plain, world)[0])


def test_current_device_is_asked_by_data_parallel(recipe, world, monkeypatch):
    from nvfp4.engine.step import build_model

    build_model(recipe, world)
    without(monkeypatch, torch.cuda, "current_device")
    with pytest.raises((RuntimeError, AssertionError), match=r"NVIDIA|CUDA"):
        build_model(recipe, world)


def test_device_literals_are_asked_by_optimizers_and_schedules(recipe, world, model, monkeypatch):
    from megatron.core.pipeline_parallel import schedules

    from nvfp4.engine.step import forward_backward

    build_plain_optimizer(recipe, world)
    without_rewrite(monkeypatch, "device")
    with pytest.raises((RuntimeError, AssertionError), match=r"NVIDIA|CUDA"):
        build_plain_optimizer(recipe, world)
    assert schedules.torch is torch
    with pytest.raises((RuntimeError, AssertionError), match=r"NVIDIA|CUDA"):
        forward_backward(recipe, model, iter(()), 1, 1, world)


def test_type_names_are_asked_by_optimizers(recipe, world, monkeypatch):
    build_plain_optimizer(recipe, world)
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1).type(torch.int32).dtype == torch.int32
    without_rewrite(monkeypatch, "type")
    with pytest.raises(TypeError, match="Wrapped parameters must be"):
        build_plain_optimizer(recipe, world)


def test_tensor_cuda_is_asked_by_the_distributed_optimizers_save(recipe, model, monkeypatch):
    from nvfp4.engine.optimizer import allocate_state, build_optimizer

    optimizer = build_optimizer(recipe, model)
    allocate_state(optimizer)
    shapes = model.module.sharded_state_dict()
    metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
    optimizer.sharded_state_dict(shapes, metadata=metadata)
    without_rewrite(monkeypatch, "cuda")
    with pytest.raises((RuntimeError, AssertionError), match=r"NVIDIA|CUDA"):
        optimizer.sharded_state_dict(shapes, metadata=metadata)


def test_synchronize_is_asked_by_the_checkpoint_writer(recipe, world, model, monkeypatch, tmp_path):
    from nvfp4.engine import checkpoint
    from nvfp4.engine.optimizer import allocate_state, build_optimizer, build_schedule

    optimizer = build_optimizer(recipe, model)
    allocate_state(optimizer)
    state = checkpoint.TrainState(model, optimizer, build_schedule(recipe, optimizer))
    without(monkeypatch, torch.cuda, "synchronize")
    with pytest.raises((RuntimeError, AssertionError), match=r"NVIDIA|CUDA"):
        checkpoint.save(tmp_path, state, {}, recipe, world)


def test_streams_do_nothing_and_are_classes(world, monkeypatch):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.default_stream().record_event(torch.cuda.Event())
    assert isinstance(torch.cuda.Stream, type) and isinstance(torch.cuda.Event, type)
    without(monkeypatch, torch.cuda, "current_stream")
    with pytest.raises((RuntimeError, AssertionError), match=r"NVIDIA|CUDA"):
        torch.cuda.current_stream()


def test_generator_states_are_asked_by_seeding_dropout_and_recompute(world, monkeypatch):
    from megatron.core.tensor_parallel import checkpoint, random

    random.model_parallel_cuda_manual_seed(7)
    outside = torch.get_rng_state()
    with random.get_cuda_rng_tracker().fork():
        first, second = torch.rand(3), torch.rand(3)
    assert torch.equal(outside, torch.get_rng_state())
    with random.get_cuda_rng_tracker().fork():
        assert not torch.equal(torch.rand(3), second)  # the named stream went on
    random.model_parallel_cuda_manual_seed(7)
    with random.get_cuda_rng_tracker().fork():
        assert torch.equal(torch.rand(3), first)
    with pytest.raises(ValueError, match="exists already"):
        random.get_cuda_rng_tracker().add("other", 7)

    x = torch.ones(64, requires_grad=True)
    checkpoint(torch.nn.functional.dropout, False, x).sum().backward()
    with random._fork_rng():
        pass
    without(monkeypatch, random, "_get_cuda_rng_state")
    with pytest.raises((RuntimeError, AssertionError), match=r"NVIDIA|CUDA"):
        checkpoint(torch.nn.functional.dropout, False, x)


def test_compiled_functions_of_an_earlier_import_run_eagerly(world, monkeypatch):
    import torch._dynamo.config

    def no_compiler(graph, inputs):
        raise RuntimeError("a compiler was asked for")

    monkeypatch.setattr(torch._dynamo.config, "disable", False)
    with pytest.raises(Exception, match="a compiler was asked for"):
        torch.compile(lambda x: x.sin() + 1, backend=no_compiler)(torch.ones(2))
    compiled = torch.compile(lambda x: x.cos() + 2, backend=no_compiler)
    monkeypatch.setattr(sys.modules["megatron.core.jit"], "jit_fuser", torch.compile)
    monkeypatch.setattr(cpu, "ORIGINALS", {})
    cpu._run_uncompiled()
    try:
        assert torch.equal(compiled(torch.zeros(2)), torch.full((2,), 3.0))
    finally:
        torch._dynamo.config.disable = cpu.ORIGINALS[torch._dynamo.config, "disable"]


def test_no_compiler_is_needed():
    """A new process with no program in reach: Megatron-Core's fused functions are plain ones."""
    code = (
        "import sys, torch\n"
        "from nvfp4.engine import cpu\n"
        "cpu.install()\n"
        "from megatron.core.transformer.utils import erf_gelu\n"
        "print(erf_gelu(torch.zeros(1)).item(), 'torch._dynamo' in sys.modules)\n"
    )
    environment = {**os.environ, "PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=Path(__file__).parent.parent,
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.split() == ["0.0", "False"], done.stderr


def test_the_forward_of_the_model_runs_without_the_rewrites(world):
    with cpu.out_of_the_way():
        assert torch.zeros(1).type() == "torch.FloatTensor"
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"


def test_install_and_uninstall_leave_torch_as_it_was():
    cpu.uninstall()  # of the fixture above, whose tests are done
    names = ("current_device", "synchronize", "Stream", "Event", "current_stream")
    before = [getattr(torch.cuda, name) for name in names]
    assert cpu.install() and cpu.install()  # the second changes nothing
    assert [getattr(torch.cuda, name) for name in names] != before
    cpu.uninstall()
    assert [getattr(torch.cuda, name) for name in names] == before
    assert torch.zeros(1).type() == "torch.FloatTensor"
    cpu.uninstall()


def test_nothing_is_touched_where_cuda_is(monkeypatch):
    cpu.uninstall()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cpu.install() is False
    assert not cpu.ORIGINALS
