"""The training loop and what surrounds it. Knows objectives and policies only by their protocols."""
