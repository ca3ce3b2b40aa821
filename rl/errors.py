"""Exceptions whose messages are meant for the user."""


class UserError(Exception):
    """An error that the user can fix: the message says what is wrong, where (file, row, flag) and what to do. The scripts print
    it without a traceback and exit with code 1."""


class ImageError(Exception):
    """An error in a row's images. The message does not name the row."""


class RankLost(ConnectionError):
    """The exit of another process of the job that shares memory with this one."""


class Stopped(Exception):
    """The end of a run that was asked to stop (SIGTERM) and has saved its state; the message, if any, says where it resumes.
    The scripts print it and exit with code 0."""
