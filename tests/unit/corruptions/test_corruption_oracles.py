"""Each corruption against closed forms, brute force, scipy and Pillow."""

# B batch, C channels, H height, W width

from __future__ import annotations

import colorsys
import math
from io import BytesIO

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import ndimage, stats
from torch import Tensor

from classwise.core.streams import ExampleNoise
from classwise.corruptions import SEVERITIES, Corruption
from classwise.corruptions.digital import displacement
from classwise.corruptions.noise_ import poisson
from classwise.corruptions.resampling import smooth, streak
from classwise.corruptions.weather import ice, plasma
from each import for_each


def corrupt(kind: str, severity: int, x: Tensor, seed: int = 0) -> Tensor:
    return Corruption(kind=kind, severity=severity)(x, generator=ExampleNoise(seed, torch.arange(len(x))))


def picture(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def point(side: int) -> Tensor:
    """An image with one white pixel: a linear filter maps it to its reversed kernel."""
    x = torch.zeros(64, 1, side, side, dtype=torch.float64)
    x[:, :, side // 2, side // 2] = 1
    return x


# Noise


@pytest.mark.parametrize(("severity", "sigma"), list(enumerate((0.04, 0.06, 0.08, 0.09, 0.10), 1)))
def test_gaussian_noise_is_normal_of_the_stated_deviation(severity: int, sigma: float) -> None:
    x = torch.full((20, 3, 32, 32), 0.5, dtype=torch.float64)
    noise = (corrupt("gaussian-noise", severity, x) - x).flatten().numpy()
    assert noise.std() == pytest.approx(sigma, rel=0.01)
    assert stats.kstest(noise, stats.norm(scale=sigma).cdf).pvalue > 1e-3


@pytest.mark.parametrize(("severity", "photons"), list(enumerate((500, 250, 100, 75, 50), 1)))
def test_shot_noise_counts_photons(severity: int, photons: int) -> None:
    """Counts are whole, and their variance is their mean: v / photons at intensity v."""
    for value in (0.05, 0.2, 0.5):
        y = corrupt("shot-noise", severity, torch.full((30, 3, 32, 32), value, dtype=torch.float64)).flatten()
        counts = y * photons
        assert torch.allclose(counts, counts.round(), atol=1e-9)
        assert float(y.mean()) == pytest.approx(value, abs=5 * math.sqrt(value / photons / len(y)))
        assert float(y.var()) == pytest.approx(value / photons, rel=0.03)
    black = torch.zeros(1, 1, 8, 8)
    assert torch.equal(corrupt("shot-noise", severity, black), black)


@pytest.mark.parametrize("rate", [0.01, 0.3, 1.0, 2.5, 7.9, 49.99, 137.2, 500.0])
def test_poisson_counts_follow_their_distribution(rate: float) -> None:
    rates = torch.full((40, 1000), rate, dtype=torch.float64)
    counts = poisson(rates, 500, ExampleNoise(1, torch.arange(40))).flatten().long().numpy()
    # Cells with at least ten expected counts, and the two tails.
    low, high = np.flatnonzero(stats.poisson(rate).pmf(np.arange(700)) * len(counts) >= 10)[[0, -1]]
    observed = np.bincount(counts.clip(low, high) - low, minlength=high - low + 1)
    expected = stats.poisson(rate).pmf(np.arange(low, high + 1))
    expected[0], expected[-1] = stats.poisson(rate).cdf(low), stats.poisson(rate).sf(high - 1)
    assert expected.sum() == pytest.approx(1)
    assert stats.chisquare(observed, expected * len(counts)).pvalue > 1e-3


@pytest.mark.parametrize(("severity", "share"), list(enumerate((0.01, 0.02, 0.03, 0.05, 0.07), 1)))
def test_impulse_noise_rate(severity: int, share: float) -> None:
    x = torch.full((50, 3, 32, 32), 0.4)
    y = corrupt("impulse-noise", severity, x)
    salt, pepper, kept = (int((y == value).sum()) for value in (1, 0, 0.4))
    assert salt + pepper + kept == x.numel()
    for count in (salt, pepper):
        assert stats.binomtest(count, x.numel(), share / 2).pvalue > 1e-3


# Blur


@for_each("side", [32, 64])
@for_each("severity", SEVERITIES)
def test_defocus_is_a_smoothed_disc(severity: int, side: int) -> None:
    nominal, true = (0.3, 0.4, 0.5, 1.0, 1.5)[severity - 1], (0, 0, 0, 1.6**0.5, (8 / 3) ** 0.5)[severity - 1]
    radius = nominal if side == 32 else true * side / 32
    sigma = (0.4, 0.5, 0.6, 0.2, 0.1)[severity - 1] * side / 32
    down, right = np.mgrid[-8:9, -8:9]
    disc = (down**2 + right**2 <= radius**2).astype(float)
    near = np.maximum(abs(down), abs(right)) <= side // 32
    edge = np.where(near, np.exp(-(down**2 + right**2) / (2 * sigma**2)), 0)
    kernel = ndimage.convolve(disc / disc.sum(), edge / edge.sum(), mode="constant")
    assert kernel.sum() == pytest.approx(1)
    x = picture(2, 3, side, side)
    expected = ndimage.correlate(x.numpy(), kernel[None, None], mode="mirror")
    assert np.allclose(corrupt("defocus-blur", severity, x).numpy(), expected, atol=1e-12)


@given(sigma=st.floats(0.3, 3), reach=st.integers(1, 7), height=st.integers(8, 20), width=st.integers(8, 20))
@settings(max_examples=30, deadline=None)
def test_smoothing_is_a_gaussian_filter(sigma: float, reach: int, height: int, width: int) -> None:
    x = picture(2, 2, height, width)
    expected = ndimage.gaussian_filter(x.numpy(), sigma, axes=(2, 3), mode="mirror", radius=reach)
    assert np.allclose(smooth(x, sigma, reach).numpy(), expected, atol=1e-12)


@pytest.mark.parametrize(("side", "reach"), [(32, 1), (64, 2)])
def test_glass_blur_shows_a_random_neighbor(side: int, reach: int) -> None:
    """At severity 1 nothing is smoothed: every pixel is one of those up to d above or left, d - 1 below or right."""
    index = torch.arange(side * side, dtype=torch.float64).view(1, 1, side, side)
    y = corrupt("glass-blur", 1, (index / side**2).expand(40, 3, -1, -1)) * side**2
    assert torch.equal(y[:, 0], y[:, 1])
    found = y[:, 0].round().long()[:, reach : side - reach, reach : side - reach]
    rows, columns = torch.arange(reach, side - reach)[:, None], torch.arange(reach, side - reach)
    down, right = found // side - rows, found % side - columns
    for move in (down, right):
        counts = np.bincount((move + reach).flatten().numpy())
        assert len(counts) == 2 * reach
        assert stats.chisquare(counts).pvalue > 1e-3
    assert abs(np.corrcoef(down.flatten(), right.flatten())[0, 1]) < 0.02


def test_streak_matches_brute_force() -> None:
    x = picture(5, 2, 9, 14)
    angle = torch.tensor([0.0, 0.6, -0.7, -2.0, 3.0], dtype=torch.float64)
    radius, sigma = 4, 2.3
    weights = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(2 * radius + 1)]
    expected = torch.zeros_like(x)
    for b, a in enumerate(angle.tolist()):
        for row in range(9):
            for column in range(14):
                for i, weight in enumerate(weights):
                    at_row = min(max(row + round(i * math.sin(a)), 0), 8)
                    at_column = min(max(column + round(i * math.cos(a)), 0), 13)
                    expected[b, :, row, column] += weight / sum(weights) * x[b, :, at_row, at_column]
    assert torch.allclose(streak(x, angle, radius, sigma), expected, atol=1e-12)


@for_each("severity", SEVERITIES)
@for_each("side", [32, 64])
def test_motion_blur_streaks_a_point_sideways(severity: int, side: int) -> None:
    """The streak is one-sided, within 45 degrees of the horizontal, with half-normal weights in whole pixels."""
    y = corrupt("motion-blur", severity, point(side))[:, 0]
    assert torch.allclose(y.sum((1, 2)), torch.ones(64, dtype=torch.float64))
    _, rows, columns = torch.nonzero(y, as_tuple=True)
    down, left = rows - side // 2, side // 2 - columns
    assert (left >= 0).all()
    assert (down.abs() <= left + 1).all()
    assert (down > 1).any()
    assert (down < -1).any()
    place = torch.arange(side, dtype=torch.float64) - side // 2
    centers = torch.stack([(y * place[:, None]).sum((1, 2)), (y * place).sum((1, 2))]).norm(dim=0)
    sigma = (1, 1.5, 2, 2, 2.5)[severity - 1] * side / 32
    steps = np.arange(int(9 * sigma))
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    angles = np.linspace(-np.pi / 4, np.pi / 4, 2001)[:, None]
    ways = [np.round(steps * towards(angles)) @ weights / weights.sum() for towards in (np.sin, np.cos)]
    assert float(centers.mean()) == pytest.approx(np.hypot(*ways).mean(), rel=0.03)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_zoom_blur_is_the_mean_of_magnifications(severity: int) -> None:
    largest = (1.06, 1.11, 1.15, 1.20, 1.25)[severity - 1]
    x = picture(1, 1, 20, 33)[0, 0]
    layers = [x.numpy()]
    for factor in np.linspace(1, largest, round((largest - 1) * 100) + 1):
        center = (np.array(x.shape) - 1) / 2
        layers.append(ndimage.affine_transform(x.numpy(), [1 / factor] * 2, center - center / factor, order=1))
    assert np.allclose(corrupt("zoom-blur", severity, x[None, None])[0, 0].numpy(), np.mean(layers, 0), atol=1e-12)


# Weather


@for_each("severity", SEVERITIES)
@for_each("side", [28, 32, 64])
def test_snow_whitens_and_streaks(severity: int, side: int) -> None:
    x = picture(20, 3, side, side)
    assert (corrupt("snow", severity, x) >= x - 1e-12).all()
    # Over black the whitening is flat, and what is left is the flakes.
    kept = (0.95, 0.9, 0.9, 0.85, 0.8)[severity - 1]
    flakes = corrupt("snow", severity, torch.zeros(20, 3, side, side)) - 0.5 * (1 - kept)
    assert flakes.min() >= -1e-6
    assert torch.allclose(flakes, flakes.flip(2, 3), atol=1e-6)
    assert torch.equal(flakes[:, 0], flakes[:, 2])
    roughness = [float(flakes.diff(dim=dim).abs().mean()) for dim in (2, 3)]
    assert 0 < roughness[0] < 0.8 * roughness[1]


def test_snow_looks_the_same_at_every_size() -> None:
    for severity in SEVERITIES:
        covers = [float(corrupt("snow", severity, torch.zeros(50, 1, side, side)).mean()) for side in (32, 64, 96)]
        assert covers == pytest.approx([covers[0]] * 3, rel=0.02)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_fog_is_a_fractal_under_the_published_formula(severity: int) -> None:
    thickness = (0.2, 0.5, 0.75, 1.0, 1.5)[severity - 1]
    x = 0.8 * picture(6, 3, 32, 32)
    x[:, 0, 0, 0] = 0.8
    f = (corrupt("fog", severity, x) * (0.8 + thickness) / 0.8 - x) / thickness
    assert torch.allclose(f[:, :1].expand(-1, 3, -1, -1), f, atol=1e-12)
    assert torch.allclose(f.amin((1, 2, 3)), torch.zeros(6, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(f.amax((1, 2, 3)), torch.ones(6, dtype=torch.float64), atol=1e-12)


def test_thicker_fog_is_rougher() -> None:
    x = torch.zeros(50, 1, 32, 32)
    x[:, :, 0, 0] = 1
    rough = []
    for severity, thickness in zip(SEVERITIES, (0.2, 0.5, 0.75, 1.0, 1.5), strict=True):
        f = corrupt("fog", severity, x)[:, 0, 1:] * (1 + thickness) / thickness
        rough.append(float(f.diff(dim=2).abs().mean()))
    # Severities 1 and 2 have the same fractal.
    assert rough[0] == pytest.approx(rough[1], rel=1e-5)
    assert rough[1] < rough[2] < rough[3] < rough[4]


@pytest.mark.parametrize(("height", "width", "size"), [(8, 8, 8), (9, 8, 16), (5, 30, 32)])
def test_plasma_matches_brute_force(height: int, width: int, size: int) -> None:
    """The diamond-square algorithm, point by point, on a periodic grid."""
    x = torch.zeros(2, 1, height, width, dtype=torch.float64)
    found = plasma(x, 4.0, ExampleNoise(5, torch.arange(2)))
    moves = 2 * ExampleNoise(5, torch.arange(2)).uniform(x.new_empty(2, size, size)) - 1
    for b in range(2):
        heights = {(0, 0): 0.0}
        step, reach = size, 1.0
        while step > 1:
            half = step // 2
            every, between = range(0, size, step), range(half, size, step)
            square = [(half * i, half * j) for i, j in ((-1, -1), (-1, 1), (1, -1), (1, 1))]
            diamond = [(half * i, half * j) for i, j in ((-1, 0), (1, 0), (0, -1), (0, 1))]
            for places, around in (
                ([(i, j) for i in between for j in between], square),
                ([(i, j) for i in every for j in between] + [(i, j) for i in between for j in every], diamond),
            ):
                for i, j in places:
                    near = [heights[(i + down) % size, (j + right) % size] for down, right in around]
                    heights[i, j] = sum(near) / 4 + reach * float(moves[b, i, j])
            step, reach = half, reach / 4
        low, high = min(heights.values()), max(heights.values())
        expected = [[(heights[i, j] - low) / (high - low) for j in range(size)] for i in range(size)]
        assert torch.allclose(found[b], torch.tensor(expected, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_frost_adds_ice(severity: int) -> None:
    kept = (1, 1, 0.9, 0.85, 0.75)[severity - 1]
    added = (0.2, 0.3, 0.4, 0.4, 0.45)[severity - 1]
    x = 0.5 * picture(4, 3, 32, 32)
    frozen = ice(x, ExampleNoise(0, torch.arange(4)))
    assert torch.allclose(corrupt("frost", severity, x), (kept * x + added * frozen).clamp_max(1), atol=1e-12)
    assert corrupt("frost", severity, x).mean() > x.mean() + 0.05


def test_ice_has_the_statistics_of_the_photographs() -> None:
    """Their crops at the scale of CIFAR-10-C: mean 0.63, spread 0.05 to 0.14, neighbors 0.04 to 0.12 apart."""
    for side in (32, 64):
        x = ice(torch.zeros(100, 3, side, side), ExampleNoise(0, torch.arange(100)))
        assert 0 <= x.min() < x.max() <= 1
        red, green, blue = x.mean((0, 2, 3)).tolist()
        assert 0.58 < green < 0.68
        assert red < green < blue
        assert 0.05 < float(x[:, 1].std((1, 2)).mean()) < 0.14
        apart = x[:, 1, :, :: side // 32].diff(dim=2).abs().mean()
        assert 0.04 < float(apart) < 0.12


@pytest.mark.parametrize(("severity", "added"), list(enumerate((0.05, 0.1, 0.15, 0.2, 0.3), 1)))
def test_brightness_raises_the_value_of_hsv(severity: int, added: float) -> None:
    x = picture(1, 3, 20, 20)
    x[:, :, :3, :3], x[:, 1, 5], x[:, :, 6] = 0, 0, 1
    expected = torch.empty_like(x)
    for i in range(20):
        for j in range(20):
            hue, saturation, value = colorsys.rgb_to_hsv(*x[0, :, i, j].tolist())
            rgb = colorsys.hsv_to_rgb(hue, saturation, min(value + added, 1))
            expected[0, :, i, j] = torch.tensor(rgb, dtype=torch.float64)
    assert torch.allclose(corrupt("brightness", severity, x), expected, atol=1e-12)
    gray = picture(1, 1, 20, 20)
    assert torch.allclose(corrupt("brightness", severity, gray), (gray + added).clamp_max(1), atol=1e-12)


# Digital


@pytest.mark.parametrize(("severity", "factor"), list(enumerate((0.75, 0.5, 0.4, 0.3, 0.15), 1)))
def test_contrast_shrinks_the_spread_and_keeps_the_mean(severity: int, factor: float) -> None:
    x = picture(3, 3, 20, 30)
    y = corrupt("contrast", severity, x)
    assert torch.allclose(y.mean((2, 3)), x.mean((2, 3)), atol=1e-12)
    assert torch.allclose(y.std((2, 3)), factor * x.std((2, 3)), atol=1e-12)
    assert torch.allclose(y - y.mean((2, 3), True), factor * (x - x.mean((2, 3), True)), atol=1e-12)


@for_each("severity", SEVERITIES)
@for_each("shape", [(32, 32), (64, 64), (21, 40)])
def test_elastic_transform_samples_at_the_displacement(severity: int, shape: tuple[int, int]) -> None:
    x = picture(3, 1, *shape)
    field = displacement(x, severity, ExampleNoise(0, torch.arange(3)))
    grid = np.mgrid[: shape[0], : shape[1]] + field.numpy()
    expected = [ndimage.map_coordinates(x[b, 0].numpy(), grid[b], order=1, mode="mirror") for b in range(3)]
    found = corrupt("elastic-transform", severity, x)
    assert np.allclose(found[:, 0].numpy(), np.stack(expected), atol=1e-9)


@for_each("severity", SEVERITIES)
@for_each("side", [32, 64])
def test_elastic_displacement_is_bounded(severity: int, side: int) -> None:
    shift = (0.08, 0.07, 0.06, 0.05, 0.03)[severity - 1] * side
    amplitude = (0, 0.05, 0.08, 0.1, 0.1)[severity - 1] * side
    x = torch.zeros(60, 1, side, side, dtype=torch.float64)
    field = displacement(x, severity, ExampleNoise(0, torch.arange(60)))
    center, third = side // 2, side // 3
    corners = [(center + third, center + third), (center + third, center - third), (center - third, center - third)]
    at_corners = torch.stack([field[:, :, i, j] for i, j in corners])
    assert at_corners.abs().max() <= shift + amplitude
    assert at_corners.abs().max() > 0.9 * shift
    # At the corner of the image that lies opposite the three points, their shares are 1.3, -1.6 and 1.3.
    assert field.abs().max() <= 4.2 * shift + amplitude
    bend = field.diff(n=2, dim=3).abs().mean()
    if severity == 1:  # affine: straight lines stay straight
        assert bend < 1e-12
    else:
        assert bend > 1e-4


def test_elastic_bends_more_with_severity_and_keeps_the_brightness() -> None:
    smooth_picture = smooth(picture(100, 1, 32, 32), 2.0, 6)
    bends = []
    for severity in SEVERITIES:
        field = displacement(smooth_picture, severity, ExampleNoise(0, torch.arange(100)))
        bends.append(float(field.diff(n=2, dim=3).abs().mean()))
        y = corrupt("elastic-transform", severity, smooth_picture)
        assert float(y.mean()) == pytest.approx(float(smooth_picture.mean()), rel=0.01)
    assert bends == sorted(bends)


@given(height=st.integers(8, 70), width=st.integers(8, 70), severity=st.sampled_from(SEVERITIES))
@settings(max_examples=60, deadline=None)
def test_pixelate_equals_pillows_box_filter(height: int, width: int, severity: int) -> None:
    x = picture(1, 1, height, width, dtype=torch.float32)
    share = (0.95, 0.9, 0.85, 0.75, 0.65)[severity - 1]
    for size in (height, width):
        # Where a cell's border runs through the middle of a pixel, Pillow leaves it to rounding whose the pixel is.
        assume(
            not any(
                2 * cell * size % int(size * share) == 0 and 2 * cell * size // int(size * share) % 2
                for cell in range(size)
            )
        )
    small = Image.fromarray(x[0, 0].numpy()).resize((int(width * share), int(height * share)), Image.Resampling.BOX)
    expected = np.asarray(small.resize((width, height), Image.Resampling.BOX))
    assert np.allclose(corrupt("pixelate", severity, x)[0, 0].numpy(), expected, atol=1e-6)


@for_each("channels", [1, 3])
@for_each(("severity", "quality"), list(enumerate((80, 65, 58, 50, 40), 1)))
def test_jpeg_equals_pillow(severity: int, quality: int, channels: int) -> None:
    x = (picture(2, channels, 19, 30, dtype=torch.float32) * 255).round() / 255
    found = corrupt("jpeg-compression", severity, x)
    for image, result in zip(x, found, strict=True):
        file = BytesIO()
        pixels = (image * 255).round().byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels if channels == 3 else pixels[:, :, 0]).save(file, "JPEG", quality=quality)
        expected = np.asarray(Image.open(file)).reshape(pixels.shape)
        assert np.array_equal((result * 255).round().byte().permute(1, 2, 0).numpy(), expected)
