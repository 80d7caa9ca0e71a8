"""Galleries: selection and order of images, their pixels, and escaping of texts."""

# N examples, C channels, H height, W width

from __future__ import annotations

import base64
import io
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from planted import Linear, planted, thousand

from classwise.analysis import Run, examples
from classwise.analysis.model_outputs import attacked_outputs, natural_outputs
from classwise.core.errors import InputError
from classwise.reporting.figures import Card, Picture, gallery, png
from classwise.reporting.pages import answers_page

NAUGHTY = ["<b>cat</b>", '"><script>alert(1)</script>', "a & b"]


def pixels(text: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text))))


class Images(HTMLParser):
    """Collects what a page shows."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.images: list[dict[str, str | None]] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "img":
            self.images.append(dict(attrs))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def colours(tmp_path: Path) -> Run:
    """Three classes of color images, distinguished by the mean of one channel."""
    weight = torch.zeros(3, 3, 4, 4)
    for label in range(3):
        weight[label, label] = 1
    x = torch.rand(60, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    y = x.mean((2, 3)).argmax(1)
    return planted(
        tmp_path, Linear(weight.flatten(1), torch.zeros(3)), x, y, NAUGHTY, attacks=["pgd:steps=3"], eps=0.05
    )


def test_least_and_most_robust_images_of_the_weakest_class(trained: Path) -> None:
    found = examples(trained, attack="pgd:steps=3", number=5)
    subject = Run.open(trained)
    worst = subject.report.worst.label
    natural, attacked = natural_outputs(subject), attacked_outputs(subject, attack="pgd:steps=3")
    own = (natural.label == worst) & (natural.predicted == worst)
    logits = attacked.logits[own]
    margins = logits[:, worst] - np.delete(logits, worst, axis=1).max(1)
    order = np.argsort(margins, kind="stable")
    expected = [*order[:3], *order[-2:]]
    assert found.about["images_attacked"] == own.sum() > 5
    assert found.about["amplify"] == 5  # a change by the whole radius, 0.1, is black or white
    frame = found.frame
    assert frame["index"].tolist() == natural.index[own][expected].tolist()
    assert frame["margin"].tolist() == pytest.approx(margins[expected], abs=1e-4)
    least, most = found.figures()
    assert (len(least.plot.cards), len(most.plot.cards)) == (3, 2)
    cards = [*least.plot.cards, *reversed(most.plot.cards)]
    for one, card, row in zip(frame.to_dict("records"), cards, np.flatnonzero(own)[expected], strict=True):
        assert one["label"] == worst
        assert one["natural_prediction"] == str(worst)
        assert one["attacked_prediction"] == str(attacked.predicted[row])
        for kind, outputs in (("natural", natural), ("attacked", attacked)):
            probabilities = 100 * outputs.probabilities[row]
            assert one[f"{kind}_confidence_percent"] == pytest.approx(probabilities.max(), abs=1e-2)
            assert one[f"{kind}_probability_of_label_percent"] == pytest.approx(probabilities[worst], abs=1e-2)
        x, x_adv = natural.x[row, 0].numpy(), attacked.x[row, 0].numpy()
        assert one["perturbation_size"] == pytest.approx(np.abs(x_adv - x).max(), abs=1e-6)
        assert card.heading == f"image {one['index']}: {worst}"
        before, change, after = (pixels(picture.png) for picture in card.pictures)
        assert before == pytest.approx(255 * x, abs=0.501)
        assert after == pytest.approx(255 * x_adv, abs=0.501)
        assert change == pytest.approx(255 * (0.5 + 5 * (x_adv - x)).clip(0, 1), abs=0.501)


def test_given_indices_and_labels(trained: Path) -> None:
    found = examples(trained, attack="fgsm", indices=(30, 4, 30, 17))
    assert sorted(found.frame["index"]) == [4, 17, 30]
    assert found.frame["margin"].is_monotonic_increasing
    assert found.about["class"] is None
    (figure,) = found.figures()
    assert len(figure.plot.cards) == 3
    assert set(examples(trained, attack="fgsm", label="4").frame["label"]) == {4}
    one = examples(trained, attack="fgsm", label=2, number=1)
    assert len(one.frame) == len(one.figures()) == 1


def test_png_contains_the_pixels() -> None:
    color = np.random.default_rng(0).integers(0, 256, (3, 5, 7))
    assert np.array_equal(pixels(png(color / 255)), np.moveaxis(color, 0, -1))
    gray = np.array([[[0.0, 1.0, 0.5]]])
    assert pixels(png(gray)).tolist() == [[0, 255, 128]]
    assert pixels(png(np.array([[[0.2]], [[0.6]]]))).tolist() == [[round(255 * 0.4)]]
    assert pixels(png(np.array([[[-3.0, 7.0]]]))).tolist() == [[0, 255]]


def test_class_names_are_escaped_in_the_page(colours: Run) -> None:
    found = examples(colours, number=4)
    page = answers_page("t", "e", {"examples": found})
    shown = Images(page)
    assert len(shown.images) == 12
    assert all(image["alt"] and (image["src"] or "").startswith("data:image/png;base64,") for image in shown.images)
    assert [image["class"] for image in shown.images] == ["small"] * 12
    assert shown.tags.count("script") == 1  # that of every page
    assert "b" not in shown.tags
    assert found.about["class"] in shown.text


def test_card_texts_are_escaped() -> None:
    picture = Picture(png=png(np.zeros((1, 2, 2))), alt='"><script>', caption="<script>")
    figure = gallery([Card(heading="<script>", pictures=[picture], lines=["<script>"])], title="t", alt="a")
    shown = Images(str(figure.html()))
    assert "script" not in shown.tags
    assert shown.images[0]["alt"] == '"><script>'
    assert shown.text.count("<script>") == 3
    assert figure.role == "group"


def test_large_images_are_not_enlarged() -> None:
    figure = gallery(
        [Card(heading="h", pictures=[Picture(png=png(np.zeros((3, 200, 200))), alt="a", caption="c")])],
        title="t",
        alt="a",
    )
    assert "class" not in Images(str(figure.html())).images[0]


def test_misclassified_absent_and_many_classes(tmp_path: Path) -> None:
    x = torch.rand(20, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    always = Linear(torch.zeros(3, 4), torch.tensor([1.0, 0.0, 0.0]))
    subject = planted(tmp_path / "always", always, x, torch.arange(20) % 2, ["a", "b", "c"])
    found = examples(subject, attack="fgsm")
    assert found.about["class"] == "b"
    assert set(found.frame["natural_prediction"]) == {"a"}
    with pytest.raises(InputError, match="no examples of c"):
        examples(subject, label="c")
    assert len(examples(thousand(tmp_path / "many"), attack="fgsm", label="class 7").frame) == 1


def test_bad_input(trained: Path) -> None:
    with pytest.raises(InputError, match="mutually exclusive"):
        examples(trained, label=1, indices=(1,))
    with pytest.raises(InputError, match="images 0 to 696"):
        examples(trained, indices=(3, 700))
    with pytest.raises(InputError, match="images 0 to 696"):
        examples(trained, indices=())
    with pytest.raises(InputError, match="is not a class"):
        examples(trained, label="cat")
    with pytest.raises(InputError, match="number"):
        examples(trained, number=0)
    with pytest.raises(InputError, match="amplify"):
        examples(trained, amplify=-1)
