"""Margins of linear models against the closed form."""

# N examples, K classes, R radii

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planted import Linear, planted, thousand
from scipy.stats import bootstrap

from classwise.analysis import AnalysisResult, Run, margins
from classwise.analysis.margins import QUARTILES, _area, bisected, survival
from classwise.analysis.result import table_of
from classwise.core.errors import InputError


def linear_run(folder: Path, k: int, norm: str = "Linf", wrong: int = 3) -> tuple[Run, np.ndarray]:
    """Images that the box does not affect, some with a wrong label, and their exact radii."""
    random = torch.Generator().manual_seed(k)
    weight = torch.randn(k, 24, generator=random)
    model = Linear(weight, -0.5 * weight.sum(1))
    x = 0.5 + 0.1 * (torch.rand(24, 2, 3, 4, generator=random) - 0.5)
    with torch.no_grad():
        logits = model(x).double()
    y = logits.argmax(1)
    y[:wrong] = (y[:wrong] + 1) % k
    apart = (weight[None] - weight[y][:, None]).double()
    dual = apart.abs().sum(2) if norm == "Linf" else apart.norm(dim=2)
    gap = (logits.gather(1, y[:, None]) - logits) / dual
    exact = gap.scatter(1, y[:, None], torch.inf).amin(1).clamp_min(0).numpy()
    eps = 0.01 if norm == "Linf" else 0.05
    return planted(folder, model, x, y, [f"c{label}" for label in range(k)], eps=eps, norm=norm), exact


def by_class(found: AnalysisResult) -> pd.DataFrame:
    """The rows of the classes by label."""
    return found.frames["classes"].set_index("label").sort_index()


@pytest.mark.parametrize("norm", ["Linf", "L2"])
@pytest.mark.parametrize("attack", ["fab", "pgd:start=zero", "cw-pgd:start=zero,steps=40"])
def test_radius_of_a_linear_model_is_a_tight_upper_bound(tmp_path: Path, norm: str, attack: str) -> None:
    subject, exact = linear_run(tmp_path, 2, norm)
    found = margins(subject, attack=attack, per_class=None)
    radii = found.frame["radius"].to_numpy()
    assert (radii >= exact - 1e-6).all()
    assert radii == pytest.approx(exact, rel=0.01, abs=1e-6)
    assert found.about["search"] == ("nearest" if attack == "fab" else "bisection")
    assert (radii[:3] == 0).all()
    assert (radii[3:] > 0).all()


@pytest.mark.parametrize("norm", ["Linf", "L2"])
def test_nearest_of_many_classes_is_found(tmp_path: Path, norm: str) -> None:
    subject, exact = linear_run(tmp_path, 6, norm)
    radii = margins(subject, per_class=None).frame["radius"].to_numpy()
    assert (radii >= exact - 1e-6).all()
    assert radii == pytest.approx(exact, rel=0.01, abs=1e-6)
    bound = margins(subject, attack="pgd", per_class=None).frame["radius"]
    assert (bound >= exact - 1e-6).all()
    aimed = margins(subject, attack="cw-pgd:target=all,start=zero", per_class=None)
    assert aimed.frame["radius"].to_numpy() == pytest.approx(exact, rel=0.01, abs=1e-6)


def test_grid_reports_the_first_breaking_radius(tmp_path: Path) -> None:
    subject, exact = linear_run(tmp_path, 2)
    grid = np.array([0.002, 0.004, 0.008, 0.016])
    found = margins(subject, attack="pgd:start=zero", per_class=None, radii=tuple(grid))
    radii = found.frame["radius"].fillna(np.inf).to_numpy()
    expected = [0 if own == 0 else min(grid[grid >= own], default=np.inf) for own in exact]
    assert radii == pytest.approx(expected, abs=1e-6)
    assert found.about["search"] == "grid"
    assert found.figures()[0].plot.data[0].x[-1] == 0.016
    beyond = np.minimum(radii[found.frame["label"] == 0], 0.016)
    assert by_class(found).loc[0, "mean_radius"] == pytest.approx(beyond.mean(), abs=1e-7)
    below_eps = margins(subject, radii=(0.005,))
    assert by_class(below_eps)["survives_eps_percent"].isna().all()
    assert below_eps.figures()[0].plot.marks is None
    assert (found.about["attack"], below_eps.about["attack"]) == ("pgd:start=zero", "pgd")


def test_summaries_match_the_radii(tmp_path: Path) -> None:
    subject, _ = linear_run(tmp_path, 3)
    found = margins(subject, per_class=None)
    radii = found.frame["radius"].to_numpy()
    *curves, every = found.figures()[0].plot.data
    rows = by_class(found)
    for label, curve in enumerate(curves):
        own, part = radii[found.frame["label"] == label], rows.loc[label]
        assert part["mean_radius"] == pytest.approx(own.mean(), abs=1e-7)
        expected = np.quantile(own, [0.25, 0.5, 0.75], method="inverted_cdf")
        assert part[list(QUARTILES)].tolist() == pytest.approx(expected)
        assert part["survives_eps_percent"] == pytest.approx(100 * (own > 0.01).mean())
        assert curve.name == part["class"] == f"c{label}"
        assert curve.y == pytest.approx([100 * (own > radius).mean() for radius in curve.x])
        assert (part["unbroken_images"], part["n"]) == (0, len(own))
    assert found.frames["classes"]["mean_radius"].is_monotonic_increasing
    means = rows["mean_radius"]
    (area,) = found.frames["area"].to_dict("records")
    assert area["area"] == pytest.approx(max(means) - min(means), abs=1e-7)
    assert (area["best_class"], area["worst_class"]) == (f"c{np.argmax(means)}", f"c{np.argmin(means)}")
    assert every.y[0] == pytest.approx(100 * 21 / 24)
    assert len(found.frame) == 24
    assert found == margins(subject, per_class=None)
    assert len(found.figures()) == 2


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_area_under_the_curve_is_the_mean_radius(radii: list[float]) -> None:
    grid = np.linspace(0, 1, 2001)
    curve = np.array(survival(np.array(radii), grid)) / 100
    assert curve[:-1].mean() == pytest.approx(np.mean(radii), abs=1e-3)
    assert (np.diff(curve) <= 0).all()


