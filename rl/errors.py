"""The exceptions whose messages are meant for the user's eyes."""


class UserError(Exception):
    """Something the user can fix: the message says what is wrong, where (file, row, flag) and what to do.

    The scripts print it without a traceback and exit with code 1.
    """


class RankLost(ConnectionError):
    """A process of the job, with which this one shares memory, has exited."""


class Stopped(Exception):
    """The run has been asked to stop (SIGTERM) and has left nothing undone; the message, if any, says where it resumes.

    The scripts print it and exit with code 143.
    """
