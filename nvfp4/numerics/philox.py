"""Random bits from an address: Philox4x32-10, and the layout of our counters.

Nothing is drawn: the bits of an element are a function of where the element is, so that resume,
recomputation, micro-batching and the parallel layout do not change them.

    key     = (seed, step)                                      32 bits each
    counter = (feature // 16, position, sample, tag)            32 bits each
    tag     = layer << 12 | call << 4 | gemm << 2 | operand     20, 8, 2 and 2 bits

One Philox call gives four words = 16 bytes; the byte of feature f is byte f % 16 (little-endian
within a word, words in order). sample: index in the global batch; position: index in the sequence;
feature: index in the unsharded tensor; layer: index of the linear in the model; call: which use of
that linear in one forward pass. Different addresses differ in the key, the counter or the byte: no
two share bits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4.errors import UserError

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
ROUNDS = 10
BYTES = 16  # per call


def philox4x32_10(counter: tuple[Tensor, ...], key: tuple[int | Tensor, ...]) -> tuple[Tensor, ...]:
    """Ten rounds of

        (c0, c1, c2, c3) -> (hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0 c0))

    The key advances by the constants (golden ratio, sqrt 3 - 1) between rounds.
    counter: four int64 tensors that broadcast, values in [0, 2^32). key: two such tensors or ints.
    Returns four int64 tensors, values in [0, 2^32). The 64-bit products wrap in int64; masking
    after the shift recovers the unsigned high word.
    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; Random123.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        even, odd = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (odd >> 32).bitwise_and_(_WORD) ^ (c1 ^ k0)
        c2 = (even >> 32).bitwise_and_(_WORD) ^ (c3 ^ k1)
        c1, c3 = odd.bitwise_and_(_WORD), even.bitwise_and_(_WORD)
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _check(name: str, value: int, bits: int) -> int:
    if not 0 <= value < 1 << bits:
        raise UserError(f"random address: {name} {value} does not fit in {bits} bits")
    return value


def _tag(layer: int, call: int, gemm: int, operand: int) -> int:
    return (
        _check("layer", layer, 20) << 12
        | _check("call", call, 8) << 4
        | _check("gemm", gemm, 2) << 2
        | _check("operand", operand, 2)
    )


def random_bits(
    *,
    seed: int,
    step: int,
    layer: int,
    call: int,
    gemm: int,
    operand: int,
    sample: Tensor,
    position: Tensor,
    feature_offset: int,
    num_features: int,
) -> Tensor:
    """Eight random bits for every element (token, feature), addressed as the module text says.

    sample, position: (T,) int64 in [0, 2^32), the address of each token. feature_offset: the first
    feature here, in the unsharded tensor. Returns (T, num_features) uint8.
    Raises UserError naming the part of the address that does not fit its bits.
    """
    key = (_check("seed", seed, 32), _check("step", step, 32))
    tag = _tag(layer, call, gemm, operand)
    _check("feature", feature_offset, 36)
    _check("feature", feature_offset + num_features, 36)
    for name, value in (("sample", sample), ("position", position)):
        if value.numel():
            _check(name, int(value.min()), 32)
            _check(name, int(value.max()), 32)
    first, last = feature_offset // BYTES, -(-(feature_offset + num_features) // BYTES)
    group = torch.arange(first, last, dtype=torch.int64, device=sample.device)
    tag_word = torch.full((), tag, dtype=torch.int64, device=sample.device)
    counter = (group, position.to(torch.int64)[:, None], sample.to(torch.int64)[:, None], tag_word)
    words = torch.stack(philox4x32_10(counter, key), dim=-1).to(torch.int32)
    skip = feature_offset - first * BYTES
    return words.view(torch.uint8).flatten(1)[:, skip : skip + num_features]


@dataclass(frozen=True, slots=True, eq=False)
class RandomBits:
    """The random bits of one operand, as their address: `quantize` takes this for the bits.

    A backend may compute the bits where it rounds with them; `tensor()` is what they are.
    sample, position: (T,) int64; the other fields as in random_bits. turned: the operand is the
    transpose, its rows are the features. scales: one byte for every 16 along the contraction (the
    bits of the first of them), not one for each element.
    """

    seed: int
    step: int
    layer: int
    call: int
    gemm: int
    operand: int
    sample: Tensor
    position: Tensor
    feature_offset: int
    num_features: int
    turned: bool = False
    scales: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of `tensor()`."""
        tokens, features = self.sample.shape[0], self.num_features
        rows, columns = (features, tokens) if self.turned else (tokens, features)
        return rows, -(-columns // BYTES) if self.scales else columns

    def numbers(self) -> list[int]:
        """[seed, step, tag, first feature]: the address but for sample and position."""
        seed, step = _check("seed", self.seed, 32), _check("step", self.step, 32)
        _check("feature", self.feature_offset + self.num_features, 36)
        tag = _tag(self.layer, self.call, self.gemm, self.operand)
        return [seed, step, tag, _check("feature", self.feature_offset, 36)]

    def tensor(self) -> Tensor:
        """The bits: uint8 in the orientation of the operand, contiguous."""
        every = BYTES if self.scales and self.turned else 1
        found = random_bits(
            seed=self.seed, step=self.step, layer=self.layer, call=self.call, gemm=self.gemm,
            operand=self.operand, sample=self.sample[::every], position=self.position[::every],
            feature_offset=self.feature_offset, num_features=self.num_features,
        )  # fmt: skip
        if self.scales and not self.turned:
            found = found[:, ::BYTES]
        return (found.t() if self.turned else found).contiguous()
