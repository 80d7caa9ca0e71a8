"""Natural corruptions: what weather, cameras and files do to images (Hendrycks & Dietterich 2019)."""

from __future__ import annotations

from classwise.corruptions.base import CORRUPTIONS, FAMILIES, SEVERITIES, Corruption, make_corruptions

__all__ = ["CORRUPTIONS", "FAMILIES", "SEVERITIES", "Corruption", "make_corruptions"]
