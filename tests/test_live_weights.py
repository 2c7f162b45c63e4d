"""Weights that are written between two steps: what runs afterwards is the new model, and nothing of the old one."""

from __future__ import annotations

import asyncio
import hashlib
import json
import mmap
import shutil
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bankfull import LLM, AsyncEngine, SamplingParams
from bankfull.assembly import Assembled, assemble
from bankfull.config import RunConfig, SchedConfig, StateConfig
from bankfull.errors import ConfigError, ModelError
from bankfull.live_weights import stage_weights
from bankfull.ops import native
from bankfull.runtime.rows import Job
from bankfull.runtime.twins import UnlikeTwins, tensors_of, twins_of
from bankfull.state.disk import identity_of
from bankfull.state.prefix import Chain
from bankfull.types import Request
from bankfull.weights import store
from bankfull.weights.gguf.file import open_container
from bankfull.weights.locate import DEFAULT_MODEL, locate
from bankfull.weights.own_memory import make_own, pages_of_files, span_of
from bankfull.weights.source import open_model
from tests.kit import Bench, device_of, late_devices
from tests.test_tiers import answer, flush, made
from tests.tiny import folder_of, kit_of, model_of, speaking_folder, with_other_weights

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT = "The river runs at the full capacity of its channel"
OLD, NEW = 5, 9
"""Seeds of speaking folders."""
with_kernels = pytest.mark.skipif(native.status() is not None, reason="the kernels are not built")


@pytest.fixture(params=["cpu", "late"])
def depth(request: pytest.FixtureRequest) -> Iterator[str]:
    with late_devices() if request.param == "late" else nullcontext():
        yield request.param


def fresh(seed: int = OLD, **options: Any) -> LLM:
    return LLM(str(speaking_folder(seed)), **{"dtype": "float32", "memory": "8MiB", "page_tokens": 4, **options})


def said(llm: LLM, prompt: Any = PROMPT, params: SamplingParams = GREEDY) -> list[int]:
    [output] = llm.generate([prompt], params)
    return list(output.outputs[0].token_ids)


def cached(llm: LLM) -> int:
    [output] = llm.generate([PROMPT], GREEDY)
    return int(output.metrics.cached_tokens)


# -- the new weights are those that run


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activations": "bf16"},
        {"quantize": "int8,keep", "activations": "int8"},
        {"quantize": "int8:row", "activations": "token"},
        {"quantize": "llm.int8"},
        {"quantize": "int8,keep", "activations": "float"},
        {"kv_dtype": "int8"},
        {"providers": "torch"},
        {"providers": "torch", "dtype": "float64"},
        {"dtype": "bfloat16"},
        {"speculative": "lookahead"},
    ],
    ids=str,
)
def test_answers_after_a_write_are_those_of_an_engine_that_loaded_the_new_weights(options: dict[str, Any]) -> None:
    engine, wanted = fresh(**options), fresh(NEW, **options)
    before = said(engine)
    written = engine.write_weights(speaking_folder(NEW))
    assert said(engine) == said(wanted) != before
    assert (written.generation, engine.loaded.engine.generation) == (1, 1) and written.nbytes > 0


def assembled_of(folder: Path, **options: Any) -> Assembled:
    run = RunConfig(device="cpu", speculative="off", **{"dtype": "float32", **options})
    return assemble(open_model(folder), run, SchedConfig(rows=2), StateConfig(memory="4MiB", page_tokens=4))


def tokens_of(engine: Any, prompts: Sequence[Sequence[int]], count: int = 8) -> list[list[int]]:
    params = SamplingParams(temperature=0.0)
    for number, prompt in enumerate(prompts):
        name = (engine.totals.steps, number)
        engine.add(Request(name, tuple(prompt), len(prompt) + count, payload=Job(params, 0)))
    found: dict[Any, list[int]] = {}
    while engine.busy:
        for output in engine.step():
            found.setdefault(output.request, []).extend(output.tokens)
    return [found[name] for name in sorted(found)]


SHAPES = ("llama", "gemma", "shared", "latent", "experts", "mamba", "mamba2", "hybrid", "lightning", "delta", "s4")
PROMPTS = [[3, 14, 15, 9, 2, 6, 5, 35, 8], [27, 18, 28]]


@lru_cache
def others_of(shape: str) -> Path:
    import atexit
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="bankfull-others-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return with_other_weights(folder_of(shape), folder / shape)


