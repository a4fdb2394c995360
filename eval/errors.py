"""Errors that end an evaluation with a one-line message and exit code 2."""


class EvalError(Exception):
    """Error in the input of an evaluation: an unknown task, method or file, a missing column, too little context."""
