"""Evaluation of a model class by class: runner, stages of attacks, judging, trust checks and the margin search.

Imports attacks, corruptions, accelerate, data, models, reporting and the base packages; never training or above.
"""
