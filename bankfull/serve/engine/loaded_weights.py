"""The identity of the weights that an engine has loaded."""

from __future__ import annotations

from bankfull.errors import ModelError
from bankfull.serve.engine.wire import Configure


class LoadedWeights:
    """Made before the files are loaded, where there are other replicas that must have the same ones."""

    def __init__(self, wanted: Configure) -> None:
        self._wanted = wanted
        self._before = self._read()

    def fingerprint(self) -> str:
        """Of the files that were loaded since; empty for a single engine. Raises ModelError if they have changed."""
        if self._before != self._read():
            raise ModelError("The model's files have changed while they were loaded; load them again.")
        return self._before

    def _read(self) -> str:
        if not self._wanted.tells_prefixes:
            return ""
        from bankfull.weights.fingerprint import weights_fingerprint
        from bankfull.weights.locate import locate

        return weights_fingerprint(locate(self._wanted.model))
