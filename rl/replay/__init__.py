"""The samples of a run, which --record-samples writes and replay.py reads."""
