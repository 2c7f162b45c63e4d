"""From options to a model: what is rounded at load, and what is refused."""

from __future__ import annotations

import logging

import pytest
import torch

from bankfull import LLM, SamplingParams
from bankfull.errors import BankfullError, ConfigError
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.models.registry import build_model
from bankfull.ops import kit_for, native
from bankfull.runtime import naive
from bankfull.weights.formats import SCHEMES
from bankfull.weights.qtensor import QTensor
from bankfull.weights.quantize import quantize
from bankfull.weights.source import open_model
from tests.tiny import speaking_folder

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT = "The engine fills its channel"


def fresh(**options: object) -> LLM:
    return LLM(str(speaking_folder()), **{"dtype": "float32", "memory": "8MiB", **options})  # type: ignore[arg-type]


class Rounded:
    """The tiny model's own tensors; what `--quantize` rounds has been rounded, and is dense again."""

    def __init__(self, name: str) -> None:
        self.inner, self.type = open_model(speaking_folder()).source, name

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def get(self, name: str) -> QTensor:
        found = self.inner.get(name)
        if len(found.shape) != 2 or found.shape[1] % 32 or "embed" in name:
            return found
        return QTensor.dense(quantize(found.dequantize(), self.type).dequantize())


def model_over(source: object) -> Decoder:
    config = open_model(speaking_folder()).config
    return build_model(config, Build(source, kit_for("cpu", "torch"), torch.float32, CPU))  # type: ignore[arg-type]


@pytest.mark.parametrize("providers", ["auto", "torch"])
@pytest.mark.parametrize(("wanted", "stored"), [("int4", "int4_g32"), ("int8:128", "int8_g32"), ("q5_0,keep", "q5_0")])
def test_a_model_rounded_at_load_computes_with_the_rounded_numbers(wanted: str, stored: str, providers: str) -> None:
    llm = fresh(quantize=wanted, providers=providers)
    output = llm.generate(PROMPT, GREEDY)[0]
    expected, margins = naive.generate(model_over(Rounded(stored)), output.prompt_token_ids, 12, CPU)
    assert min(margins) > 1e-3 and output.outputs[0].token_ids == expected
    plain = fresh(providers=providers).generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    assert wanted != "int4" or plain != expected, "rounding to 4 bits changed nothing: the test proves nothing"
    layer = llm.loaded.model.blocks[0].mixer
    as_kernels_read_it = {"int4_g32": "q4_0", "int8_g32": "q8_0"}.get(stored, stored)
    assert layer.q.weight.scheme.name == (as_kernels_read_it if providers == "auto" else stored)  # type: ignore[attr-defined]
    assert llm.loaded.model.blocks[0].feed.down.weight.is_dense  # type: ignore[union-attr]


@pytest.mark.skipif(native.status() is not None, reason="the kernels are not built")
@pytest.mark.parametrize("wanted", ["int8", "int4:64"])
def test_the_kernels_run_group_formats_at_once(wanted: str) -> None:
    assert set(fresh(quantize=wanted).loaded.kit.chosen["linear"]) == {"native"}


def test_what_is_kept_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "bankfull"):
        fresh(quantize="int8")
        assert [r.message for r in caplog.records] == [
            "2 matrices are left unquantized: no group of int8 divides their columns."
        ]
        caplog.clear()
        fresh()
        assert not caplog.records


def test_tables_are_rounded_only_where_asked_for() -> None:
    kept, rounded = (fresh(quantize=wanted).loaded.model for wanted in ("int8", "int8,tables"))
    assert kept.head.project.weight.scheme == SCHEMES["f32"]
    assert rounded.head.project.weight.scheme == SCHEMES["q8_0"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"quantize": "int3"}, "'int3'"),
        ({"quantize": "int4:48"}, "int4:64"),
        ({"quantize": "tables"}, "names no type"),
        ({"quantize": 4}, "quantize=4"),
        ({"quantize": "q4_0"}, "48 columns"),
    ],
)
def test_a_bad_option_is_refused_in_one_sentence(options: dict[str, object], says: str) -> None:
    with pytest.raises(BankfullError) as caught:
        fresh(**options)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_quantized_file_is_not_quantized_again() -> None:
    with pytest.raises(ConfigError, match=r"is quantized already \(q4_1, q8_0\)"):
        LLM("smollm2", quantize="int8")
