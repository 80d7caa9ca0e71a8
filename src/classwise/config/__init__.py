"""What users write: specs, plug-ins, recipes. Imports ``core`` and ``storage``."""