def inside(tensor: Tensor, places: Sequence[Tensor]) -> bool:
    """Whether a tensor's bytes are among those of the others."""
    first, last = tensor.data_ptr(), tensor.data_ptr() + span_of(tensor)
    return any(place.data_ptr() <= first and last <= place.data_ptr() + span_of(place) for place in places)


@pytest.mark.parametrize("shape", (*SHAPES, "based", "sparse"))
def test_every_family_keeps_its_addresses_and_gets_the_new_numbers(shape: str) -> None:
    running, wanted = assembled_of(folder_of(shape)), assembled_of(others_of(shape))
    before = tokens_of(running.engine, PROMPTS)
    places = [tensor.data_ptr() for tensor in tensors_of(running.model)]
    stage_weights(running, others_of(shape)).write(restart=False)
    assert [tensor.data_ptr() for tensor in tensors_of(running.model)] == places
    for own, new in zip(tensors_of(running.model), tensors_of(wanted.model), strict=True):
        assert torch.equal(own, new)
    after = tokens_of(running.engine, PROMPTS)
    assert after == tokens_of(wanted.engine, PROMPTS) != before


@with_kernels
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{}, {"activations": "bf16"}], ids=str)
def test_the_walk_finds_every_weight_that_a_tape_names(shape: str, options: dict[str, Any]) -> None:
    running = assembled_of(folder_of(shape), **options)
    runner = running.engine.runner
    tape = getattr(runner.run_model, "tape", None)
    if tape is None:
        pytest.skip("this model runs without a tape")
    found = stage_weights(running, others_of(shape)).twins.tensors
    state = [runner.storage.frames, *runner.storage.slots]
    weights = [tensor for tensor in tape.fixed if tensor.numel() and not inside(tensor, state)]
    assert weights and all(inside(tensor, [pair.own for pair in found]) for tensor in weights)


def test_tensors_in_memory_are_written_like_files() -> None:
    tensors = load_file(speaking_folder(NEW) / "model.safetensors")
    engine = fresh()
    said(engine)
    engine.write_weights({name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()})
    assert said(engine) == said(fresh(NEW))
    assert engine.write_weights(speaking_folder()).generation == 2
    assert said(engine) == said(fresh())


# -- weights that lie in files


def swapped(into: Path) -> Path:
    """The default model with its first two layers in the places of each other."""
    path = locate(DEFAULT_MODEL)
    shutil.copyfile(path, into)
    tensors = open_container(path).tensors
    with into.open("r+b") as file, path.open("rb") as original:
        for name, info in tensors.items():
            if name.startswith("blk.0.") and tensors[name.replace("blk.0.", "blk.1.")].scheme == info.scheme:
                for source, target in ((name, name.replace("0", "1", 1)), (name.replace("0", "1", 1), name)):
                    original.seek(tensors[source].offset)
                    file.seek(tensors[target].offset)
                    file.write(original.read(info.nbytes))
    return into


