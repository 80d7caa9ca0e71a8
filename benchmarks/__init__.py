"""Benchmarks: this package beside its peers, in one process, and the studies behind the figures of the docs."""
