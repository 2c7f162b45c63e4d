"""The offline API: what a caller sees of a request's whole life."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import transformers

from bankfull import LLM, SamplingParams
from bankfull.errors import BankfullError, ConfigError, RequestError
from bankfull.sample.params import StructuredOutput
from tests.kit import late_devices
from tests.tiny import speaking_folder

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
CHANCE = SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", params=["cpu", "late"], autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every promise holds with a device that answers at once, and with one that is a step behind (loop depth 1)."""
    with late_devices() if request.param == "late" else nullcontext():
        yield request.param


@pytest.fixture(scope="module")
def llm(device: str) -> LLM:
    return LLM(str(speaking_folder()), dtype="float32", memory="8MiB", rows=32)


@pytest.fixture(scope="module")
def oracle() -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(speaking_folder(), dtype=torch.float32)


def fresh(**options: object) -> LLM:
    return LLM(str(speaking_folder()), **{"dtype": "float32", "memory": "8MiB", "page_tokens": 4, **options})  # type: ignore[arg-type]


def test_a_prompt_is_a_text_a_list_of_ids_or_a_dict(llm: LLM) -> None:
    ids = llm.tokenizer.encode("The river")
    texts = [
        out.outputs[0].text
        for prompts in ("The river", ids, {"prompt_token_ids": ids}, {"prompt": "The river"}, ["The river"], [ids])
        for out in llm.generate(prompts, GREEDY)
    ]
    assert len(texts) == 6 and len(set(texts)) == 1 and texts[0]


def test_outputs_keep_the_order_of_prompts_and_their_own_params(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5)]
    outputs = llm.generate(["The", "river runs", "at"], params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [9, 1, 5]
    assert [o.prompt for o in outputs] == ["The", "river runs", "at"]
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)


def test_greedy_text_equals_transformers(llm: LLM, oracle: transformers.PreTrainedModel) -> None:
    ids = llm.tokenizer.encode("The engine fills its channel")
    expected = oracle.generate(torch.tensor([ids]), max_new_tokens=12, min_new_tokens=12, do_sample=False)[
        0, len(ids) :
    ]
    got = llm.generate(ids, SamplingParams(temperature=0.0, max_tokens=12, min_tokens=12))[0].outputs[0]
    assert got.token_ids == expected.tolist()


def test_the_same_seed_gives_the_same_tokens_alone_in_a_batch_preempted_and_warm() -> None:
    prompt = "The river runs at the full capacity of its channel"
    alone = fresh(prefix_cache=False).generate(prompt, CHANCE)[0].outputs[0].token_ids
    crowd = fresh(rows=32)
    others = [f"{i} engines fill it" for i in range(31)]
    both = crowd.generate([*others[:16], prompt, *others[16:]], CHANCE)
    assert both[16].outputs[0].token_ids == alone
    again = crowd.generate(prompt, CHANCE)[0]
    assert again.metrics.cached_tokens > 0, "the second time must find the prompt in the prefix cache"
    assert again.outputs[0].token_ids == alone
    # A pool so small that the sequences push each other out again and again.
    cramped = fresh(memory=str(12 * 4 * 2 * 2 * 2 * 8 * 4), max_model_len=40)
    tight = cramped.generate([prompt] + [prompt[: 20 + i] for i in range(5)], CHANCE)
    assert cramped.loaded.frontend.engine.scheduler.preemptions > 0, "nothing was preempted: the test proves nothing"
    assert tight[0].outputs[0].token_ids == alone


def test_samples_of_one_prompt_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=3, temperature=1.5, max_tokens=8, ignore_eos=True)
    first, second = (llm.generate("The river", params)[0] for _ in range(2))
    drawn = [tuple(o.token_ids) for o in first.outputs]
    assert len(set(drawn)) == 4 and [o.index for o in first.outputs] == [0, 1, 2, 3]
    assert drawn == [tuple(o.token_ids) for o in second.outputs]


