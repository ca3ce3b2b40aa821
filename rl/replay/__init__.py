"""What stands behind --record and replay.py: samples recorded, and a micro-batch that was not finite."""
