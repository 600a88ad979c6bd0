"""Errors meant for the user: one line that says what is wrong, where, and what would be right."""


class UserError(ValueError):
    """Something the user wrote cannot be used; the message is the whole answer (exit code 2)."""

    exit_code = 2


class MachineError(UserError):
    """The request is valid, but this machine or installation cannot do it (exit code 3)."""

    exit_code = 3
