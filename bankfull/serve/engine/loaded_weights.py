"""The identity of the weights that an engine has loaded."""

from __future__ import annotations

from bankfull.errors import ModelError
from bankfull.serve.engine.wire import Configure


class LoadedWeights:
    """Made before the files are loaded, where other replicas must have the same ones, or answers were kept. The files
    are hashed meanwhile."""

    def __init__(self, wanted: Configure) -> None:
        self._path = None
        if not (wanted.tells_prefixes or wanted.tells_weights):
            return
        from bankfull.weights.fingerprint import fingerprint_beside, weights_stamp
        from bankfull.weights.locate import locate

        self._path = locate(wanted.model)
        self._before = weights_stamp(self._path)
        self._fingerprint = fingerprint_beside(self._path)

    def fingerprint(self) -> str:
        """The fingerprint of the files that were loaded since; empty where nobody asks. Raises ModelError if they have
        changed."""
        if self._path is None:
            return ""
        from bankfull.weights.fingerprint import weights_stamp

        fingerprint = self._fingerprint()
        if self._before != weights_stamp(self._path):
            raise ModelError("The model's files have changed while they were loaded; load them again.")
        return fingerprint
