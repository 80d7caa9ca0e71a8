"""Evaluation of a model class by class.

Runner, stages of attacks, verification of adversarial examples, trust checks and the margin search.

Imports attacks, corruptions, accelerate, data, models, reporting and the base packages; never training or above.
"""