@with_kernels
def test_a_mapped_default_model_is_written_and_its_files_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, other = locate(DEFAULT_MODEL), swapped(tmp_path / "other.gguf")
    monkeypatch.setenv("BANKFULL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "PATIENCE_SECONDS", 0)
    monkeypatch.setattr(store, "_in_large_pages", lambda mapped: True)
    options: dict[str, Any] = {"memory": "64MiB", "max_model_len": 256, "speculative": "off"}

    def until_kept() -> None:
        for thread in threading.enumerate():
            if thread.name == "bankfull-store":
                thread.join()

    wanted = said(LLM(str(other), **options))
    first = said(LLM(str(model), **options))
    until_kept()
    digests = {path: hashlib.sha256(path.read_bytes()).digest() for path in (tmp_path / "cache").rglob("*.weights")}
    files = {path: hashlib.sha256(path.read_bytes()).digest() for path in (model, other)}
    assert digests and first != wanted
    engine = LLM(str(model), **options)
    if not pages_of_files(tensors_of(engine.loaded.model)):
        pytest.skip("this system maps nothing")
    assert said(engine) == first
    written = engine.write_weights(other)
    assert said(engine) == wanted
    engine.write_weights(model)
    assert said(engine) == first
    again = engine.write_weights(other)
    assert said(engine) == wanted
    assert said(LLM(str(model), **options)) == first
    until_kept()
    for path, digest in (digests | files).items():
        assert hashlib.sha256(path.read_bytes()).digest() == digest
    pairs = [(torch.empty_like(tensor), tensor) for tensor in tensors_of(engine.loaded.model)]
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        for target, source in pairs:
            target.copy_(source)
        seconds.append(time.perf_counter() - begun)
    with capsys.disabled():
        print(
            f"\n{again.nbytes / 1e6:.0f} MB: paused for {1e3 * written.paused_seconds:.1f} and "
            f"{1e3 * again.paused_seconds:.1f} ms, a plain copy takes {1e3 * min(seconds):.1f} ms; staged in "
            f"{again.staged_seconds:.2f} s"
        )


def test_mapped_pages_become_memory_of_the_process(tmp_path: Path) -> None:
    content = torch.arange(3 * mmap.PAGESIZE, dtype=torch.int64).to(torch.uint8)
    file = tmp_path / "numbers"
    file.write_bytes(content.numpy().tobytes())
    with file.open("rb") as handle:
        mapped = [mmap.mmap(handle.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the memory is not writable
        whole, neighbour = (torch.frombuffer(one, dtype=torch.uint8) for one in mapped)
    part = whole[mmap.PAGESIZE + 100 : mmap.PAGESIZE + 200]
    if not (pages := pages_of_files([part])):
        pytest.skip("this system does not tell what is mapped")
    assert pages == [(whole.data_ptr() + mmap.PAGESIZE, whole.data_ptr() + 2 * mmap.PAGESIZE)]
    make_own(pages)
    assert torch.equal(whole, content) and not pages_of_files([part])
    part.fill_(7)
    assert torch.equal(neighbour, content) and file.read_bytes() == content.numpy().tobytes()
    assert whole[mmap.PAGESIZE + 99] == content[mmap.PAGESIZE + 99] and whole[mmap.PAGESIZE + 100] == 7


def test_layouts_that_are_not_written_yet_are_not_kept_after_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "LEAST_BYTES", 0)
    monkeypatch.setattr(store, "PATIENCE_SECONDS", 0.3)
    made = store.PreparedWeights(tmp_path, "model", lambda: "0" * 32, 1 << 30)
    made.layout("a", 64, lambda size: torch.zeros(size, dtype=torch.uint8), lambda data: None)
    thread = made.keep()
    assert thread is not None
    store.give_up_writing()
    thread.join()
    assert not list(tmp_path.iterdir()) and not store._unwritten


# -- what cannot be written


def changed(tmp_path: Path, **config: Any) -> Path:
    folder = tmp_path / "changed"
    shutil.copytree(speaking_folder(NEW), folder)
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**about, **config}))
    return folder


def tensors() -> dict[str, Tensor]:
    return load_file(speaking_folder(NEW) / "model.safetensors")


def test_other_tensors_are_refused_by_name(tmp_path: Path) -> None:
    engine, norm = fresh(), "model.norm.weight"
    before = said(engine)
    less = {name: tensor for name, tensor in tensors().items() if name != norm}
    with pytest.raises(
        ConfigError, match=rf"the given tensors cannot .* it lacks the tensor {norm}; start a new engine"
    ):
        engine.write_weights(less)
    with pytest.raises(ConfigError, match=r"it has the tensor model\.more, which they lack; start a new engine"):
        engine.write_weights({**tensors(), "model.more": torch.zeros(2)})
    with pytest.raises(ConfigError, match=rf"its tensor {norm} has the shape \[31\] instead of \[32\]; start"):
        engine.write_weights({**tensors(), norm: torch.zeros(31)})
    with pytest.raises(ConfigError, match=rf"its tensor {norm} has the scheme bf16 instead of f32; start"):
        engine.write_weights({**tensors(), norm: torch.zeros(32, dtype=torch.bfloat16)})
    with pytest.raises(ModelError, match=r"weights are given as tensors by name, not int as 'model\.norm"):
        engine.write_weights({**tensors(), norm: 3})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"it has the tensor lm_head.weight, which they lack"):
        engine.write_weights(folder_of("llama"))
    assert said(engine) == before and engine.loaded.engine.generation == 0


def test_numbers_of_the_configuration_that_differ_are_refused(tmp_path: Path) -> None:
    engine = fresh()
    with pytest.raises(
        ConfigError, match=r"changed cannot take .*\.eps is 1e-06 .* and 0\.001 in the other; start a new"
    ):
        engine.write_weights(changed(tmp_path, rms_norm_eps=1e-3))


def test_a_second_copy_that_does_not_fit_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fresh()
    monkeypatch.setattr(engine.loaded.device, "free_memory", lambda: 1000)
    with pytest.raises(
        ConfigError, match=r"A second copy of the weights takes .* KiB until .*, and 1000 B are free on"
    ):
        engine.write_weights(speaking_folder(NEW))


