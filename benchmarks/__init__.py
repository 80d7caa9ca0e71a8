"""Side by side with others: what an attack or a training step costs, measured in rounds in one process."""
