"""The page, report.json and verdicts.parquet of one run agree."""

# K classes

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy.stats import binomtest

import classwise as cw


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("agree") / "run"
    cw.train("digits/standard", out=place, epochs=2, device="cpu")
    attacks = ["fgsm", "pgd:steps=3"]
    cw.evaluate(str(place), "digits", attacks=attacks, eps="0.05", per_class=30, device="cpu", out=place)
    return place


def cells(html: str, section: str) -> list[list[str]]:
    """The rows of the table in a section, without decorative elements."""
    part = html.split(f'<section id="{section}">')[1].split("</table>")[0]
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", part, re.S)
    return [
        [re.sub(r"<[^>]+>", "", cell).strip() for cell in re.findall(r"<t[hd].*?</t[hd]>", row, re.S)] for row in rows
    ]


def test_page_report_and_verdicts_agree(run: Path) -> None:
    report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    verdicts = pq.read_table(run / "verdicts.parquet").to_pydict()
    html = (run / "report.html").read_text(encoding="utf-8")
    label = np.array(verdicts["label"])
    kept = {"natural": np.array(verdicts["natural"]) == label}
    kept |= {key: np.array(verdicts[f"pred:{key}"]) == label for key in ("fgsm", "pgd")}
    kept["worst-case"] = np.array(verdicts["robust"])
    assert (kept["worst-case"] == (kept["natural"] & kept["fgsm"] & kept["pgd"])).all()
    head, *rows = cells(html, "classes")
    keys = head[2:]
    assert set(keys) == set(kept) == set(report["results"])
    for k, row in enumerate(rows):
        assert row[:2] == [report["dataset"]["classes"][k], str((label == k).sum())]
        for key, cell in zip(keys, row[2:], strict=True):
            found = report["results"][key]["by_class"][k]
            right, n = int((kept[key] & (label == k)).sum()), int((label == k).sum())
            interval = binomtest(right, n).proportion_ci(0.95, "wilson")
            expected = [100 * right / n, 100 * interval.low, 100 * interval.high]
            assert [found["value"], found["low"], found["high"]] == pytest.approx(expected, abs=1e-3)
            assert cell == f"{found['value']:.1f} {found['low']:.1f}–{found['high']:.1f}"
    for key, (name, overall, *_) in zip(report["results"], cells(html, "results")[1:], strict=True):
        assert name == key
        assert report["results"][key]["overall"]["value"] == pytest.approx(100 * kept[key].mean(), abs=1e-3)
        assert overall.startswith(f"{100 * kept[key].mean():.1f} ")
    worst = report["results"]["worst-case"]["worst"]
    shares = [kept["worst-case"][label == k].mean() for k in range(10)]
    assert worst["label"] == int(np.argmin(shares))
    assert f"{100 * min(shares):.1f}<i>%</i>" in html