def test_stop_strings_end_the_text_and_never_leak(llm: LLM) -> None:
    whole = llm.generate("The river", GREEDY)[0].outputs[0].text
    for cut in range(1, len(whole) - 1):
        stop = whole[cut : cut + 2]
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=stop)
        pieces = list(llm.stream("The river", params))
        text = "".join(p.text for p in pieces)
        assert text == whole[: whole.index(stop)], f"stop {stop!r}"
        assert pieces[-1].finish_reason == "stop" and pieces[-1].stop_reason == stop
        kept = (
            llm.generate(
                "The river",
                SamplingParams(
                    temperature=0.0, max_tokens=12, ignore_eos=True, stop=stop, include_stop_str_in_output=True
                ),
            )[0]
            .outputs[0]
            .text
        )
        assert kept == text + stop


def test_stop_tokens_end_the_text_without_showing(llm: LLM) -> None:
    tokens = llm.generate("The river", GREEDY)[0].outputs[0].token_ids
    target = tokens[5]
    first = tokens.index(target)
    out = llm.generate(
        "The river", SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=[target])
    )[0].outputs[0]
    assert out.token_ids == tokens[: first + 1] and out.finish_reason == "stop" and out.stop_reason == target
    assert out.text == llm.tokenizer.decode(tokens[:first])


def test_streamed_pieces_add_up_to_the_whole(llm: LLM) -> None:
    whole = llm.generate("The river", CHANCE)[0].outputs[0]
    pieces = list(llm.stream("The river", CHANCE))
    assert "".join(p.text for p in pieces) == whole.text
    assert [t for p in pieces for t in p.token_ids] == whole.token_ids
    assert [p.finish_reason for p in pieces[:-1]] == [None] * (len(pieces) - 1) and pieces[-1].finish_reason == "length"


def test_leaving_a_stream_frees_everything(llm: LLM) -> None:
    stream = llm.stream("The river", CHANCE)
    next(stream)
    stream.close()
    pages, _ = llm.loaded.frontend.engine.scheduler.state.census()
    assert not llm.loaded.frontend.engine.scheduler.unfinished and not llm.loaded.frontend.pending
    assert pages.held == 0


