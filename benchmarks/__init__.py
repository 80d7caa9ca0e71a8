"""Benchmarks of this package against other libraries, and the studies behind the numbers in the docs."""
