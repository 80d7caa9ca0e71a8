"""Natural corruptions of images by noise, blur, weather and digital processing (Hendrycks & Dietterich 2019).

Imports ``core`` and ``config``.
"""

from __future__ import annotations

from classwise.corruptions.base import CORRUPTIONS, FAMILIES, SEVERITIES, Corruption, make_corruptions

__all__ = ["CORRUPTIONS", "FAMILIES", "SEVERITIES", "Corruption", "make_corruptions"]
