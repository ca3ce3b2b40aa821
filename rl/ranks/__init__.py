"""The processes of a job: how they start, find their device and each other, fail, hang and end.

Left out: who generates and who learns (rl/split.py), and what they send each other (rl/transport)."""
