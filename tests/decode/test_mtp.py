"""Multi-token prediction: the module's forward pass, the same tokens as without it, and clear refusals."""

from __future__ import annotations

import json
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear

from bankfull.config import RunConfig, SchedConfig, StateConfig
from bankfull.decode.mtp import MultiTokenPrediction
from bankfull.decode.plain import Plain
from bankfull.decode.strategy import Sampling, Scores, Verdict
from bankfull.errors import ConfigError, ModelError
from bankfull.layers.build import Build
from bankfull.loading import load
from bankfull.models.mtp import build_mtp
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.runtime import naive
from bankfull.weights.source import open_model
from tests.decode.watched import Watched
from tests.kit import Bench, device_of
from tests.test_drafts import PARAMS
from tests.tiny import VOCAB, folder_of, kit_of, model_of, reference_of

NEW = 24
LAYER = 3
"""The module's number: the model has layers 0 to 2."""


def prediction(shape: str, width: int) -> MultiTokenPrediction:
    return MultiTokenPrediction(partial(build_mtp, open_model(folder_of(shape)).config), width)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight


def reference(tokens: list[int], hidden: Tensor) -> Tensor:
    """Last hidden states of the module over a whole sequence, in plain torch around the reference's decoder layer: the
    entry of token i has its embedding and the model's last hidden state of token i - 1."""
    config = transformers.AutoConfig.from_pretrained(folder_of("latent"))
    w = {name: tensor.double() for name, tensor in load_file(folder_of("latent") / "model.safetensors").items()}
    at = f"model.layers.{LAYER}."
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder_of("latent"), dtype=torch.float64, experts_implementation="eager"
    ).eval()
    layer = model.model.layers[-1]
    own = {name.removeprefix(at): tensor for name, tensor in w.items() if name.startswith(at)}
    for name, parameter in [*layer.named_parameters(), *layer.named_buffers()]:
        if name.startswith("mlp.experts."):
            kinds = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
            parts = [
                torch.cat([own[f"mlp.experts.{expert}.{kind}.weight"] for kind in kinds])
                for expert in range(config.n_routed_experts)
            ]
            parameter.data.copy_(torch.stack(parts))
        else:
            parameter.data.copy_(own[name])
    before = torch.cat((torch.zeros_like(hidden[:1]), hidden[:-1]))
    embedded = rms(w["model.embed_tokens.weight"][tokens], own["enorm.weight"])
    x = linear(torch.cat((embedded, rms(before, own["hnorm.weight"])), -1), own["eh_proj.weight"])[None]
    positions = torch.arange(len(tokens))[None]
    hidden_keys = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
    mask = torch.zeros(1, 1, len(tokens), len(tokens), dtype=torch.float64).masked_fill(hidden_keys, -torch.inf)
    angles = model.model.rotary_emb(x, positions)
    with torch.no_grad():
        found = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=angles)
    y: Tensor = rms(found[0], own["shared_head.norm.weight"])
    return y


class Watching(Watched, MultiTokenPrediction):
    """Keeps the module's hidden states of every token that the target model has run."""


@pytest.mark.parametrize("chunk", (3, 64))
def test_the_forward_pass_is_that_of_the_checkpoint(chunk: int) -> None:
    target, config = reference_of("latent"), open_model(folder_of("latent")).config
    strategy = Watching(partial(build_mtp, config), 2)
    bench = Bench(target, device_of(0), 0, SchedConfig(rows=2, step_tokens=chunk), strategy=strategy)
    rng = random.Random(1)
    prompt = [rng.randrange(VOCAB) for _ in range(13)]
    bench.add("a", prompt, 1)
    bench.run()
    expected = reference(prompt, naive.hidden_states(target, prompt, torch.device("cpu")))
    got = torch.cat(strategy.followed)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)  # the reference routes in float32
    rows = target.head.stored().dequantize(torch.float64)
    torch.testing.assert_close(strategy._logits(got), linear(got, rows))


