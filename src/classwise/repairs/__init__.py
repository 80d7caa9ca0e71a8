"""Repair of a finished model's worst class. Imports ``evaluation`` and everything below it; never ``analysis``."""
