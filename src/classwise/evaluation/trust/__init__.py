"""Trust checks of an evaluation: probes that run on the model, and the findings derived from them."""
