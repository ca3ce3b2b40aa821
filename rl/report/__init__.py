"""What stands behind report.py: logs read, runs compared. Needs no torch."""
