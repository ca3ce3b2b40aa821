"""The parts of report.py, which read logs and compare runs. They need no torch."""
