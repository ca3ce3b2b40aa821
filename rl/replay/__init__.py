"""What stands behind --record-samples and replay.py: samples recorded, and a micro-batch that was not finite."""
