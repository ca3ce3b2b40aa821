"""The parts of report.py: they read logs and compare runs. Need no torch."""
