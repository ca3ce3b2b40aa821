"""What stands behind plan.py: a run's time and memory, told before it is started."""
