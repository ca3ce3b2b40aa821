"""What --record-samples writes and replay.py reads: the samples of a run."""
