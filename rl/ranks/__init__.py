"""The processes of a job: how they start, find their devices and each other, fail, hang and end.

Left out: the split into generators and learners (rl/split.py), and the data that they exchange (rl/transport)."""