@pytest.mark.few(1)
@pytest.mark.parametrize("depth", (0, 1))
def test_the_module_changes_neither_tokens_nor_logprobs(depth: int) -> None:
    """With penalties, biases, truncation, `n`, chunks, preemption, and few pages."""
    how = (torch.float32, "auto")

    def bench_of(strategy: Any, **more: Any) -> Bench:
        given = {"sched": SchedConfig(rows=4, step_tokens=24), "state": StateConfig(page_tokens=4), **more}
        kit = kit_of("latent", *how)
        return Bench(model_of("latent", *how), device_of(depth, seed=3), depth, strategy=strategy, kit=kit, **given)

    plain, drafted = bench_of(Plain()), bench_of(prediction("latent", 3), frames=60)
    for bench in (plain, drafted):
        rng = random.Random(5)
        for name, each in PARAMS.items():
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
            bench.add(name, prompt, NEW, n=2, params=each, seed=rng.randrange(1 << 40))
        bench.run(preempt=random.Random(1))
    assert drafted.tokens == plain.tokens
    for key, extras in plain.extras.items():
        ours = [entry.logprob for extra in drafted.extras[key] for entry in extra.logprobs]
        assert ours == pytest.approx([entry.logprob for extra in extras for entry in extra.logprobs], abs=1e-4)


class Counted(MultiTokenPrediction):
    accepted = verified = 0

    def verify(self, scores: Scores, sampling: Sampling) -> Verdict:
        verdict = super().verify(scores, sampling)
        if verdict.counts is not None:
            self.accepted += int((verdict.counts - 1).sum())
            self.verified += len(verdict.counts)
        return verdict


def edited(folder: Path, change: Any) -> Path:
    shutil.copytree(folder_of("latent"), folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_module_that_knows_the_next_token_is_always_right(tmp_path: Path) -> None:
    """All branches are zero, so the last token's embedding determines the next token, and the module passes it on."""

    def simplify(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
            if name.endswith(("norm.weight",)):
                tensor.fill_(1.0)
        hidden = tensors["model.norm.weight"].shape[0]
        join = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
        tensors[f"model.layers.{LAYER}.eh_proj.weight"] = join

    files = open_model(edited(tmp_path, simplify))
    kit = kit_for("cpu", "auto")
    model = build_model(files.config, Build(files.source, kit, torch.float32, torch.device("cpu")))
    strategy = Counted(partial(build_mtp, files.config), 3)
    bench = Bench(model, device_of(0), 0, SchedConfig(rows=4, step_tokens=64), strategy=strategy, kit=kit)
    for i in range(3):
        bench.add(i, [7 * i + 1, 3 * i + 5], 41)
    bench.run()
    assert strategy.accepted / strategy.verified > 2.7, "a whole chain of three drafts is accepted in each step"


def test_a_model_without_a_module_is_refused_in_one_sentence(tmp_path: Path) -> None:
    def strip(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(f"model.layers.{LAYER}.")]:
            del tensors[name]

    folder = edited(tmp_path, strip)
    tokenizer = (None, None)
    for path in (folder, folder_of("llama")):
        with pytest.raises(ConfigError, match=r"multi-token-prediction module \(deepseek_v3\).* do not contain one"):
            load(
                str(path),
                RunConfig(device="cpu", speculative="mtp"),
                SchedConfig(),
                StateConfig(),
                text=tokenizer,  # type: ignore[arg-type]
            )


def test_a_damaged_module_is_refused_by_the_name_of_its_tensor(tmp_path: Path) -> None:
    def break_it(tensors: dict[str, Tensor]) -> None:
        tensors[f"model.layers.{LAYER}.enorm.weight"] = torch.ones(7)

    files = open_model(edited(tmp_path, break_it))
    model = build_model(files.config, Build(files.source, kit_for("cpu"), torch.float32, torch.device("cpu")))
    with pytest.raises(ModelError, match=r"model\.layers\.3\.enorm\.weight has shape \(7,\)"):
        Bench(model, device_of(0), 0, strategy=MultiTokenPrediction(partial(build_mtp, files.config)))


def test_without_the_option_the_module_is_not_loaded() -> None:
    files = open_model(folder_of("latent"))
    build_model(files.config, Build(files.source, kit_for("cpu"), torch.float32, torch.device("cpu")))
    unread = files.source.unread()
    assert unread and all(name.startswith(f"model.layers.{LAYER}.") for name in unread)
    config = json.loads((folder_of("latent") / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
