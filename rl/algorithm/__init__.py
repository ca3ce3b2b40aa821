"""Around losses.py, on whole batches: flags, advantages, corrections, metrics and warnings."""
