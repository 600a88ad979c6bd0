"""Causal grouped-query attention, with or without RoPE, between linear_qkv and linear_proj."""

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn import functional as F

from nvfp4.errors import UserError
from nvfp4.models.rope import apply_rotary, rotary_angles


def zigzag_positions(length: int, ranks: int, device: torch.device) -> Tensor:
    """Global position of every local token: (ranks, length / ranks), as Megatron deals them out.

    The sequence is cut in 2 ranks chunks and rank r gets chunks r and 2 ranks - 1 - r, so that all
    ranks have the same number of causal pairs.
    """
    places = torch.arange(length, device=device)
    if ranks == 1:  # any length
        return places[None]
    chunks = places.view(2 * ranks, -1)
    return torch.cat([chunks[:ranks], chunks[ranks:].flip(0)], 1)


class CoreAttention(MegatronModule):
    """softmax(q k^T / sqrt(c) + causal mask) v, every k, v shared by heads / groups queries.

    q (length, batch, heads, c), k and v (length, batch, groups, c) -> (length, batch, heads c), in
    the dtype of q. Under context parallelism length is this rank's share in zig-zag order, and k
    and v are gathered over the ranks. Packed sequences and foreign masks are refused.

    rope_theta: q and k are turned by RoPE first, each token by its place in the whole sequence, and
    rounded to their dtype once; None: no position encoding.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        rope_theta: float | None = None,
        **_,
    ):
        super().__init__(config=config)
        assert pg_collection is not None
        self.cp_group, self.scale = pg_collection.cp, softmax_scale
        self.rope_theta = rope_theta

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type=None,
        attention_bias: Tensor | None = None,
        packed_seq_params=None,
    ) -> Tensor:
        foreign = (attention_mask, attention_bias, packed_seq_params)
        if any(argument is not None for argument in foreign):
            raise UserError(
                "attention is causal over the whole sequence; pass no mask, bias or packing"
            )
        ranks, mask = self.cp_group.size(), None
        if self.rope_theta is not None:
            places = zigzag_positions(len(query) * ranks, ranks, query.device)
            places = places[self.cp_group.rank()]
            angles = rotary_angles(places, query.shape[-1], self.rope_theta)
            query, key = apply_rotary(query, angles), apply_rotary(key, angles)
        if ranks > 1:
            key = gather_from_sequence_parallel_region(key, group=self.cp_group)
            value = gather_from_sequence_parallel_region(value, group=self.cp_group)
            positions = zigzag_positions(key.shape[0], ranks, key.device)
            mask = positions[self.cp_group.rank()][:, None] >= positions.flatten()
        dtype = query.dtype
        # CPUs without AMX run BF16 attention ten times slower than FP32 on the same values
        compute = torch.float32 if query.device.type == "cpu" else dtype
        q, k, v = (t.permute(1, 2, 0, 3).to(compute) for t in (query, key, value))
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.permute(2, 0, 1, 3).flatten(2).to(dtype)
