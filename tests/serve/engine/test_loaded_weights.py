"""The fingerprint that an engine reports is that of the weights which it has loaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bankfull.errors import ModelError
from bankfull.serve.engine.loaded_weights import LoadedWeights
from bankfull.serve.engine.wire import Configure
from bankfull.weights.fingerprint import weights_fingerprint
from tests.tiny import speaking_folder


@pytest.mark.parametrize("asked", [{"tells_prefixes": True}, {"tells_weights": True}])
def test_replicas_and_kept_answers_are_bound_to_the_weights(asked: dict[str, bool], tmp_path: Path) -> None:
    """Also in a single engine: other weights under an old name must not find the answers of the old ones."""
    folder = tmp_path / "model"
    shutil.copytree(speaking_folder(), folder)
    first = LoadedWeights(Configure(str(folder), {}, **asked))  # type: ignore[arg-type]
    assert first.fingerprint() == weights_fingerprint(folder)
    late = LoadedWeights(Configure(str(folder), {}, **asked))  # type: ignore[arg-type]
    late._fingerprint()
    with (folder / "config.json").open("a") as file:
        file.write(" ")
    with pytest.raises(ModelError, match="have changed while they were loaded"):
        late.fingerprint()


def test_weights_that_nobody_asks_for_are_not_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bankfull.weights.fingerprint.weights_fingerprint", lambda path: pytest.fail("hashed"))
    assert LoadedWeights(Configure(str(speaking_folder()), {})).fingerprint() == ""
