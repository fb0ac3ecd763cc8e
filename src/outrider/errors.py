"""Takes nothing, gives the one exception for what a user wrote; knows nothing of where it is raised."""


class UserError(ValueError):
    """A user's mistake. The message is one sentence: the field or file:line, the value, the rule, the way out.

    The command line prints it without a traceback and exits with code 2.
    """
