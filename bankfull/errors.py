"""Errors in a user's input, and the one that ends a replica.

Every message is one sentence that names the input and the solution. The command line prints the sentence and exits with
code 2; Python callers catch `BankfullError`, which is a `ValueError`. A bug in the engine never raises a
`BankfullError`.
"""


class BankfullError(ValueError):
    """The input cannot be served as given."""


class ConfigError(BankfullError):
    """An option is out of range, or contradicts another one."""


class ModelError(BankfullError):
    """A model cannot be found, read, or run."""


class RequestError(BankfullError):
    """One request cannot be served; the others continue."""


class RankLost(RuntimeError):
    """Another rank has ended, or does not answer: this replica cannot go on."""
