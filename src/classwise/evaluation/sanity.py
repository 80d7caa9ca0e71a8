"""Remarks on how far an evaluation can be trusted, as sentences with a severity."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import torch
from torch import Tensor, nn

from classwise.forward import dtype_of, frozen, logits_of
from classwise.reporting.report import Finding, Sanity
from classwise.threat import Threat
from classwise.verdicts import NATURAL, Verdicts


def inspect(
    verdicts: Verdicts,
    threat: Threat,
    *,
    rejected: Mapping[str, int],
    blind: tuple[int, int],
    trained_on_these: bool = False,
) -> Sanity:
    """Look at a finished evaluation.

    ``rejected`` counts, per attack, results outside the ball or the box; ``blind`` images without a usable gradient,
    and the images that were asked.
    """
    findings = []
    if trained_on_these:
        text = "The model was trained on these very images: the numbers say nothing about new ones."
        findings.append(Finding(severity="error", text=text))
    for key, count in rejected.items():
        if count:
            text = f"{key} returned {count} images outside the allowed ball or [0, 1]; they do not count as breaks."
            findings.append(Finding(severity="warning", text=text))
    if blind[0]:
        text = (
            f"At {blind[0]} of {blind[1]} clean images the gradient is zero or not finite: gradient attacks see "
            "nothing there, and that such images survive is no evidence of robustness."
        )
        findings.append(Finding(severity="warning", text=text))
    if (near := nearby_fraction(threat)) is not None:
        text = f"eps = {threat.text} is not {near}: results for the two are not comparable to the last digit."
        findings.append(Finding(severity="info", text=text))
    if verdicts.attacks and not verdicts.survived().any() and verdicts.survived(NATURAL).any():
        text = "No example survived: the radius may be too large to tell one model or class from another."
        findings.append(Finding(severity="info", text=text))
    return Sanity(findings=findings)


def blind_spots(model: nn.Module, x: Tensor, y: Tensor) -> tuple[int, int]:
    """How many images have a gradient of the true logit that is zero or not finite, and how many were asked."""
    with torch.enable_grad(), frozen(model):
        x = x.detach().to(dtype_of(model)).requires_grad_()
        logits = logits_of(model(x))
        (gradient,) = torch.autograd.grad(logits.gather(1, y[:, None]).sum(), x)
    flat = gradient.flatten(1)
    blind = (flat == 0).all(1) | ~flat.isfinite().all(1)
    return int(blind.sum()), len(x)


def nearby_fraction(threat: Threat) -> str | None:
    """The usual n/255 that a decimal radius rounds, if it is not that very number.

    >>> nearby_fraction(Threat.parse("0.031")), nearby_fraction(Threat.parse("8/255"))
    ('8/255', None)
    """
    n = round(threat.eps * 255)
    if threat.norm != "Linf" or "/" in threat.text or not 1 <= n <= 16 or abs(threat.eps - n / 255) >= 5e-4:
        return None
    return None if Fraction(threat.eps) == Fraction(n / 255) else f"{n}/255"
