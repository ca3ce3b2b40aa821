"""The record of a run: metrics, console, loggers, validations, and the run's identity."""
