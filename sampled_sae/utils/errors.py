"""The one kind of error that is the user's to mend; everything else is a bug and keeps its traceback."""


class UserError(Exception):
    """One line that names the field, its value and what would be right. The CLI prints it and exits with 2."""


class Interrupted(UserError):
    """The user asked to stop (Ctrl-C); the work so far is safe in a checkpoint. The CLI exits with 130."""
