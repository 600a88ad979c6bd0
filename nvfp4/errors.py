"""Errors meant for the user: one line that says what is wrong, where, and what would be right."""


class UserError(ValueError):
    """Something the user wrote cannot be used; the message is the whole answer (exit code 2)."""

    exit_code = 2


class MachineError(UserError):
    """The request is valid, but this machine or installation cannot do it (exit code 3)."""

    exit_code = 3


class TrainingError(UserError):
    """Training cannot go on (exit code 1); the last checkpoint is untouched.

    row: what is known of the failed step, for metrics.jsonl; not all of it is finite.
    """

    exit_code = 1

    def __init__(self, message: str, **row: float):
        super().__init__(f"{message}; stopped, the last checkpoint is untouched")
        self.row = row
