from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from classwise.core.streams import ExampleNoise, PartNoise, SharedNoise

DTYPES = [torch.float32, torch.float64]
# B examples of 3 x 16 x 16: enough numbers for tests of distribution.
B, SHAPE = 64, (3, 16, 16)


def noise(seed: int = 0, index: torch.Tensor | None = None) -> ExampleNoise:
    return ExampleNoise(seed, torch.arange(B) if index is None else index)


def like(count: int = B, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(count, *SHAPE, dtype=dtype)


@pytest.mark.parametrize("draw", ["uniform", "normal"])
@given(order=st.permutations(range(12)), cuts=st.sets(st.integers(1, 11), max_size=4))
@settings(deadline=None, max_examples=40)
def test_independent_of_order_and_batching(draw, order, cuts):
    index = torch.tensor([5, 0, 9_999_999_999, 17, 1, 2, 3, 1000, 31, 49_999, 8, 7])
    whole = getattr(noise(7, index), draw)(like(12))
    edges = [0, *sorted(cuts), 12]
    for start, end in itertools.pairwise(edges):
        rows = torch.tensor(order[start:end])
        part = getattr(noise(7, index[rows]), draw)(like(len(rows)))
        assert torch.equal(part, whole[rows])


@pytest.mark.parametrize("rows", [[3], [2, 0, 1], [4, 4], [True, False, True, False, True]], ids=str)
def test_take_continues_the_streams(rows):
    rows = torch.tensor(rows)
    whole = noise(1, torch.arange(5))
    first = whole.uniform(like(5))
    taken = whole.take(rows)
    second = whole.uniform(like(5))
    picked = second[rows]
    assert torch.equal(taken.uniform(like(len(picked))), picked)
    assert not torch.equal(picked, first[rows])
    # A selection has its own counter.
    third = whole.normal(like(5))
    assert torch.equal(taken.normal(like(len(picked))), third[rows])


def test_numbers_depend_on_position_not_shape():
    flat = noise(3).uniform(torch.empty(B, 12))
    assert torch.equal(noise(3).uniform(torch.empty(B, 3, 2, 2)).flatten(1), flat)
    assert torch.equal(noise(3).uniform(torch.empty(B, 4)), flat[:, :4])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", [0, 1, 2**62])
def test_uniform(seed, dtype):
    values = noise(seed).uniform(like(dtype=dtype))
    assert values.dtype == dtype
    assert values.shape == (B, *SHAPE)
    assert values.min() >= 0
    assert values.max() < 1
    assert stats.kstest(values.flatten().double().numpy(), "uniform").pvalue > 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", [0, 1, 2**62])
def test_normal(seed, dtype):
    values = noise(seed).normal(like(dtype=dtype))
    assert values.dtype == dtype
    assert values.isfinite().all()
    assert stats.kstest(values.flatten().double().numpy(), "norm").pvalue > 1e-3


def test_both_precisions_draw_the_same_numbers():
    assert torch.equal(noise().uniform(like(dtype=torch.float64)).float(), noise().uniform(like()))
    single, double = noise().normal(like()), noise().normal(like(dtype=torch.float64))
    assert torch.allclose(single.double(), double, atol=1e-5)


def test_single_examples_and_single_positions_are_uniform_too():
    # One example over its positions; one position over the examples; the first position over the draws.
    wide = noise(4, torch.tensor([12])).uniform(torch.empty(1, 20_000))
    tall = noise(4, torch.arange(20_000)).uniform(torch.empty(20_000, 1))
    stream = noise(4, torch.tensor([12]))
    deep = torch.stack([stream.uniform(torch.empty(1, 1)) for _ in range(2000)])
    for values in (wide, tall, deep):
        assert stats.kstest(values.flatten().numpy(), "uniform").pvalue > 1e-3


def uncorrelated(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Neither the values nor their ranks are correlated, and no values coincide."""
    x, y = a.flatten().double().numpy(), b.flatten().double().numpy()
    joint, _, _ = np.histogram2d(x, y, bins=8, range=[[0, 1], [0, 1]])
    # Independent uniform values fill all cells of a grid equally.
    return stats.pearsonr(x, y).pvalue > 1e-3 and stats.chisquare(joint.flatten()).pvalue > 1e-3


def test_neighboring_examples_are_independent():
    values = noise().uniform(like())
    assert uncorrelated(values[:-1], values[1:])
    assert uncorrelated(values.flatten(1)[:, :-1], values.flatten(1)[:, 1:])


def test_draws_are_independent():
    source = noise()
    first, second, third = (source.uniform(like()) for _ in range(3))
    assert uncorrelated(first, second)
    assert uncorrelated(second, third)
    # The second draw of an example is not the first of its neighbor.
    assert uncorrelated(first[1:], second[:-1])


@pytest.mark.parametrize(("one", "other"), [(0, 1), (1, 2), (5, -5), (0, 2**63), (1, 2**64 + 2)])
def test_seeds_are_independent(one, other):
    first, second = noise(one).uniform(like()), noise(other).uniform(like())
    assert uncorrelated(first, second)
    assert uncorrelated(first[1:], second[:-1])


def test_bits_are_those_of_splitmix64():
    """A reference implementation with Python integers."""
    mask = 2**64 - 1

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    seed, index = 123_456_789_012, 77
    source = noise(seed, torch.tensor([3, index]))
    for draw in range(3):
        stream = mix((mix((index + seed * 0x9E3779B97F4A7C15) & mask) + draw) & mask)
        expected = [
            (mix((stream + position * 0xD1342543DE82EF95) & mask) >> 8 & 0xFFFFFF) / 2**24 for position in range(5)
        ]
        assert source.uniform(torch.empty(2, 5))[1].tolist() == expected


def test_shared_noise_uses_the_generator():
    x = like(2, torch.float64)
    ours = SharedNoise(torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    assert torch.equal(ours.uniform(x), torch.rand(x.shape, generator=generator, dtype=x.dtype))
    assert torch.equal(ours.take(torch.tensor([0])).normal(x), torch.randn(x.shape, generator=generator, dtype=x.dtype))


def test_shared_noise_without_a_generator_follows_the_global_seed():
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(11)
        first = SharedNoise().uniform(like(2))
        torch.manual_seed(11)
        assert torch.equal(SharedNoise().uniform(like(2)), first)
    finally:
        torch.random.set_rng_state(state)


@pytest.mark.parametrize("draw", ["uniform", "normal"])
@given(cuts=st.sets(st.integers(0, 9), max_size=3), attempts=st.integers(1, 3))
@settings(deadline=None, max_examples=30)
def test_part_noise_equals_noise_of_whole_batch(draw, cuts, attempts):
    def seeded():
        return torch.Generator().manual_seed(4)

    shared, whole = SharedNoise(seeded()), []
    for count in (9, 9 * attempts, 9):
        whole.append(getattr(shared, draw)(like(count)).unflatten(0, (-1, 9)))
    for start, end in itertools.pairwise([0, *sorted(cuts), 9]):
        rows = torch.arange(start, end)
        part = PartNoise(seeded(), rows, 9)
        assert torch.equal(getattr(part, draw)(like(len(rows))), whole[0][0, rows])
        forked = part.fork(range(attempts))
        assert torch.equal(getattr(forked, draw)(like(len(rows) * attempts)), whole[1][:, rows].flatten(0, 1))
        some = torch.tensor([0, 2, -1])[: len(rows)] % max(len(rows), 1)
        assert torch.equal(getattr(part.take(some), draw)(like(len(some))), whole[2][0, rows[some]])
