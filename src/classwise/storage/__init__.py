"""Tables on disk. Imports ``errors``, ``files`` and ``metrics`` only; no torch."""
