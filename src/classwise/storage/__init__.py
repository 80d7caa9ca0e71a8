"""Files on disk: run directories, tables of verdicts and of margins. May import core and metrics; no torch."""
