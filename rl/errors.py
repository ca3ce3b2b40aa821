"""The one exception whose message is meant for the user's eyes."""


class UserError(Exception):
    """Something the user can mend: the message says what is wrong, where (file, row, flag) and what to do.

    The scripts print it without a traceback and exit with code 1.
    """
