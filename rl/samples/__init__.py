"""From generators to learners: tickets, the schedule with its bound of staleness, groups, and messages between ranks."""