def test_logprobs_are_the_models_own(llm: LLM, oracle: transformers.PreTrainedModel) -> None:
    params = SamplingParams(
        temperature=0.3, top_k=3, seed=1, max_tokens=6, ignore_eos=True, logprobs=4, prompt_logprobs=2
    )
    out = llm.generate("The river runs", params)[0]
    ids = out.prompt_token_ids + out.outputs[0].token_ids
    with torch.no_grad():
        truth = oracle(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert out.prompt_logprobs is not None and out.prompt_logprobs[0] is None and out.outputs[0].logprobs is not None
    lines = out.prompt_logprobs + out.outputs[0].logprobs
    assert len(lines) == len(ids)
    for at, line in enumerate(lines[1:], 1):
        assert line is not None and ids[at] in line
        assert len(line) >= (2 if at < len(out.prompt_token_ids) else 4)
        for token, entry in line.items():
            assert math.isclose(entry.logprob, truth[at - 1, token].item(), abs_tol=1e-4)
    total = sum(line[t].logprob for t, line in zip(out.outputs[0].token_ids, out.outputs[0].logprobs, strict=True))
    assert math.isclose(out.outputs[0].cumulative_logprob or 0, total, abs_tol=1e-6)


@pytest.mark.parametrize("chunk", (5, 512))
def test_score_and_embed_equal_transformers(oracle: transformers.PreTrainedModel, chunk: int) -> None:
    llm = fresh(step_tokens=chunk)
    texts = ["The river runs at the full capacity of its channel", "engine"]
    for text, score, last, mean in zip(
        texts, llm.score(texts), llm.embed(texts, normalize=False), llm.embed(texts, pooling="mean"), strict=True
    ):
        ids = llm.tokenizer.encode(text)
        with torch.no_grad():
            out = oracle(torch.tensor([ids]), output_hidden_states=True)
        logprobs = out.logits[0].log_softmax(-1)
        expected = [logprobs[i, t].item() for i, t in enumerate(ids[1:])]
        assert score.logprobs == pytest.approx(expected, abs=1e-4)
        hidden = out.hidden_states[-1][0]
        assert last.embedding == pytest.approx(hidden[-1].tolist(), abs=1e-4)
        pooled = hidden.mean(0)
        assert mean.embedding == pytest.approx((pooled / pooled.norm()).tolist(), abs=1e-4)


def test_chat_uses_the_template_and_keeps_spelled_markers_as_text(llm: LLM) -> None:
    out = llm.chat([{"role": "user", "content": "<|im_end|> hi"}], GREEDY)[0]
    ids = out.prompt_token_ids
    marker = llm.tokenizer.encode("<|im_end|>")[0]
    assert ids.count(marker) == 1, "the user's spelling became a real end marker"
    assert llm.tokenizer.decode(ids, skip_special=False) == (
        "<|im_start|>user\n<|im_end|> hi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_structured_output_follows_its_schema(llm: LLM) -> None:
    fields = {"name": {"enum": ["river", "engine"]}, "n": {"type": "integer", "maximum": 99}}
    schema = {"type": "object", "properties": fields, "required": ["name", "n"], "additionalProperties": False}
    for seed in range(3):
        params = SamplingParams(seed=seed, max_tokens=150, structured=StructuredOutput(json=schema))
        out = llm.generate("Give JSON:", params)[0].outputs[0]
        assert out.finish_reason == "stop"
        value = json.loads(out.text)
        assert value["name"] in ("river", "engine") and value["n"] <= 99
    params = SamplingParams(n=3, seed=1, structured=StructuredOutput(choice=["yes", "no", "perhaps"]))
    assert {o.text for o in llm.generate("Sure?", params)[0].outputs} <= {"yes", "no", "perhaps"}


def test_a_hopeless_request_ends_with_an_error_and_the_others_go_on(llm: LLM) -> None:
    plain = llm.generate("The river", GREEDY)[0].outputs[0].text
    # Only the end token is allowed, and not yet.
    hopeless = SamplingParams(max_tokens=12, allowed_token_ids=sorted(llm.tokenizer.eos_ids), min_tokens=3)
    bad, good = llm.generate(["The", "The river"], [hopeless, GREEDY])
    assert bad.outputs[0].finish_reason == "error" and "relax" in (bad.outputs[0].error or "")
    assert good.outputs[0].text == plain


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        ("", GREEDY, "empty"),
        ([], GREEDY, "empty"),
        ([5, 10**6], GREEDY, "1000000"),
        ([5, -1], GREEDY, "-1"),
        ([5] * 300, GREEDY, "300"),
        ([5] * 250, SamplingParams(max_tokens=50), "max_tokens=50"),
        (3.5, GREEDY, "float"),
        ({"prompts": "x"}, GREEDY, "prompts"),
        ("a", SamplingParams(structured=StructuredOutput(regex="(")), "regex"),
        ("a", SamplingParams(structured=StructuredOutput(json="{")), "json"),
        ("a", SamplingParams(logit_bias={10**5: 1.0}), "100000"),
        ("a", SamplingParams(stop_token_ids=[10**5]), "100000"),
    ],
)
def test_a_bad_request_is_refused_in_one_sentence_and_leaves_nothing(
    llm: LLM, prompt: object, params: SamplingParams, says: str
) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate([prompt], params) if not isinstance(prompt, str) else llm.generate(prompt, params)  # type: ignore[list-item]
    message = str(caught.value)
    assert says in message and "\n" not in message and len(message) < 400
    assert isinstance(caught.value, ValueError)
    assert not llm.loaded.frontend.pending and not llm.loaded.frontend.engine.busy
    assert llm.generate("The river", GREEDY)[0].finished


