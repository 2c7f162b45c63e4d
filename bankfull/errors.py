"""Errors in a user's input.

Every message is one sentence that names the input and the solution. The command line prints the sentence and exits with
code 2; Python callers catch `BankfullError`, which is a `ValueError`. A bug in the engine never raises one of these.
"""


class BankfullError(ValueError):
    """The input cannot be served as given."""


class ConfigError(BankfullError):
    """An option is out of range, or contradicts another one."""


class ModelError(BankfullError):
    """A model cannot be found, read, or run."""


class RequestError(BankfullError):
    """One request cannot be served; the others continue."""
