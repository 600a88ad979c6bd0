"""Fixtures that several files need."""

import pytest


@pytest.fixture(scope="module")
def one_process():
    """A process group and Megatron's parallel state of size one, left as found."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    joined = not dist.is_initialized()
    if joined:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    if joined:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def one_thread():
    """Small tensors: one thread of torch, in this process."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
