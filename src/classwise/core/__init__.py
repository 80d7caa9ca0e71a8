"""Shared definitions: types, threat, random streams, model calls, errors, progress. Imports nothing of classwise."""
