"""The checks behind doctor.py: packages and drivers, kernels, engines, publishes, and one step of each script."""
