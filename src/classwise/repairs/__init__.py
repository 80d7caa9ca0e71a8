"""Repair of a trained model's worst class. Imports ``evaluation`` and everything below it; never ``analysis``."""
