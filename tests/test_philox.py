"""Philox4x32-10 against its published answers, and: no two addresses share random bits."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4.errors import UserError
from nvfp4.numerics import philox

HERE = dict(seed=7, step=3, layer=5, call=0, gemm=1, operand=0)


def bits(sample, position, offset=0, features=16, **address):
    return philox.random_bits(
        **{**HERE, **address},
        sample=torch.tensor(sample, dtype=torch.int64),
        position=torch.tensor(position, dtype=torch.int64),
        feature_offset=offset,
        num_features=features,
    )


def scalar_philox(counter, key):
    """Ten rounds in Python integers, written from the paper."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [p1 >> 32 ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, p0 >> 32 ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # Random123, kat_vectors
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_known_answers(counter, key, expected):
    words = philox.philox4x32_10(tuple(torch.tensor([c]) for c in counter), tuple(key))
    assert [int(w) for w in words] == expected
    assert scalar_philox(counter, key) == expected


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    step=st.integers(0, 2**32 - 1),
    layer=st.integers(0, 2**20 - 1),
    call=st.integers(0, 255),
    gemm=st.integers(0, 3),
    operand=st.integers(0, 3),
    sample=st.integers(0, 2**32 - 1),
    position=st.integers(0, 2**32 - 1),
    feature=st.integers(0, 2**36 - 2),
)
def test_an_element_gets_the_byte_that_its_address_says(
    seed, step, layer, call, gemm, operand, sample, position, feature
):
    tag = layer << 12 | call << 4 | gemm << 2 | operand
    words = scalar_philox([feature // 16, position, sample, tag], [seed, step])
    expected = words[feature % 16 // 4] >> 8 * (feature % 4) & 255
    address = dict(seed=seed, step=step, layer=layer, call=call, gemm=gemm, operand=operand)
    assert bits([sample], [position], feature, 1, **address).item() == expected


PARTS = ["", "seed", "step", "layer", "call", "gemm", "operand", "sample", "position", "feature"]
FIELDS = {"seed": 32, "step": 32, "layer": 20, "call": 8, "gemm": 2, "operand": 2}
ADDRESS = st.fixed_dictionaries(
    {name: st.integers(0, 2**width - 1) for name, width in FIELDS.items()}
    | {"sample": st.integers(0, 2**32 - 1), "position": st.integers(0, 2**32 - 1)}
    | {"feature": st.integers(0, 2**36 - 2)}
)


def counter_and_key(monkeypatch, address):
    """What random_bits hands to Philox for one element, and the byte it takes of the answer."""
    seen = []

    def record(counter, key):
        seen.append((*(int(c.reshape(-1)[0]) for c in counter), *key))
        first = counter[0]
        return tuple(torch.zeros_like(first) for _ in range(4))

    monkeypatch.setattr(philox, "philox4x32_10", record)
    address = dict(address)
    sample, position, feature = (address.pop(n) for n in ("sample", "position", "feature"))
    bits([sample], [position], feature, 1, **address)
    monkeypatch.undo()
    return seen[0], feature % 16


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    first=ADDRESS,
    name=st.sampled_from(["", *FIELDS, "sample", "position", "feature"]),
    other=ADDRESS,
)
def test_no_two_addresses_share_a_counter(first, name, other):
    # Differing in one part (the hardest to tell apart) or in all.
    second = {**first, name: other[name]} if name else other
    with pytest.MonkeyPatch.context() as patch:
        same = counter_and_key(patch, first) == counter_and_key(patch, second)
    assert same == (first == second)


def test_every_part_of_a_small_address_space_is_distinct(monkeypatch):
    seen = set()
    monkeypatch.setattr(philox, "philox4x32_10", lambda c, k: _collect(seen, c, k))
    count = 0
    for seed, step, layer, call, gemm, operand in np.ndindex(2, 2, 3, 2, 4, 4):
        address = dict(seed=seed, step=step, layer=layer, call=call, gemm=gemm, operand=operand)
        bits([0, 0, 1, 1], [0, 1, 0, 1], 0, 48, **address)
        count += 4 * 3
    assert len(seen) == count


def _collect(seen, counter, key):
    words = torch.stack(torch.broadcast_tensors(*counter), -1).reshape(-1, 4).tolist()
    seen.update((*word, *key) for word in words)
    return tuple(torch.zeros_like(counter[0]) for _ in range(4))


def test_bits_do_not_depend_on_how_the_tensor_is_cut():
    sample = torch.arange(4).repeat_interleave(6)
    position = torch.arange(6).repeat(4)
    whole = bits(sample.tolist(), position.tolist(), 0, 80)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    assert torch.equal(bits(sample[order].tolist(), position[order].tolist(), 0, 80), whole[order])
    for offset, features in ((0, 16), (16, 64), (5, 30), (63, 17), (40, 0)):
        part = bits(sample.tolist(), position.tolist(), offset, features)
        assert torch.equal(part, whole[:, offset : offset + features])


@pytest.mark.parametrize("name", FIELDS)
def test_streams_of_different_addresses_are_uncorrelated(name):
    n = 256 * 64
    tokens = list(range(256)), [0] * 256
    a = bits(*tokens, 0, 64).double().flatten()
    b = bits(*tokens, 0, 64, **{name: HERE[name] + 1}).double().flatten()
    # The correlation of independent uniform bytes is normal with deviation 1/sqrt(n); beyond
    # 5 deviations: 6e-7. The share of equal bytes is binomial with p = 1/256; the same bound.
    assert abs(torch.corrcoef(torch.stack((a, b)))[0, 1]) < 5 / n**0.5
    assert abs((a == b).double().mean() - 1 / 256) < 5 * (255 / 256**2 / n) ** 0.5


def test_bytes_are_uniform():
    stream = bits(list(range(1024)), [1] * 1024, 0, 256)
    counts = torch.bincount(stream.flatten().int(), minlength=256).double()
    expected = stream.numel() / 256
    chi_square = ((counts - expected) ** 2 / expected).sum()
    # 255 degrees of freedom: mean 255, deviation 22.6; 6 deviations leave less than 1e-7.
    assert abs(chi_square - 255) < 6 * 22.6


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"seed": 2**32}, "seed 4294967296 does not fit in 32 bits"),
        ({"step": -1}, "step -1 does not fit in 32 bits"),
        ({"layer": 2**20}, "layer 1048576 does not fit in 20 bits"),
        ({"call": 256}, "call 256 does not fit in 8 bits"),
        ({"gemm": 4}, "gemm 4 does not fit in 2 bits"),
        ({"operand": 4}, "operand 4 does not fit in 2 bits"),
    ],
)
def test_an_address_that_does_not_fit_is_an_error(wrong, text):
    with pytest.raises(UserError, match=text):
        bits([0], [0], **wrong)


def test_a_token_address_that_does_not_fit_is_an_error():
    with pytest.raises(UserError, match="position -1 does not fit"):
        bits([0], [-1])
    with pytest.raises(UserError, match="sample 4294967296 does not fit"):
        bits([2**32], [0])
    with pytest.raises(UserError, match="feature .* does not fit in 36 bits"):
        bits([0], [0], 2**36, 1)
    assert bits([], [], 0, 16).shape == (0, 16)
