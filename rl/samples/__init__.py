"""The way from generators to learners: tickets, the schedule and its bound of staleness, groups, and messages between ranks."""
