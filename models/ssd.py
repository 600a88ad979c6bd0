"""State-space duality: the Mamba-2 scan, in FP32, in chunks.

The recurrence, per head h with its group g = h // (heads / groups), state S (head_dim, state_dim):

    dt_t = softplus(dt_raw_t + dt_bias)          a_t = dt_t A,  A = -exp(A_log) < 0
    S_t  = exp(a_t) S_{t-1} + (dt_t x_t) B_t^T
    y_t  = S_t C_t + D x_t

Inside a chunk that is a matrix product with a decaying causal mask, between chunks a short loop
over states (Dao and Gu 2024, arXiv 2405.21060, section 6). The chunk changes rounding, not the
result.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def fastest_chunk(head_dim: int, state_dim: int) -> int:
    """Chunk for CPUs, by measurement.

    Work on the mask grows with the chunk, work on the states with head_dim state_dim / chunk. 64
    serves models of usual size; small heads are a quarter faster with 32.
    """
    return 32 if head_dim * state_dim <= 2048 else 64


def _decay_mask(log_decay: Tensor) -> Tensor:
    """L[i, j] = exp(sum of a over (j, i]) for j <= i, else 0: (..., q) -> (..., q, q)."""
    length = log_decay.shape[-1]
    past_only = log_decay.new_full((length, length), -math.inf).triu(1)
    # -inf goes in before exp: a future difference is positive and may overflow, which would turn
    # the gradient into 0 x inf. Adding it is four times faster on CPUs than masked_fill with a
    # broadcast mask.
    return (log_decay[..., :, None] - log_decay[..., None, :] + past_only).exp()


def _states_before(states: Tensor, decay: Tensor) -> Tensor:
    """S before each chunk, from what every chunk adds and how much it decays what it was given.

    states (batch, chunks, ...), decay (batch, chunks, ...) broadcastable; the first state is zero.
    """
    state = torch.zeros_like(states[:, 0])
    before = []
    for chunk in range(states.shape[1]):
        before.append(state)
        state = torch.addcmul(states[:, chunk], state, decay[:, chunk])
    return torch.stack(before, 1)


def ssd(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    chunk: int | None = None,
) -> Tensor:
    """Scan a batch of sequences that start from a zero state.

    x (batch, length, heads, head_dim); dt (batch, length, heads), before softplus; a (heads,)
    negative; b, c (batch, length, groups, state_dim); d, dt_bias (heads,). chunk: tokens per chunk,
    default fastest_chunk. Any float dtypes and any length; all arithmetic is FP32, the result has
    the shape and dtype of x.
    """
    batch, length, heads, head_dim = x.shape
    groups = b.shape[2]
    chunk = min(chunk or fastest_chunk(head_dim, b.shape[3]), length)
    pad = -length % chunk  # padded steps come last, so they cannot reach a real one
    skip = x.float() * d.float()[:, None]
    dt = F.softplus(dt.float() + dt_bias.float())
    u = x.float() * dt[..., None]
    log_decay = dt * a.float()

    def chunked(t: Tensor, *inner: int) -> Tensor:
        """(batch, length, n, ...) -> (batch, chunks, *inner, chunk, ...), padded by zeros."""
        t = F.pad(t.float(), (0, 0) * (t.dim() - 2) + (0, pad))
        t = t.unflatten(2, inner).unflatten(1, (-1, chunk))
        return t.movedim(2, 2 + len(inner))

    u = chunked(u, groups, heads // groups)  # batch chunks groups heads/group q head_dim
    within = chunked(log_decay, groups, heads // groups).cumsum(-1)  # ... q
    b, c = chunked(b, groups), chunked(c, groups)  # batch chunks groups q state_dim

    scores = (c @ b.transpose(-1, -2)).unsqueeze(3)  # once per group, shared by its heads
    y = (scores * _decay_mask(within)) @ u

    to_end = (within[..., -1:] - within).exp().unsqueeze(-1)
    states = b.transpose(-1, -2).unsqueeze(3) @ (u * to_end)
    before = _states_before(states, within[..., -1].exp()[..., None, None])
    y = y + (c.unsqueeze(3) @ before) * within.exp().unsqueeze(-1)

    y = y.movedim(4, 2).reshape(batch, -1, heads, head_dim)[:, :length]
    return (y + skip).to(x.dtype)
