"""User input: options, specs, plug-ins and recipes. Imports ``core`` and ``storage``; no torch."""
