"""Files of streams: read as they were written, and refused in one sentence where they are damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bankfull.errors import ModelError
from bankfull.weights.drafter_files import CONFIG, TREE
from bankfull.weights.streams import SITES, STREAMS, read_streams, write_streams
from tests.decode.test_streaming import random_streams
from tests.tiny import VOCAB


def test_streams_are_read_as_they_were_written(tmp_path: Path) -> None:
    streams = random_streams(1)
    written = write_streams(streams, tmp_path, {"base_model_name_or_path": "tiny"})
    assert {file.name for file in written} == {STREAMS, CONFIG, TREE} == {file.name for file in tmp_path.iterdir()}
    found = read_streams(tmp_path)
    assert (found.count, found.hidden, found.vocab, found.name) == (4, 32, VOCAB, tmp_path.name)
    pairs = [(found.entry, streams.entry), (found.exit, streams.exit)]
    for mine, theirs in zip(found.layers, streams.layers, strict=True):
        pairs += [(mine[site], theirs[site]) for site in SITES]
    assert all(torch.equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))
    assert torch.equal(found.embeddings, streams.embeddings) and torch.equal(found.vocabulary, streams.vocabulary)
    assert found.acceptance is not None and streams.acceptance is not None
    assert found.acceptance[2] == pytest.approx(streams.acceptance[2], abs=1e-6)


def damage(name: str) -> Callable[[Path], None]:
    def config(folder: Path, **changes: object) -> None:
        known = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({**known, **changes}))

    def tensors(folder: Path, **changes: torch.Tensor) -> None:
        save_file({**load_file(folder / STREAMS), **changes}, folder / STREAMS)

    def truncated(folder: Path) -> None:
        data = (folder / STREAMS).read_bytes()
        (folder / STREAMS).write_bytes(data[: len(data) // 2])

    return {
        "truncated": truncated,
        "no weights": lambda folder: (folder / STREAMS).unlink(),
        "no config": lambda folder: (folder / CONFIG).unlink(),
        "wrong number": lambda folder: config(folder, streams="four"),
        "too many layers": lambda folder: config(folder, layers=3),
        "other size": lambda folder: config(folder, hidden_size=48),
        "shape": lambda folder: tensors(folder, **{"layers.1.feed.up": torch.zeros(32, 99)}),
        "integers": lambda folder: tensors(folder, embeddings=torch.zeros(4, 32, dtype=torch.int32)),
        "ids": lambda folder: tensors(folder, vocabulary=torch.tensor([1, VOCAB], dtype=torch.int32)),
        "floats": lambda folder: tensors(folder, vocabulary=torch.zeros(4)),
        "short tree": lambda folder: (folder / TREE).write_text(json.dumps({"acceptance": [[0.5]]})),
    }[name]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("truncated", "is truncated or no safetensors file"),
        ("no weights", "holds no streams: streams.safetensors is missing; train some"),
        ("no config", "has no config.json, which gives the sizes of the streams"),
        ("wrong number", "has 'four' as 'streams', which must be 1 to 16"),
        ("too many layers", "lacks the tensor 'layers.2.qkv.down'"),
        ("other size", r"of shape \(\d+, 32\), which does not fit its config.json"),
        ("shape", r"'layers.1.feed.up' of shape \(32, 99\)"),
        ("integers", "'embeddings' of shape"),
        ("ids", f"token ids outside of a vocabulary of {VOCAB}"),
        ("floats", "not a list of token ids"),
        ("short tree", "must list the acceptance of 4 streams"),
    ],
)
def test_bad_files_are_refused_in_one_sentence(tmp_path: Path, name: str, sentence: str) -> None:
    write_streams(random_streams(), tmp_path / "streams")
    damage(name)(tmp_path / "streams")
    with pytest.raises(ModelError, match=sentence) as refused:
        read_streams(tmp_path / "streams")
    assert "\n" not in str(refused.value)


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a directory of streams"):
        read_streams(tmp_path / "gone")
