"""What every parameter of the hybrid model is: how it starts, and whether weight decay applies.

A value depends on the seed and on the parameter's global name only: the whole tensor is drawn on
the CPU and every rank keeps its shard. So one seed gives one model under any data, tensor, pipeline
or context parallel layout. Distributions are Megatron-Core's.
"""

import hashlib
import math

import torch
from torch import Tensor, nn

DT_RANGE = (1e-3, 1e-1)  # softplus(dt_bias) starts log-uniform in here
A_RANGE = (1.0, 16.0)  # exp(A_log) starts uniform in here

# last parts of a parameter's name -> (kind of initial value, decayed)
ROLES = {
    "word_embeddings.weight": ("normal", True),
    "output_layer.weight": ("normal", True),
    "mixer.in_proj.weight": ("normal", True),
    "mixer.out_proj.weight": ("normal_by_depth", True),
    "self_attention.linear_qkv.weight": ("normal", True),
    "self_attention.linear_proj.weight": ("normal_by_depth", True),
    "mlp.linear_fc1.weight": ("normal", True),
    "mlp.linear_fc2.weight": ("normal_by_depth", True),
    "mixer.conv1d.weight": ("conv", True),
    "mixer.conv1d.bias": ("conv", False),
    "mixer.dt_bias": ("dt_bias", False),
    "mixer.A_log": ("A_log", False),
    "mixer.D": ("one", False),
    "mixer.norm.weight": ("one", False),
    "norm.weight": ("one", False),  # the pre-norm of a Mamba block
    "input_layernorm.weight": ("one", False),
    "pre_mlp_layernorm.weight": ("one", False),
    "final_norm.weight": ("one", False),
}


def _role(name: str) -> tuple[str, bool]:
    parts = name.split(".")
    for length in (3, 2):
        if (role := ROLES.get(".".join(parts[-length:]))) is not None:
            return role
    raise ValueError(
        f"parameter {name} is not classified; give it a line in nvfp4.models.parameters.ROLES"
    )


def decays(name: str, param: Tensor) -> bool:
    """Whether weight decay applies: yes for matrices, embedding and conv taps, no for the rest.

    `name` may carry the prefixes of wrappers. ValueError for a name that is not classified, or a
    vector that is classified as decayed.
    """
    decayed = _role(name)[1]
    if decayed and param.dim() < 2:
        raise ValueError(
            f"parameter {name} is classified as decayed but has {param.dim()} dimension"
        )
    return decayed


def inverse_softplus(y: Tensor) -> Tensor:
    """x with softplus(x) = y, for y > 0: x = y + log(1 - exp(-y))."""
    return y + torch.log(-torch.expm1(-y))


def _initial(
    kind: str, shape: tuple[int, ...], std: float, depth: int, taps: int, seed: int
) -> Tensor:
    """The whole FP32 tensor of one parameter, before it is cut and rounded."""
    generator = torch.Generator().manual_seed(seed)
    value = torch.empty(shape, dtype=torch.float32, device="cpu")
    if kind == "normal":
        return value.normal_(0.0, std, generator=generator)
    if kind == "normal_by_depth":  # into the residual stream: smaller the more blocks add to it
        return value.normal_(0.0, std / math.sqrt(depth), generator=generator)
    if kind == "conv":  # torch's default for a depthwise Conv1d
        bound = 1 / math.sqrt(taps)
        return value.uniform_(-bound, bound, generator=generator)
    if kind == "dt_bias":
        low, high = map(math.log, DT_RANGE)
        return inverse_softplus(value.uniform_(low, high, generator=generator).exp())
    if kind == "A_log":
        return value.uniform_(*A_RANGE, generator=generator).log()
    return value.fill_(1.0)


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # a Generator takes 63 bits


def shard(full: Tensor, dim: int, parts: list[int], rank: int, ranks: int) -> Tensor:
    """Rank's piece of every part of `full` along `dim`; parts are sizes on one rank."""
    pieces = full.split([part * ranks for part in parts], dim)
    return torch.cat([piece.chunk(ranks, dim)[rank] for piece in pieces], dim)


@torch.no_grad()
def initialise(
    named_parameters: dict[str, nn.Parameter],
    components: dict[str, list[int]],
    *,
    seed: int,
    std: float,
    depth: int,
    taps: int,
    rank: int = 0,
    ranks: int = 1,
) -> None:
    """Fill every parameter in place.

    named_parameters by global name; components: for tensors whose shard is several pieces (in_proj,
    conv1d), the sizes of those pieces on one rank; std of the normal weights; depth = number of
    blocks; taps = conv width; rank of ranks = tensor parallel. Tensors on the meta device are left
    alone. ValueError for an unclassified parameter.
    """
    for name, param in named_parameters.items():
        kind, _ = _role(name)
        if param.is_meta:
            continue
        shape, dim = list(param.shape), 0
        cut = ranks if getattr(param, "tensor_model_parallel", False) else 1
        if cut > 1:
            dim = param.partition_dim  # type: ignore[attr-defined]
            shape[dim] *= cut
        full = _initial(kind, tuple(shape), std, depth, taps, _seed_of(seed, name))
        parts = components.get(name, [param.shape[dim]])
        param.copy_(shard(full, dim, parts, rank if cut > 1 else 0, cut))
