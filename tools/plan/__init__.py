"""The parts of plan.py, which predicts a run's time and memory before it starts."""