def test_ranks_are_refused() -> None:
    engine = fresh()
    engine.loaded.run = RunConfig(parallel="tp=2")
    with pytest.raises(ConfigError, match=r"write_weights replaces the weights of an engine with one rank, .* tp=2"):
        engine.write_weights(speaking_folder(NEW))


class Layer:
    def __init__(self, weight: Tensor, scale: float = 1.0) -> None:
        self.weight, self.scale, self.turned = weight, scale, weight.T
        self.run = lambda x: x * scale + weight
        self.spread = weight[:1, :1].expand(4, 4)


def test_the_walk_pairs_what_closures_hold_and_copies_no_byte_twice() -> None:
    own, new = Layer(torch.zeros(4, 3)), Layer(torch.ones(4, 3))
    twins = twins_of(own, new)
    twins.commit()
    assert torch.equal(own.run(torch.zeros(4, 3)), torch.ones(4, 3)) and own.spread[3, 3] == 1
    assert torch.equal(own.turned, torch.ones(3, 4))
    assert [pair.own.data_ptr() for pair in twins.tensors].count(own.weight.data_ptr()) <= 3
    with pytest.raises(UnlikeTwins, match=r"scale is 1\.0 in the running model and 2\.0 in the other"):
        twins_of(own, Layer(torch.ones(4, 3), 2.0))
    tied, apart = torch.zeros(3), [torch.ones(3), torch.zeros(3)]
    with pytest.raises(UnlikeTwins, match="are one in the running model and two in the other"):
        twins_of([tied, tied], apart)
    with pytest.raises(UnlikeTwins, match=r"\[3\] of float32 on cpu in the running model and \[3\] of float64"):
        twins_of([tied], [torch.zeros(3, dtype=torch.float64)])


# -- state of the old weights


def test_no_prefix_of_the_old_weights_is_found(depth: str) -> None:
    engine = fresh()
    first = said(engine)
    assert cached(engine) > 0
    engine.write_weights(speaking_folder(NEW))
    assert cached(engine) == 0
    assert cached(engine) > 0 and said(engine) == said(fresh(NEW))
    engine.write_weights(speaking_folder())
    assert cached(engine) == 0 and said(engine) == first, "equal weights again are another generation"