def test_area_interval_matches_scipy_bootstrap() -> None:
    random = np.random.default_rng(0)
    radii = [random.gamma(shape, 0.1, size=40) for shape in (1.0, 1.5, 4.0)]
    found = _area([*radii, np.array([])], ["a", "b", "c", "d"], 0)
    assert found is not None
    assert (found["best_class"], found["worst_class"]) == ("c", "a")

    def apart(best: np.ndarray, worst: np.ndarray, axis: int) -> np.ndarray:
        return best.mean(axis) - worst.mean(axis)

    expected = bootstrap((radii[2], radii[0]), apart, method="percentile", vectorized=True, rng=random)
    low, high = expected.confidence_interval
    assert found["area_low"] == pytest.approx(low, abs=0.1 * (high - low))
    assert found["area_high"] == pytest.approx(high, abs=0.1 * (high - low))


def test_selection_correction_of_the_area() -> None:
    # Twenty equal classes: the true area is 0, but the largest of 190 differences is not.
    random = np.random.default_rng(0)
    areas = [
        _area([random.gamma(4.0, 0.1, size=20) for _ in range(20)], [str(label) for label in range(20)], 0)
        for _ in range(5)
    ]
    values, corrected = (np.mean([area[name] for area in areas]) for name in ("area", "corrected_area"))
    assert 0 <= corrected < 0.75 * values
    assert _area([np.array([0.1]), np.array([])], ["a", "b"], 0) is None


@given(st.lists(st.floats(1e-3, 1.5), min_size=1, max_size=6), st.floats(0.01, 0.5))
def test_bisection_of_any_radius(radii: list[float], start: float) -> None:
    """An attack that succeeds at every radius from the true one on, with an image exactly at that distance."""
    true = np.array(radii)

    def distance(radius: torch.Tensor) -> np.ndarray:
        return np.where(radius.numpy() >= true, radius.numpy(), np.inf)

    found = bisected(lambda radius: radius, distance, len(true), start, 1.0)
    reachable = true <= 1
    assert np.isinf(found[~reachable]).all()
    assert (found[reachable] >= true[reachable]).all()
    assert (found[reachable] <= true[reachable] * 1.0051).all()


def test_bisection_of_an_attack_that_fails_at_large_radii() -> None:
    """An attack that succeeds between 0.1 and 0.15 and from 0.7 on, where it finds an image at 0.12."""

    def distance(radius: torch.Tensor) -> np.ndarray:
        given = radius.numpy()
        return np.where(given >= 0.7, 0.12, np.where((given >= 0.1) & (given <= 0.15), given, np.inf))

    assert bisected(lambda radius: radius, distance, 1, 0.2, 1.0) == pytest.approx([0.1], abs=1e-3)


def test_unbroken_images_and_absent_classes(tmp_path: Path) -> None:
    x = torch.rand(20, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    always = Linear(torch.zeros(3, 4), torch.tensor([1.0, 0.0, 0.0]))
    subject = planted(tmp_path, always, x, torch.arange(20) % 2, ["a", "b", "c"])
    for attack in ("fab", "pgd:steps=2"):
        found = margins(subject, attack=attack)
        rows = by_class(found)
        curves, medians = (figure.plot.data for figure in found.figures())
        assert [curve.name for curve in curves] == ["a", "b", "all"]
        assert rows["unbroken_images"].tolist() == [10, 0, 0]
        for quartile in QUARTILES:
            assert rows[quartile].tolist() == pytest.approx([np.nan, 0, np.nan], nan_ok=True)
        assert list(medians[0].y) == [None, 0, None]
        assert (curves[0].y[-1], curves[1].y[0]) == (100, 0)
        assert rows["mean_radius"].tolist() == pytest.approx([curves[0].x[-1], 0, np.nan], nan_ok=True)
        assert rows.loc[2, "n"] == 0
        assert found.frame["radius"].isna().sum() == 10
        assert table_of("classes", found.frames["classes"]).rows[-1][:3] == ["c", "2", "–"]


def test_thousand_classes(tmp_path: Path) -> None:
    found = margins(thousand(tmp_path), attack="fgsm", radii=(0.1, 0.2))
    assert len(found.frame) == 1000
    curves, medians = found.figures()
    assert len(curves.plot.data) == 9
    assert len(medians.plot.names) == 20


def test_bad_input(trained: Path, make_run) -> None:
    with pytest.raises(InputError, match="1 class; at least 2"):
        margins(make_run("one", [[5]]))
    with pytest.raises(InputError, match="searches for the nearest image itself"):
        margins(trained, attack="fab", radii=(0.1,))
    with pytest.raises(InputError, match="at most 1"):
        margins(trained, radii=(0.1, 2.0))
    with pytest.raises(InputError, match="radii"):
        margins(trained, radii=())