def test_one_bad_prompt_among_many_is_named_and_nothing_runs(llm: LLM) -> None:
    with pytest.raises(RequestError, match="Prompt 1"):
        llm.generate(["fine", "", "fine too"], GREEDY)
    assert not llm.loaded.frontend.engine.busy


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "tpu"}, "tpu"),
        ({"device": "cuda:7"}, "cuda:7"),
        ({"dtype": "int4"}, "int4"),
        ({"memory": "lots"}, "lots"),
        ({"memory": -1}, "-1"),
        ({"memory": "900000GiB"}, "free"),
        ({"memory": 100}, "budget"),
        ({"rows": 0}, "rows"),
        ({"policy": "random"}, "random"),
        ({"max_model_len": 10**6}, "256"),
        ({"wat": 1}, "wat"),
        ({"depth": 5}, "depth"),
        ({"block_size": 8}, "page_tokens"),
    ],
)
def test_a_bad_option_is_refused_in_one_sentence(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fresh(**options)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_familiar_names_are_accepted() -> None:
    llm = LLM(
        str(speaking_folder()),
        max_num_seqs=3,
        max_num_batched_tokens=33,
        block_size=8,
        enable_prefix_caching=False,
        max_model_len=64,
    )
    scheduler = llm.loaded.frontend.engine.scheduler
    assert (scheduler.config.rows, scheduler.config.step_tokens) == (3, 33)
    assert llm.max_model_len == 64 and not scheduler.state.prefix_cache


def test_familiar_options_that_change_nothing_are_accepted_and_others_are_not() -> None:
    fresh(tensor_parallel_size=1, trust_remote_code=False, enable_chunked_prefill=True, quantization=None)
    for option in ({"data_parallel_size": 2}, {"trust_remote_code": True}, {"quantization": "awq"}):
        with pytest.raises(ConfigError, match=next(iter(option))):
            fresh(**option)


def test_a_seeded_engine_repeats_requests_without_a_seed() -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    drawn = [[o.outputs[0].token_ids for o in fresh(seed=s).generate(["The", "The"], params)] for s in (5, 5, 6)]
    assert drawn[0] == drawn[1] != drawn[2] and drawn[0][0] != drawn[0][1]


def test_progress_is_told_request_by_request(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[object] = []
    outputs = llm.generate(["The", "river"], GREEDY, use_tqdm=True, progress=lambda done: seen.append(done.request_id))
    assert sorted(map(str, seen)) == sorted(str(o.request_id) for o in outputs)
    assert "requests" in capfd.readouterr().err


def test_a_model_without_a_template_says_so(tmp_path: object) -> None:
    import shutil
    from pathlib import Path

    folder = Path(str(tmp_path)) / "mute"
    shutil.copytree(speaking_folder(), folder)
    for name in ("chat_template.jinja",):
        (folder / name).unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(BankfullError, match="chat template"):
        LLM(str(folder), memory="8MiB").chat([{"role": "user", "content": "hi"}])


def test_metrics_tell_queue_first_token_and_cache() -> None:
    llm = fresh(rows=1)
    prompt = "The river runs at the full capacity of its channel, and the engine fills it."
    first, second = llm.generate([prompt, prompt], GREEDY)
    assert first.metrics.cached_tokens == 0
    shared = (len(first.prompt_token_ids) - 1) // 4 * 4
    assert second.metrics.cached_tokens == shared > 0
    for output in (first, second):
        m = output.metrics
        assert m.queue is not None and m.ttft is not None and m.finished is not None and m.per_token is not None
        assert 0 <= m.queue <= m.ttft <= m.finished and m.output_tokens == 12
    assert (second.metrics.queue or 0) >= (first.metrics.finished or 0) * 0.5, "one row: the second had to wait"


def test_static_and_dynamic_batches_give_the_same_texts() -> None:
    prompts = ["The", "river runs", "at the full", "capacity", "of"]
    expected = [o.outputs[0].text for o in fresh().generate(prompts, GREEDY)]
    for options in (
        {"batching": "static", "batch_size": 2},
        {"batching": "dynamic", "batch_size": 4, "batch_timeout": 0.01},
    ):
        assert [o.outputs[0].text for o in fresh(**options).generate(prompts, GREEDY)] == expected


def test_weights_can_be_expanded_on_request_only() -> None:
    text = fresh().generate("The river", GREEDY)[0].outputs[0].text
    assert fresh(expand=True).generate("The river", GREEDY)[0].outputs[0].text == text
