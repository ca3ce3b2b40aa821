"""What a person runs before, after and around a training run. No training process imports any of it."""
