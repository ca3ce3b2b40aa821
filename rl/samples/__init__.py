"""From generators to learners: tickets, the schedule with its bound of staleness, groups, and the mail between ranks."""
