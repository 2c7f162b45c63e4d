"""From the name of a draft model to a strategy; and the models that cannot draft."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bankfull.config import RunConfig, SchedConfig, StateConfig
from bankfull.drafters import load_draft
from bankfull.errors import BankfullError
from bankfull.loading import Loaded, load
from bankfull.runtime.taped import Taped
from bankfull.sample.params import SamplingParams
from bankfull.weights.locate import locate
from bankfull.weights.source import open_model
from tests.tiny import folder_of, speaking_folder

TARGET, DRAFT = 5, 6
"""Seeds of two models with the same tokenizer."""
RUN = RunConfig(dtype="float32", device="cpu", speculative="off")
SMALL = StateConfig(memory="8MiB")


def loaded(draft: str | None, run: RunConfig = RUN, **options: object) -> Loaded:
    target = str(speaking_folder(TARGET))
    strategy = None if draft is None else load_draft(draft, open_model(locate(target)), run, **options)  # type: ignore[arg-type]
    return load(target, RUN, SchedConfig(rows=4), SMALL, strategy=strategy)


def generated(made: Loaded, params: SamplingParams) -> list[tuple[int, ...]]:
    front = made.frontend
    names = [front.submit(text, params) for text in ("The river runs", "A channel", "{")]
    while made.engine.busy:
        front.step()
    return [tuple(sample.token_ids) for name in names for sample in front.take(name).outputs]


PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=24, n=2, repetition_penalty=1.2),
)


@pytest.mark.parametrize("params", PARAMS, ids=("greedy", "sampled"))
@pytest.mark.parametrize(
    ("seed", "run", "branching"),
    [
        (TARGET, RUN, (1, 1, 1)),
        (DRAFT, RUN, (2, 2, 1)),
        (TARGET, RunConfig(quantize="int8", device="cpu"), (1, 1)),
        (TARGET, RunConfig(dtype="float32", kv_dtype="int8", device="cpu"), (3, 1)),
    ],
    ids=("equal", "another", "quantized", "int8-kv"),
)
def test_a_draft_model_with_options_of_its_own_changes_no_token(
    seed: int, run: RunConfig, branching: tuple[int, ...], params: SamplingParams
) -> None:
    plain, drafted = loaded(None), loaded(str(speaking_folder(seed)), run, branching=branching)
    expected, steps = generated(plain, params), plain.engine.totals.steps
    assert generated(drafted, params) == expected
    assert seed == DRAFT or drafted.engine.totals.steps < steps * 0.7


def test_both_models_run_on_tapes() -> None:
    made = loaded(str(speaking_folder(DRAFT)))
    strategy = made.engine.strategy
    assert isinstance(made.engine.runner.run_model, Taped)
    assert isinstance(strategy._steps._run, Taped)  # type: ignore[attr-defined]


def other_vocabulary(folder: Path) -> Path:
    """A copy of the draft model in which two tokens have changed places."""
    shutil.copytree(speaking_folder(DRAFT), folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    ids = tokenizer["model"]["vocab"]
    by_id = {number: token for token, number in ids.items()}
    ids[by_id[40]], ids[by_id[41]] = 41, 40
    path.write_text(json.dumps(tokenizer))
    return folder


def refused(draft: str, **options: object) -> str:
    with pytest.raises(BankfullError) as caught:
        loaded(draft, **options)  # type: ignore[arg-type]
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    assert "their vocabularies differ, first in token 40;" in refused(str(other_vocabulary(tmp_path / "other")))


def test_a_padded_head_of_another_size_is_refused(tmp_path: Path) -> None:
    import torch
    import transformers

    folder = tmp_path / "padded"
    shutil.copytree(speaking_folder(DRAFT), folder)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    size = model.config.vocab_size
    model.resize_token_embeddings(size + 8)
    model.save_pretrained(folder)
    assert f"The draft model has {size + 8} token ids and the model {size};" in refused(str(folder))


def test_a_missing_draft_model_is_refused(tmp_path: Path) -> None:
    assert "nowhere" in refused(str(tmp_path / "nowhere"))


def test_a_truncated_draft_model_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(speaking_folder(DRAFT), folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    assert "model.safetensors" in refused(str(folder))


def test_a_draft_model_with_recurrent_state_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "mamba"
    shutil.copytree(folder_of("mamba"), folder)
    for path in speaking_folder(DRAFT).glob("*token*"):
        shutil.copy(path, folder)
    assert "cannot draft: it has recurrent state" in refused(str(folder))


def test_a_tree_that_is_too_large_is_refused_before_anything_is_read() -> None:
    assert "tree has 80 draft tokens, but a step verifies at most 63" in refused("nowhere", branching=(8,) * 10)


def test_a_shorter_context_than_the_longest_sequence_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "short"
    shutil.copytree(speaking_folder(DRAFT), folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 64}))
    assert "The draft model's context of 64 tokens is shorter" in refused(str(folder))