def streamed(engine: LLM, count: int, restart: bool) -> tuple[list[int], list[int]]:
    """The tokens of a stream before and after a write in its midst."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    stream, before, after = engine.stream(PROMPT, params), list[int](), list[int]()
    for delta in stream:
        before += delta.token_ids
        if len(before) >= count:
            break
    engine.write_weights(speaking_folder(NEW), restart=restart)
    for delta in stream:
        after += delta.token_ids
    assert len(before) + len(after) == 40
    return before, after


def test_a_stream_that_is_computed_anew_goes_on_as_the_new_model_would(depth: str) -> None:
    engine, wanted = fresh(), fresh(NEW)
    before, after = streamed(engine, 10, restart=True)
    prompt = engine.tokenizer.encode(PROMPT)
    goes_on = []
    for old in range(3):  # tokens that were in flight
        ids = [*prompt, *before, *after[:old]]
        params = SamplingParams(temperature=0.0, max_tokens=len(after) - old, ignore_eos=True)
        goes_on.append(said(wanted, ids, params) == after[old:])
    assert any(goes_on[: 1 if depth == "cpu" else 3])


def test_a_stream_that_keeps_its_state_leaves_nothing_in_the_cache(depth: str) -> None:
    engine = fresh()
    streamed(engine, 10, restart=False)
    state = engine.loaded.engine.scheduler.state
    assert state.pages.census().cached == 0
    state.check()
    assert cached(engine) == 0 and said(engine) == said(fresh(NEW))


def test_a_preempted_stream_of_two_generations_is_computed_anew() -> None:
    engine = fresh()
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    stream, before = engine.stream(PROMPT, params), list[int]()
    for delta in stream:
        before += delta.token_ids
        if len(before) >= 10:
            break
    engine.write_weights(speaking_folder(NEW))
    scheduler = engine.loaded.engine.scheduler
    scheduler._preempt(scheduler._running[0])
    after = [token for delta in stream for token in delta.token_ids]
    params = SamplingParams(temperature=0.0, max_tokens=len(after), ignore_eos=True)
    assert after == said(fresh(NEW), [*engine.tokenizer.encode(PROMPT), *before], params)


def test_samples_that_fork_from_a_mixed_prompt_publish_nothing() -> None:
    engine = fresh(step_tokens=8)
    front, params = engine.loaded.frontend, SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=9, ignore_eos=True)
    name = front.submit(PROMPT, params)
    front.step()
    engine.write_weights(speaking_folder(NEW))
    while front.engine.busy:
        front.step()
    assert len(front.take(name).outputs) == 3
    assert front.engine.scheduler.state.pages.census().cached == 0 and cached(engine) == 0


@pytest.mark.parametrize("restart", [False, True])
def test_streams_of_an_asyncio_engine_go_on(depth: str, restart: bool) -> None:
    engine = AsyncEngine(fresh())
    params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)

    async def stream(prompt: str) -> int:
        return sum([len(delta.token_ids) async for delta in engine.generate(prompt, params)])

    async def run() -> tuple[list[int], int, list[int]]:
        streams = [asyncio.ensure_future(stream(f"{PROMPT} {i}")) for i in range(3)]
        await asyncio.sleep(0.02)
        written = [await engine.write_weights(speaking_folder(seed), restart=restart) for seed in (NEW, OLD, NEW)]
        counts = await asyncio.gather(*streams)
        after = [token async for delta in engine.generate(PROMPT, GREEDY) for token in delta.token_ids]
        return counts, written[-1].generation, after

    counts, generation, after = asyncio.run(run())
    engine.close()
    assert counts == [150] * 3 and generation == 3 and after == said(fresh(NEW))
    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(engine.write_weights(speaking_folder()))


def test_the_disk_keeps_old_state_for_old_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = made(tmp_path)
    old = answer(first)[0]
    state, engine = first.loaded.engine.scheduler.state, first.loaded.engine
    while engine.busy:  # write-behind
        engine.step()
    facts = identity_of(state.facts.all())
    with caplog.at_level("INFO", "bankfull"):
        first.write_weights(speaking_folder(NEW))
    assert [record for record in caplog.records if "computed with the weights of before" in record.message]
    assert identity_of(state.facts.all()) != facts, "engines that hand each other state differ in the weights"
    new = answer(first)
    assert new == (
        said(
            fresh(NEW),
            {"prompt_token_ids": list(range(3, 43))},
            SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True),
        ),
        0,
    )
    flush(first)
    again = made(tmp_path)
    assert answer(again) == (old, 36)
    again.write_weights(speaking_folder(NEW))
    assert answer(again) == (new[0], 36), "the same generation of the same weights"
    again.write_weights(speaking_folder(NEW))
    assert answer(again) == (new[0], 0), "another generation"
    flush(again)


@pytest.mark.parametrize("tiers", ["host", "disk", "both"])
@pytest.mark.parametrize("shape", ["llama", "mamba", "hybrid"])
def test_nothing_below_the_device_is_fetched_after_a_write(shape: str, tiers: str) -> None:
    bench = Bench(
        model_of(shape),
        device_of(0),
        0,
        SchedConfig(rows=2, step_tokens=16),
        StateConfig(page_tokens=4),
        tiers=tiers,
        kit=kit_of(shape),
    )
    prompt = list(range(3, 40))
    for name in ("first", "again"):
        bench.add(name, prompt, 4)
        bench.run()
    assert bench.cached["again"] > 0
    bench.engine.change_weights(lambda: None, "others", False)
    bench.manager.check()
    for name in ("new", "found"):
        bench.add(name, prompt, 4)
        bench.run()
    assert bench.cached["new"] == 0 and bench.cached["found"] > 0
    bench.close()


def test_a_draft_model_may_lag_behind() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    engine = fresh(speculative=f"draft:{speaking_folder()}")
    said(engine, params=params)
    engine.write_weights(speaking_folder(NEW))
    assert said(engine, params=params) == said(fresh(NEW), params=params)


def test_engines_find_each_others_state_only_with_the_same_weights_in_the_same_generation() -> None:
    shape = SchedConfig(rows=2, step_tokens=16), StateConfig(page_tokens=4)
    first, second = (Bench(model_of("llama"), device_of(0), 0, *shape).manager for _ in range(2))

    def keys() -> list[bytes]:
        return [manager.chain(b"salt").names[0] for manager in (first, second)]

    usual = keys()
    assert usual[0] == usual[1] == Chain(b"salt", 4).names[0], "as long as nothing was written"
    first.begin_generation("a")
    assert keys()[0] != keys()[1] and identity_of(first.facts.all()) != identity_of(second.facts.all())
    second.begin_generation("b")
    assert len({*usual, *keys()}) == 3
    second.begin_generation("a")
    assert len({*usual, *keys()}) == 3
    first.begin_generation("a")
    assert keys()[0] == keys()[1] and identity_of(first.facts.all()) == identity_of(second.facts.all())
