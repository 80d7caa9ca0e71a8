"""Repair of a finished model's worst class. May import ``evaluation`` and what lies below it; never ``analysis``."""
