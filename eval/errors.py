"""What can go wrong in an evaluation before anything is measured: one clear line, and exit code 2."""


class EvalError(Exception):
    """An unknown task, method or file, a missing column, a prompt that does not fit."""
