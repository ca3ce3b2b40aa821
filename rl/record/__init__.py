"""What a run writes down: metrics, console, loggers, validations, and which run it is."""
