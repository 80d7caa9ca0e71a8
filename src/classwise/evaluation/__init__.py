"""Evaluation of a model under attacks: every example gets a verdict. Imports nothing of training."""
