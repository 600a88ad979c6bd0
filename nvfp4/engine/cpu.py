"""What Megatron-Core needs on a machine without CUDA, and nothing else.

Megatron-Core 0.16 to 0.19 trains on a CPU over gloo, but it names CUDA in its sources: devices,
tensor type names, streams, generator states. :func:`install` answers those names with their CPU
meaning. It acts only where ``torch.cuda.is_available()`` is false, only when the engine starts a
run, and :func:`uninstall` takes everything back at the run's end. Each remedy says who asks for it;
tests/test_engine_cpu.py takes each one away and watches the named caller fail.
"""

import contextlib
import importlib
import sys

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")

# What a remedy replaced, by (object, attribute).
ORIGINALS: dict[tuple[object, str], object] = {}

_mode: "CudaNames | None" = None


def install() -> bool:
    """Apply every remedy. Returns True where they are in force, False on a machine with CUDA."""
    global _mode
    if torch.cuda.is_available():
        return False
    if _mode is None:
        _run_uncompiled()
        _answer_device_questions()
        _answer_streams()
        _answer_generator_states()
        _mode = CudaNames()
        _mode.__enter__()  # until uninstall: Megatron says "cuda" at any time
    return True


def uninstall() -> None:
    """Take every remedy back; torch is as it was."""
    global _mode
    if _mode is not None:
        _mode.__exit__(None, None, None)
        _mode = None
    while ORIGINALS:
        (owner, attribute), value = ORIGINALS.popitem()
        setattr(owner, attribute, value)


@contextlib.contextmanager
def out_of_the_way():
    """Suspend :class:`CudaNames`: the model's forward names no CUDA and calls torch thousands of
    times."""
    if _mode is None:
        yield
        return
    with torch._C.DisableTorchFunction():
        yield


class CudaNames(TorchFunctionMode):
    """Rewrites, call by call, what Megatron-Core says about CUDA tensors.

    ``device="cuda"``   -> cpu. Asked by the schedules (token counts), clip_grads (norm buffers),
                           every optimizer (loss scale, overflow flags).
    ``Tensor.type()``   -> "torch.cuda.FloatTensor" for a CPU float tensor. Float16Optimizer and
                           DistributedOptimizer sort parameters by this string, clip_grads
                           asserts it.
    ``Tensor.cuda()``   -> the tensor itself. Asked by the distributed optimizer's
                           fully_reshardable save.
    """

    rewrites = frozenset({"device", "type", "cuda"})

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "device" in self.rewrites and "device" in kwargs and _names_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": CPU}
        if func is torch.Tensor.cuda and "cuda" in self.rewrites:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs and "type" in self.rewrites:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


def _names_cuda(device) -> bool:
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


def _replace(owner: object, attribute: str, value: object) -> None:
    ORIGINALS[owner, attribute] = getattr(owner, attribute)
    setattr(owner, attribute, value)


def _run_uncompiled() -> None:
    """Import Megatron-Core with torch.compile standing aside.

    megatron.core.jit decorates its fused functions with torch.compile at import. On a CPU that
    costs 2 s of imports, and the first call of such a function wants a C++ compiler, which the
    machine may not have. Where someone imported Megatron-Core before, its compiled functions are
    told to run eagerly instead.
    """
    compile_, torch.compile = torch.compile, _identity
    try:
        for name in ("jit", "models.mamba", "optimizer", "distributed", "dist_checkpointing"):
            importlib.import_module(f"megatron.core.{name}")
    finally:
        torch.compile = compile_
    if sys.modules["megatron.core.jit"].jit_fuser is not _identity:
        _replace(importlib.import_module("torch._dynamo.config"), "disable", True)


def _identity(function=None, **_):
    return function if function is not None else _identity


def _answer_device_questions() -> None:
    # The current device: parameter and gradient buffers of DistributedDataParallel, tensor-parallel
    # mappings, pipeline send and receive buffers, the distributed optimizer's load.
    _replace(torch.cuda, "current_device", lambda: CPU)
    # Nothing runs behind the CPU's back: batched p2p of the pipeline and the checkpoint writer wait
    # for the device.
    _replace(torch.cuda, "synchronize", lambda device=None: None)


class InertStream:
    """A stream or event without work; a class, because libraries name torch.cuda.Stream in
    annotations."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        return lambda *_, **__: None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


def _answer_streams() -> None:
    # DistributedDataParallel from Megatron-Core 0.17 on, and in 0.16 with several distributed
    # optimizer instances.
    for name in ("Stream", "Event"):
        _replace(torch.cuda, name, InertStream)
    for name in ("stream", "current_stream", "default_stream"):
        _replace(torch.cuda, name, lambda *_, **__: InertStream())


def _answer_generator_states() -> None:
    # model_parallel_cuda_manual_seed (always), dropout, sequence-parallel embedding dropout,
    # recompute: they save and restore "the CUDA generator", which is the CPU generator here.
    from megatron.core.tensor_parallel import random

    class CpuStatesTracker(random.CudaRNGStatesTracker):
        """Named generator states, kept as Megatron's tracker keeps them, for the CPU generator."""

        def add(self, name, seed):
            if seed in self.seeds_ or name in self.states_:
                raise ValueError(f"generator state {name!r} or seed {seed} exists already")
            self._is_initialized = True
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name="model-parallel-rng"):
            outside = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outside)

    _replace(random, "_CUDA_RNG_STATE_TRACKER", CpuStatesTracker())
    _replace(random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True)
    _replace(random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state())
    _replace(random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state))
