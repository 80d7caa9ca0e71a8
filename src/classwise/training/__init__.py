"""Training by a recipe: plan, step, epoch, loop, checkpoints. May import all packages up to evaluation."""
