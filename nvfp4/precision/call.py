"""One forward of one linear: what its GEMMs need that is not a tensor, above all random bits.

Addresses (numbers in philox.py): elements have the number of their GEMM and of their operand; an
operand that rounds its scales has the bits of the first element of every block, since its elements
need none. What belongs to no element has numbers that no element has:

    a token mean     operand 3; sample: 4 * first position of the pass + number of the operand;
                     position: first sample of the pass
    signs per step   GEMM 3, operand: number of the GEMM; sample 0, position 0
    signs per layer  the same at step 0, call 0, position 1

Both operands of a GEMM therefore have the same signs, and so have all micro-batches of a step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4.numerics import hadamard
from nvfp4.numerics.philox import RandomBits, random_bits
from nvfp4.numerics.spec import QuantSpec
from nvfp4.precision import audit
from nvfp4.precision.context import StepContext, token_addresses
from nvfp4.precision.state import MethodState
from nvfp4.precision.tables import Policy

GEMM_NUMBERS = {"fprop": 0, "dgrad": 1, "wgrad": 2}
OPERAND_NUMBERS = {"input": 0, "weight": 1, "grad_output": 2}
NO_GEMM = 3  # signs
NO_OPERAND = 3  # token means


@dataclass(frozen=True, slots=True)
class Call:
    """One forward of one linear: everything its backward needs that is not a tensor.

    leading: (sequence or batch sizes) of the tokens before flattening, as layout says;
    tokens: M without padding; address: context and call number, None if no bits are needed;
    offsets: index in the unsharded tensor of the first feature, by role of the operand;
    state: amax histories, None if no scale is delayed; training: whether they are written.
    """

    policy: Policy
    name: str
    layer: int
    layout: str
    leading: tuple[int, ...]
    tokens: int
    address: tuple[StepContext, int] | None
    out_offset: int
    in_offset: int
    state: MethodState | None = None
    training: bool = True

    def bits(
        self, gemm: str, role: str, tensor: Tensor, spec: QuantSpec, turned: bool
    ) -> RandomBits:
        """Address of the random bits of an operand, in the orientation of its GEMM.

        tensor: (rows, features), rows being tokens, or output features for the weight; turned:
        whether the GEMM takes its transpose. One byte for every element, or for every 16 of the
        dimension that is summed over.
        """
        context, number = self._addressed()
        rows, features = tensor.shape
        if role == "weight":
            position = torch.arange(self.out_offset, self.out_offset + rows, device=tensor.device)
            sample = torch.zeros_like(position)
        else:
            sample, position = token_addresses(
                context, self.leading, self.layout, rows, tensor.device
            )
        found = RandomBits(
            seed=context.seed, step=context.step, layer=self.layer, call=number,
            gemm=GEMM_NUMBERS[gemm], operand=OPERAND_NUMBERS[role],
            sample=sample, position=position, num_features=features,
            feature_offset=self._offset(role), turned=turned, scales=spec.random == "scales",
        )  # fmt: skip
        audit.record_bits(self.name, gemm, role, found)
        return found

    def mean_bits(self, gemm: str, role: str, features: int, device: torch.device) -> Tensor:
        """Random bits of a quantised token mean: uint8 (1, features)."""
        context, number = self._addressed()
        first = context.position_offset
        first = first[0] if isinstance(first, tuple) else first
        sample, position = (
            torch.tensor([value], device=device)
            for value in (4 * first + OPERAND_NUMBERS[role], context.sample_offset)
        )
        found = random_bits(
            seed=context.seed, step=context.step, layer=self.layer, call=number,
            gemm=GEMM_NUMBERS[gemm], operand=NO_OPERAND, sample=sample, position=position,
            num_features=features, feature_offset=self._offset(role),
        )  # fmt: skip
        audit.record_bits(self.name, gemm, f"{role} mean", found)
        return found

    def signs(self, gemm: str, spec: QuantSpec, device: torch.device) -> Tensor | None:
        """Sign vector of an operand's rotation where it is drawn: (hadamard,), else None."""
        if not spec.hadamard or spec.signs not in ("layer", "step"):
            return None
        context, number = self._addressed()
        layer = spec.signs == "layer"
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        found = random_bits(
            seed=context.seed, step=0 if layer else context.step, layer=self.layer,
            call=0 if layer else number, gemm=NO_GEMM, operand=GEMM_NUMBERS[gemm],
            sample=zero, position=zero + layer, feature_offset=0, num_features=spec.hadamard,
        )[0]  # fmt: skip
        return hadamard.sign_vector(spec.hadamard, spec.signs, found)

    def _addressed(self) -> tuple[StepContext, int]:
        assert self.address is not None  # linear() has made sure
        return self.address

    def _offset(self, role: str) -> int:
        return self.out_offset if role == "grad_output" else self.in_offset
