"""Random models on disk: directories and .gguf files that this engine and other libraries read alike."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import gguf
import pytest
import torch
from safetensors import safe_open

from bankfull import LLM, SamplingParams
from bankfull.errors import BankfullError, ConfigError
from bankfull.limits.meter.metered import MeteredModel
from bankfull.synthetic import checkpoint, random_weights
from bankfull.synthetic.checkpoint import write_checkpoint
from bankfull.synthetic.gguf_file import ARCHITECTURES, stored_tensors, write_gguf
from bankfull.synthetic.random_weights import random_model
from bankfull.synthetic.shapes import shape_config
from bankfull.synthetic.vocabulary import CONTROL, END, FEWEST, MASK, ByteVocabulary
from bankfull.text.load import load_tokenizer
from bankfull.weights.source import open_model
from tests.synthetic.test_shapes import KNOWN

TINY = shape_config("llama-3.2-1b-tiny")
AS_GGUF = list({kind: name for name in KNOWN if (kind := shape_config(name)["model_type"]) in ARCHITECTURES}.values())


def test_a_directory_holds_the_weights_of_its_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 100_000)
    monkeypatch.setattr(random_weights, "ELEMENTS_AT_ONCE", 5000)
    steps: list[tuple[str, int, int]] = []
    made = write_checkpoint("m", TINY, tmp_path / "m", torch.bfloat16, 3, lambda *step: steps.append(step))
    source, files = random_model("m", TINY, torch.bfloat16, seed=3).source, open_model(made.path)
    assert sorted(files.source.names()) == sorted(source.names())
    for name in source.names():
        assert torch.equal(files.source.get(name).parts["data"], source.get(name).parts["data"]), name
    shards = sorted(made.path.glob("*.safetensors"))
    assert len(shards) > 1 and all(shard.stat().st_size < 110_000 for shard in shards)
    with safe_open(shards[0], framework="pt") as shard:
        assert shard.metadata() == {"format": "pt"}
    assert made.parameters == MeteredModel(TINY).parameters and made.weight_bytes == 2 * made.parameters
    assert steps[-1] == ("Writing m", made.weight_bytes, made.weight_bytes) and len(steps) > len(source.names())
    assert files.config["dtype"] == "bfloat16" and [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_random_model_speaks_from_text_to_text(tmp_path: Path) -> None:
    made = write_checkpoint("m", TINY, tmp_path / "m", torch.float32)
    llm = LLM(str(made.path))
    [result] = llm.generate(["the river é"], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    assert len(result.outputs[0].token_ids) == 5 and result.outputs[0].text
    assert len(result.prompt_token_ids) == len("the river é".encode()) - 1, "one merge, otherwise bytes"
    tokenizer, template = load_tokenizer(open_model(made.path))
    assert template is not None and tokenizer.eos_ids == {TINY["vocab_size"] - 2}
    shown = template.render([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert "<|im_start|>user\nhi<|im_end|>" in shown
    assert tokenizer.encode(shown)[0] == TINY["vocab_size"] - 3


def test_a_vocabulary_has_every_byte_once_and_special_tokens_at_its_end() -> None:
    made = ByteVocabulary(1000, mask=900)
    assert len(made.tokens) == len(set(made.tokens)) == len(made.kinds) == 1000
    assert made.tokens[ord("A")] == "A" and all(len(token) == 1 for token in made.tokens[:256])
    assert made.tokens[-1] == END and made.specials[MASK] == 900 and made.kinds.count(CONTROL) == 4
    assert all(made.tokens[number] == token for token, number in made.specials.items())
    assert len(ByteVocabulary(FEWEST).tokens) == FEWEST
    with pytest.raises(ConfigError, match="no room for all bytes"):
        ByteVocabulary(FEWEST - 1)


def test_a_model_with_too_few_tokens_for_all_bytes_has_no_tokenizer(tmp_path: Path) -> None:
    made = write_checkpoint("m", TINY | {"vocab_size": 100}, tmp_path / "m", torch.float32)
    assert not made.tokenizer and not (made.path / "tokenizer.json").exists()
    assert open_model(made.path).config["vocab_size"] == 100


@pytest.mark.parametrize("name", AS_GGUF)
def test_a_gguf_file_is_read_alike_by_the_gguf_package_and_this_engine(name: str, tmp_path: Path) -> None:
    config = shape_config(f"{name}-tiny")
    made = write_gguf("m", config, tmp_path / "m", "q8_0")
    source = random_model("m", config, torch.float32).source
    expected = list(stored_tensors(config, source, "q8_0"))
    found = gguf.GGUFReader(made.path).tensors
    assert [(t.name, tuple(reversed(t.shape.tolist())), t.tensor_type.name.lower()) for t in found] == [
        (tensor.name, tensor.shape, tensor.kind) for tensor in expected
    ]
    files = open_model(made.path)
    assert files.config["model_type"] == config["model_type"] or config["model_type"] in ("mistral", "mixtral")
    same = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "rope_theta",
    )
    assert {key: files.config[key] for key in same} == {key: config[key] for key in same}
    assert MeteredModel(files).parameters == sum(prod(tensor.shape) for tensor in expected) == made.parameters
    [result] = LLM(str(made.path)).generate(["the river"], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert len(result.outputs[0].token_ids) == 4 and len(result.prompt_token_ids) == len("the river") - 1


def test_the_table_of_logits_is_wider_and_vectors_are_not_rounded(tmp_path: Path) -> None:
    for name, head in (("llama-3.2-1b-tiny", "token_embd.weight"), ("qwen3-8b-tiny", "output.weight")):
        made = write_gguf("m", shape_config(name), tmp_path / name)
        kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(made.path).tensors}
        assert made.path.name == "m.Q4_0.gguf" and kinds[head] == "Q8_0" and kinds["blk.0.ffn_up.weight"] == "Q4_0"
        assert kinds["output_norm.weight"] == "F32" and kinds.get("token_embd.weight") == (
            "Q8_0" if "embd" in head else "Q4_0"
        )


def test_experts_in_mxfp4_stand_beside_matrices_of_eight_bits(tmp_path: Path) -> None:
    config = shape_config("gpt-oss-20b-tiny")
    made = write_gguf("m", config, tmp_path / "m", "mxfp4")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(made.path).tensors}
    assert made.path.name == "m.MXFP4.gguf" and kinds["token_embd.weight"] == kinds["blk.0.attn_q.weight"] == "Q8_0"
    experts = [name for name in kinds if name.endswith("_exps.weight")]
    assert len(experts) == 3 * config["num_hidden_layers"] and {kinds[name] for name in experts} == {"MXFP4"}
    small = (
        "blk.0.ffn_up_exps.bias",
        "blk.0.attn_sinks.weight",
        "blk.0.ffn_gate_inp.bias",
        "blk.0.ffn_gate_inp.weight",
    )
    assert {kinds[name] for name in small} == {"F32"}
    files, drawn = open_model(made.path), random_model("m", config, torch.float32).source
    assert {key: files.config[key] for key in ("sliding_window", "num_local_experts", "intermediate_size")} == {
        key: config[key] for key in ("sliding_window", "num_local_experts", "intermediate_size")
    }
    found = files.source.get("model.layers.1.mlp.experts.down_proj.weight").dequantize()
    wanted = torch.stack(
        [
            drawn.get(f"model.layers.1.mlp.experts.{expert}.down_proj.weight").dequantize()
            for expert in range(config["num_local_experts"])
        ]
    )
    assert float((found - wanted).norm() / wanted.norm()) < 0.2
    with pytest.raises(ConfigError, match="mxfp4 is a type of experts, which m has none of"):
        write_gguf("m", TINY, tmp_path / "dense", "mxfp4")


def test_the_same_shape_under_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    made = {
        folder: write_gguf("m", TINY, tmp_path / folder, seed=seed) for folder, seed in (("a", 0), ("b", 0), ("c", 1))
    }
    one, again, other = (made[folder].path.read_bytes() for folder in made)
    assert one == again and one != other


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "q3_zz"}, "is not a type of matrices"),
        ({"config": shape_config("mamba-2.8b-tiny")}, "architecture 'mamba' cannot be written"),
        ({"config": TINY | {"intermediate_size": 40}}, "40 wide, which blocks of q4_0 do not divide"),
    ],
    ids=["type", "architecture", "width"],
)
def test_what_cannot_be_a_gguf_file_is_refused_in_one_sentence(
    settings: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        write_gguf("m", **({"config": TINY, "folder": tmp_path / "m"} | settings))
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_of_a_model_that_could_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with pytest.raises(ConfigError, match="full exists already"):
        write_checkpoint("m", TINY, tmp_path / "full", torch.float32)
    monkeypatch.setattr(checkpoint, "SPARE_BYTES", 1 << 60)
    with pytest.raises(ConfigError, match=r"needs 0\.0 GB in .* are free; make room"):
        write_checkpoint("m", TINY, tmp_path / "m", torch.float32)
    monkeypatch.setattr(checkpoint, "SPARE_BYTES", 0)

    def fails(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_write_shard", fails)
    with pytest.raises(BankfullError, match="No space left on device; choose another directory"):
        write_checkpoint("m", TINY, tmp_path / "m", torch.float32)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_an_index_names_the_file_of_every_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 50_000)
    made = write_checkpoint("m", TINY, tmp_path / "m", torch.bfloat16)
    index = json.loads((made.path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == made.weight_bytes
    for name, file in index["weight_map"].items():
        with safe_open(made.path / file, framework="pt") as shard:
            assert name in list(shard.keys()), name
