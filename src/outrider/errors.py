"""Takes nothing, gives the exceptions that are shown as one sentence; knows nothing of where they are raised."""


class UserError(ValueError):
    """A user's mistake. The message is one sentence: the field or file:line, the value, the rule, the way out.

    The command line prints it without a traceback and exits with code 2.
    """


class RunFailure(RuntimeError):  # noqa: N818 - what failed is the run, no one's mistake
    """A run that cannot go on, through no mistake in what was asked. One sentence: what happened, where, the way on.

    The command line prints it without a traceback and exits with code 1.
    """
