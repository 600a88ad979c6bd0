"""Stochastic rounding proved, not sampled: all 256 random bytes for every cell of each grid."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from nvfp4.numerics import rounding
from nvfp4.numerics.formats import E2M1, E4M3, decode, encode


def sweep(values, fmt):
    """Codes for every random byte: (256, N)."""
    x = torch.from_numpy(values).expand(256, -1).contiguous()
    random_bits = torch.arange(256).to(torch.uint8)[:, None].expand(x.shape).contiguous()
    return encode(x, fmt, random_bits)


def cells(fmt):
    grid = sorted({v for v in fmt.values() if np.isfinite(v) and v >= 0})
    return list(zip(grid, grid[1:], strict=False))


def points_in(low, high, thresholds):
    """Points of one cell: each threshold k/256 and k/512, the floats next to it, and others."""
    fractions = np.unique(np.concatenate([thresholds / 256, thresholds / 512, [0.1, 1 / 3, 0.7]]))
    x = (low + fractions * (high - low)).astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(1e9))])
    return x[(x >= low) & (x < high)]


@pytest.mark.parametrize(
    ("fmt", "thresholds"),
    [(E2M1, np.arange(256)), (E4M3, np.arange(0, 256, 15))],
    ids=["e2m1", "e4m3"],
)
def test_moves_away_from_zero_for_exactly_floor_256_f_of_256_bytes(fmt, thresholds):
    for low, high in cells(fmt):
        x = points_in(low, high, thresholds)
        for sign in (1, -1):
            values = decode(sweep(sign * x, fmt), fmt).numpy()
            assert np.isin(values, [sign * low, sign * high]).all()
            ups = (values == sign * high).sum(axis=0)
            expected = [
                int(256 * (Fraction(float(v)) - Fraction(low)) / (Fraction(high) - Fraction(low)))
                for v in x
            ]
            np.testing.assert_array_equal(ups, expected)


def test_more_random_bits_never_round_down_further():
    x = np.linspace(-6.5, 6.5, 1001, dtype=np.float32)
    magnitude = decode(sweep(x, E2M1), E2M1).abs()
    assert (magnitude[1:] >= magnitude[:-1]).all()


@pytest.mark.parametrize("fmt", [E2M1, E4M3], ids=["e2m1", "e4m3"])
def test_grid_points_saturated_values_and_special_values_do_not_move(fmt):
    grid = [v for v in fmt.values() if np.isfinite(v)]
    special = [fmt.max_value * 1.01, 3e38, np.inf, -np.inf, np.nan, -0.0]
    x = np.array(grid + special, np.float32)
    codes = sweep(x, fmt)
    assert torch.equal(codes, encode(torch.from_numpy(x), fmt).expand(256, -1))


def test_below_a_256th_of_a_step_nothing_moves_and_just_below_the_next_grid_point_255_do():
    x = np.array([np.nextafter(np.float32(0.5 / 256), np.float32(0)), 0.5 / 256], np.float32)
    assert (decode(sweep(x, E2M1), E2M1) > 0).sum(0).tolist() == [0, 1]
    top = np.nextafter(np.array([0.5, 2, 4, 6], np.float32), np.float32(0))
    values = decode(sweep(top, E2M1), E2M1)
    assert (values == torch.tensor([0.5, 2.0, 4.0, 6.0])).sum(0).tolist() == [255] * 4


def test_256_f_is_floored_before_the_random_byte_is_added():
    below = torch.nextafter(torch.arange(1, 256) / 256, torch.tensor(0.0))
    steps = below.expand(256, -1).contiguous()
    random_bits = torch.arange(256).to(torch.uint8)[:, None].expand(steps.shape)
    ups = rounding.stochastic(steps, random_bits).sum(0)
    assert ups.tolist() == list(range(255))
    in_one_sum = torch.floor(steps + random_bits / 256).sum(0)  # FP32 rounds some of these sums up
    assert not torch.equal(in_one_sum.int(), ups.int())


def test_nearest_takes_ties_to_even():
    steps = torch.tensor([0.5, 1.5, 2.5, 3.5, 2.4999998, 2.5000002])
    assert rounding.nearest(steps).tolist() == [0, 2, 2, 4, 2, 3]


def test_mean_over_all_bytes_is_the_value_minus_less_than_a_256th_of_a_step():
    x = np.random.default_rng(0).uniform(0, 6, 2000).astype(np.float32)
    mean = decode(sweep(x, E2M1), E2M1).double().mean(0).numpy()
    step = np.select([x < 2, x < 4], [0.5, 1.0], 2.0)
    assert ((mean <= x) & (mean > x - step / 256)).all()
