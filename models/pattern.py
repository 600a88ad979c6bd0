"""The block pattern of a hybrid model: one character per block, from the input to the output.

``M`` Mamba-2 mixer, ``*`` self-attention, ``-`` MLP; the alphabet of Megatron-Core and of
Nemotron-H.
"""

from nvfp4.errors import UserError

BLOCKS = {"M": "mamba", "*": "attention", "-": "mlp"}

# Characters that mean something in Megatron-Core, named so that the answer can say what was asked
# for.
NOT_BUILT = {
    "E": "a mixture-of-experts block",
    "G": "a gated delta net block",
    "D": "a sparse-attention block",
    "+": "a latent-attention block",
    "|": "a pipeline stage boundary (parallel.pipeline_model_parallel_size cuts evenly)",
    "/": "a multi-token-prediction separator",
}


def parse_pattern(pattern: str) -> tuple[str, ...]:
    """Name the block of every character: ``"M-*"`` -> ``("mamba", "mlp", "attention")``.

    Raises UserError for an empty pattern and for any character other than M, * and -, with the
    character, its 0-based place and what is allowed.
    """
    allowed = "allowed are M (Mamba-2), * (attention) and - (MLP)"
    if not pattern:
        raise UserError(f"model.pattern is empty; {allowed}, for example M-M*-")
    for place, char in enumerate(pattern):
        if char not in BLOCKS:
            known = NOT_BUILT.get(char)
            meaning = f", {known}, which this model does not build" if known else ""
            raise UserError(f"model.pattern[{place}] is {char!r}{meaning}; {allowed}")
    return tuple(BLOCKS[char] for char in pattern)
