"""What can be wrong with what a user gave us.

Every message is one sentence that names the input and the way out. The command line prints the sentence and exits
with code 2; Python callers catch `BankfullError`, which is a `ValueError`. A bug in the engine is never one of these.
"""


class BankfullError(ValueError):
    """The input cannot be served as given."""


class ConfigError(BankfullError):
    """An option is out of range, or contradicts another one."""


class ModelError(BankfullError):
    """A model cannot be found, read, or run."""


class RequestError(BankfullError):
    """One request cannot be served; the others go on."""
