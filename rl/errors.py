"""The exceptions whose messages are for the user."""


class UserError(Exception):
    """Something the user can fix: the message says what is wrong, where (file, row, flag) and what to do. The scripts print it
    without a traceback and exit with code 1."""


class RankLost(ConnectionError):
    """Another process of the job, which shares memory with this one, has exited."""


class Stopped(Exception):
    """The run has been asked to stop (SIGTERM) and is complete so far; the message, if any, says where it resumes. The scripts
    print it and exit with code 143."""
