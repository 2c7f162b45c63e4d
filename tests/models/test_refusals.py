"""A configuration that means something we do not compute is refused with its name; nothing in it is ever ignored."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from bankfull.combinations import refuse_uneven
from bankfull.errors import ConfigError, ModelError
from bankfull.models import registry
from bankfull.models.fields import ConfigFields
from bankfull.models.llama import build_llama
from bankfull.models.registry import Config, family_of, rank_config
from bankfull.models.unsupported import why_unsupported
from bankfull.ranks.mesh import MeshSpec
from bankfull.weights.source import open_model
from tests.models import cases_latent, cases_recurrent
from tests.models.cases import FAMILIES
from tests.models.oracle import build, ours, saved

UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"model_type": "falcon"}, "'falcon' is not supported: it belongs to the family of 'falcon_h1'"),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE scaling 'dynamic' is not supported"),
    ("llama", {"hidden_act": "xielu"}, "Activation 'xielu' is not supported"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ("llama", {"sliding_window": 8}, "sliding_window = 8"),
    ("llama", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "'chunked_attention'"),
    ("llama", {"rope_local_base_freq": 100.0}, "rope_local_base_freq = 100.0"),
    ("llama", {"num_key_value_heads": 4}, "6 attention heads, which 4 key heads"),
    ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000"),
    ("llama", {"hidden_size": "48"}, "hidden_size = '48'"),
    ("llama", {"rms_norm_eps": None}, "lacks 'rms_norm_eps'"),
    ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no'"),
    ("llama", {"rope_theta": 1.0}, "base over 1"),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, "needs 'factor'"),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "factor = '4'"),
    ("mistral", {"layer_types": ["full_attention"] * 3}, "'full_attention'"),
    ("smollm3", {"no_rope_layers": [1, 2, 1, 0]}, "no_rope_layers = 2"),
    ("smollm3", {"layer_types": ["sliding_attention"] * 4}, "sliding_window"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "layer_types = 'sliding_attention'"),
    ("qwen3", {"layer_types": ["full_attention"]}, "a list of 3 values"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0"),
    ("gemma3-text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
    ("gemma3", {"text_config": None}, "lacks 'text_config'"),
    ("phi3-long", {"attention_bias": True}, "attention_bias = True"),
    ("phi3-long", {"partial_rotary_factor": 1e9}, "partial_rotary_factor = 1000000000.0"),
    ("phi3-long", {"partial_rotary_factor": 1.0}, "long_factor = .*a list of 4 positive numbers"),
    ("opt", {"num_attention_heads": 5}, "hidden_size of 48, which is no multiple of its 5 heads"),
    ("mamba", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ("gpt2", {"num_attention_heads": 7}, "hidden size of 48, which is no multiple of its 7 heads"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention = True"),
    ("gpt-neox", {"num_attention_heads": 7}, "hidden_size of 48, which is no multiple of its 7 heads"),
    ("granite", {"residual_multiplier": 0}, "residual_multiplier = 0.0, but it must be from 1e-6"),
    ("granite", {"logits_scaling": 1e300}, "logits_scaling"),
    ("glm4", {"partial_rotary_factor": 2.0}, "partial_rotary_factor = 2.0"),
    ("olmo2", {"sliding_window": 5}, "sliding_window = 5"),
    ("hunyuan-v1-dense", {"rope_scaling": {"rope_type": "dynamic", "alpha": -1}}, "alpha = -1; only a positive number"),
    ("hunyuan-shared", {"cla_share_factor": 0}, "cla_share_factor = 0"),
    ("hunyuan-shared", {"norm_type": "layer"}, "norm_type = 'layer'"),
    *cases_latent.REFUSED,
    *cases_recurrent.REFUSED,
]


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("qwen3_5", "the family of 'qwen2', 'qwen2_moe', 'qwen3', 'qwen3_moe', 'qwen3_next', but computes differently"),
        ("glm4_moe", "the family of 'glm', 'glm4', but computes differently"),
        *(
            (kind, "an encoder, which generates no text")
            for kind in ("xlm-roberta", "bert", "modernbert", "nomic_bert")
        ),
        *((kind, "an encoder-decoder") for kind in ("t5", "mbart")),
        *((kind, "images or sound") for kind in ("qwen2_5_vl", "whisper", "llama4", "gemma3n")),
        *((kind, "choose another model") for kind in ("bloom", "gpt_bigcode", "toy", "", 7, None)),
        ("Qwen3", "if 'qwen3' is meant"),
    ],
)
def test_an_unknown_architecture_is_called_what_it_is_and_no_other_ones_neighbour(kind: Any, what: str) -> None:
    with pytest.raises(ModelError) as refused:
        family_of({"model_type": kind})
    said = str(refused.value)
    assert said.startswith(f"Architecture {kind!r} is not supported: ") and what in said and "nearest" not in said
    assert "docs/architectures.md" in said and said.endswith(".") and len(said) < 300


def test_no_supported_architecture_is_taken_for_something_else() -> None:
    for kind in registry.FAMILIES:
        rest = [one for one in registry.FAMILIES if one != kind]
        assert not re.search("encoder|images", why_unsupported(kind, rest))


def test_a_family_whose_split_nobody_has_said_runs_in_stages_and_refuses_tensor_ranks_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {"model_type": "toy", "num_hidden_layers": 2, "hidden_size": 8}
    assert rank_config(config, 1, 1, False) == config
    monkeypatch.setitem(registry.FAMILIES, "toy", "toy")
    monkeypatch.setitem(sys.modules, "bankfull.models.toy", SimpleNamespace(FAMILY=registry.Family(build_llama)))
    for layout in ("tp=2", "ffn=2"):
        with pytest.raises(ConfigError, match=r"Architecture 'toy' cannot be split .* use pp, or say in its Family"):
            refuse_uneven(MeshSpec.parse(layout), config)
    refuse_uneven(MeshSpec(pp=2), config)


@pytest.mark.few(36)
@pytest.mark.parametrize(("name", "change", "message"), UNSUPPORTED, ids=[f"{n}-{m[:30]}" for n, _, m in UNSUPPORTED])
def test_an_unsupported_value_is_refused_by_name(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ours(name, changes=change)


INERT = {
    "architectures",
    "dtype",
    "model_type",
    "transformers_version",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "attention_dropout",
    "dropout",
    "layerdrop",
    "embd_pdrop",
    "resid_pdrop",
    "initializer_range",
    "init_std",
    "eod_token_id",
    "attn_pdrop",
    "hidden_dropout",
    "classifier_dropout",
    # Attention is computed in float32 anyway, and the summary belongs to classifiers.
    "is_decoder",
    "reorder_and_upcast_attn",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "output_router_logits",
    "pretraining_tp",
    # Losses of training, and the block that the reference computes at once.
    "router_aux_loss_coef",
    "router_jitter_noise",
    "block_size",
    # How weights were first drawn, and which of two equal scans trains faster.
    "rescale_prenorm_residual",
    "time_step_floor",
    "time_step_init_scheme",
    "time_step_max",
    "time_step_min",
    "time_step_scale",
    "use_associative_scan",
    "use_mamba_kernels",
    "use_mambapy",
    # Tokens that training multiplies at once: the recurrence has no such border.
    "chunk_size",
    "mamba_chunk_size",
    "num_logits_to_keep",
    # Said again by another field that is read: the layers' types, the inner size, the scaling's own copy.
    "_sliding_window_pattern",
    "expand",
    "original_max_position_embeddings",
}
#: Fields that the reference ignores, too, because another one switches them off or the family does not have that part.
SWITCHED_OFF = {
    "qwen2": {"max_window_layers", "sliding_window"},
    "qwen2-moe": {"intermediate_size", "max_window_layers", "sliding_window"},
    "qwen3": {"max_window_layers", "sliding_window"},
    "opt": {"intermediate_size", "num_key_value_heads", "rope_scaling"},
    "mamba": {"rope_scaling"},
    "mamba2": {"rope_scaling", "time_step_rank"},
    "jamba": {"rope_scaling"},
    "granitemoehybrid": {"rope_scaling", "rope_theta"},
    "falcon-h1": {"mamba_expand"},
    "gpt2": {"rope_scaling"},
}


@pytest.mark.few(13)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_field_that_could_change_the_computation_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Watched(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            read.add(key)
            return super().get(key, default)

    def watch(self: ConfigFields, config: Config, defaults: Config) -> None:
        self._values = Watched({**defaults, **config})

    read: set[str] = set()
    monkeypatch.setattr(ConfigFields, "__init__", watch)
    config = open_model(saved(name).path).config
    ours(name)
    ignored = set(config.get("text_config", config)) - read - INERT - SWITCHED_OFF.get(name, set())
    assert not ignored


HOSTILE: tuple[Any, ...] = ("x", -1, 0, 1.5, 10**400, True, None, [], [0], {}, {"rope_type": []})


@pytest.mark.few(5)
@pytest.mark.parametrize("name", FAMILIES)
def test_no_value_of_any_field_gives_another_error_than_ours(name: str) -> None:
    files = open_model(saved(name).path)
    nested = "text_config" in files.config
    config = files.config["text_config"] if nested else files.config
    for field in config:
        for value in HOSTILE:
            change = {"text_config": config | {field: value}} if nested else {field: value}
            try:
                build(files, changes=change)
            except ModelError as error:
                assert len(str(error)) < 400


@pytest.mark.parametrize("name", ["llama-linear", "llama-llama3", "llama-yarn-tuned", "phi3-long", "gemma3-text"])
def test_no_value_of_any_scaling_field_gives_another_error_than_ours(name: str) -> None:
    files = open_model(saved(name).path)
    scaling = files.config["rope_scaling"]
    for field in scaling:
        for value in (*HOSTILE, 1e-300, 1e299):
            try:
                build(files, changes={"rope_scaling": scaling | {field: value}})
            except ModelError as error:
                assert field in str(error) or "RoPE" in str(error)


@pytest.fixture
def edited(tmp_path: Path) -> Any:
    """A model directory whose tensors a test may change."""

    def edit(name: str, change: Any) -> Any:
        source = saved(name).path
        tensors = load_file(source / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((source / "config.json").read_text())
        return open_model(tmp_path)

    return edit


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tensor_too_many_is_an_error_that_names_it(name: str, edited: Any) -> None:
    def add(tensors: dict[str, Any]) -> None:
        tensors["model.layers.0.mlp.secret.weight"] = next(iter(tensors.values())).clone()

    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp\.secret\.weight"):
        build(edited(name, add))


@pytest.mark.few(13)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_is_needed_in_its_own_shape(name: str, edited: Any) -> None:
    tensors = load_file(saved(name).path / "model.safetensors")
    derived = ("vision", "multi_modal", "slope_rate", "_decay")
    needed = [n for n in tensors if not any(part in n for part in derived)]
    for missing in needed[:: max(1, len(needed) // 6)]:
        with pytest.raises(ModelError, match=missing.replace(".", r"\.")):
            build(edited(name, lambda tensors, gone=missing: tensors.pop(gone)))

        def widen(tensors: dict[str, Any], name: str = missing) -> None:
            tensors[name] = tensors[name].repeat(2, *[1] * (tensors[name].dim() - 1))

        with pytest.raises(ModelError, match=missing.replace(".", r"\.") + " has shape"):
            build(edited(name, widen))


def test_copies_that_files_carry_along_are_no_error(edited: Any) -> None:
    def add(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = tensors["model.norm.weight"].clone()

    build(edited("llama-tied-biased", add))
