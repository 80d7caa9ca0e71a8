"""Nouns that every package shares: types, threat, random streams, model calls, errors, progress.

Imports nothing of classwise.
"""
