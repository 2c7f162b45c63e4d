"""What the service counts. Names follow vLLM's where it has one, under `bankfull:`; our own say how full the machine's
channels are.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from bankfull.serve.engine.backend import Backend
from bankfull.serve.engine.wire import Done, Facts, Load
from bankfull.serve.supervise import Supervisor
from bankfull.serve.telemetry.exposition import Family, Histogram, Value, write_families

PREFIX = "bankfull:"
VLLM_PREFIX = "vllm:"
WINDOW_SECONDS = 60.0
"""Over which achieved bytes and operations are averaged."""

_LATENCY = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_FIRST_TOKEN = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
_SAMPLES = (1, 2, 5, 10, 20, 50, 100)


class Metrics:
    """`model`: what the served model is called; its own name where that is None."""

    def __init__(
        self,
        model: str | None = None,
        *,
        vllm_names: bool = False,
        clock: Callable[[], float] = time.monotonic,
        supervisor: Supervisor | None = None,
    ) -> None:
        self._model, self._clock, self._supervisor = model, clock, supervisor
        self._marks: deque[tuple[float, Load]] = deque()
        gauge, counter = "gauge", "counter"
        # -- what vLLM's users know
        self.running = Value(gauge, "num_requests_running", "Requests that the engine works on.")
        self.waiting = Value(gauge, "num_requests_waiting", "Requests in the engine's queue.")
        self.cache_usage = Value(gauge, "kv_cache_usage_perc", "Pages of state in use; 1 is all of them.")
        self.prefix_queries = Value(counter, "prefix_cache_queries_total", "Prompt tokens looked for in the cache.")
        self.prefix_hits = Value(counter, "prefix_cache_hits_total", "Prompt tokens found in the cache.")
        self.preemptions = Value(counter, "num_preemptions_total", "Requests that gave up their pages for a while.")
        self.prompt_tokens = Value(counter, "prompt_tokens_total", "Prompt tokens of requests, cached ones included.")
        self.generation_tokens = Value(counter, "generation_tokens_total", "Tokens generated.")
        self.success = Value(counter, "request_success_total", "Samples that ended, and why.", ["finished_reason"])
        self.first_token = Histogram("time_to_first_token_seconds", "From a request to its first token.", _FIRST_TOKEN)
        self.between_tokens = Histogram("inter_token_latency_seconds", "Between two tokens.", _BETWEEN_TOKENS)
        self.latency = Histogram("e2e_request_latency_seconds", "From a request to its last token.", _LATENCY)
        self.queue_time = Histogram("request_queue_time_seconds", "In the engine's queue.", _LATENCY)
        self.prefill_time = Histogram("request_prefill_time_seconds", "From the queue to the first token.", _LATENCY)
        self.decode_time = Histogram("request_decode_time_seconds", "From the first token to the last.", _LATENCY)
        self.inference_time = Histogram("request_inference_time_seconds", "From the queue to the last token.", _LATENCY)
        self.request_prompt = Histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.request_generation = Histogram("request_generation_tokens", "Tokens that a request generated.", _TOKENS)
        self.request_samples = Histogram("request_params_n", "Samples that a request asked for.", _SAMPLES)
        self._known_to_vllm = self.families if vllm_names else []
        # -- our own
        self.http_requests = Value(
            counter, "http_requests_total", "Answers, by route and status.", ["method", "route", "status"]
        )
        self.failures = Value(counter, "request_failures_total", "Requests without an end of their own.", ["reason"])
        self.batch_prompt_tokens = Value(counter, "batch_prompt_tokens_total", "Those of batches among prompt_tokens.")
        self.batch_generation_tokens = Value(
            counter, "batch_generation_tokens_total", "Those of batches among generation_tokens."
        )
        self.batch_requests = Value(counter, "batch_requests_total", "Lines of batches with a result.", ["outcome"])
        self.ready = Value(gauge, "ready", "1 when the engine can take requests.")
        self.restarts = Value(counter, "engine_restarts_total", "Engine processes started in the place of another.")
        self.failed_loads = Value(counter, "engine_failed_loads_total", "Engine processes that ended while loading.")
        self.tasks_up = Value(gauge, "background_task_up", "1 while a background task is well.", ["task"])
        self.task_restarts = Value(
            counter, "background_task_restarts_total", "Failures of background tasks, which began again.", ["task"]
        )
        self.waiting_tokens = Value(gauge, "num_tokens_waiting", "Prompt tokens in the engine's queue.")
        kinds = ["step_kind"]
        self.steps = Value(counter, "engine_steps_total", "Steps of the engine.")
        self.busy = Value(counter, "engine_busy_seconds_total", "Seconds inside steps.", kinds)
        self.bytes_moved = Value(
            counter, "engine_bytes_moved_total", "Bytes that steps had to move (cost model).", kinds
        )
        self.flops = Value(counter, "engine_flops_total", "Operations that steps had to do (cost model).", kinds)
        self.achieved_bytes = Value(
            gauge, "achieved_bytes_per_second", "Bytes moved per second inside steps, lately.", kinds
        )
        self.achieved_flops = Value(
            gauge, "achieved_flops_per_second", "Operations per second inside steps, lately.", kinds
        )
        self.ceiling_bytes = Value(gauge, "ceiling_bytes_per_second", "What this machine's memory can give.")
        self.ceiling_flops = Value(gauge, "ceiling_flops_per_second", "What this machine can compute.")
        self.mbu = Value(gauge, "mbu_ratio", "Achieved bytes per second over the ceiling, lately.", kinds)
        self.mfu = Value(gauge, "mfu_ratio", "Achieved operations per second over the ceiling, lately.", kinds)
        self._needs = {
            self.ceiling_bytes: "read_bytes_per_s",
            self.mbu: "read_bytes_per_s",
            self.ceiling_flops: "flops",
            self.mfu: "flops",
        }

    @property
    def families(self) -> list[Family]:
        return [family for family in vars(self).values() if isinstance(family, Value | Histogram)]

    def sized(self, prompt_tokens: int, output_tokens: int, samples: int) -> None:
        """A request whose samples have all ended."""
        self.request_prompt.observe(prompt_tokens)
        self.request_generation.observe(output_tokens)
        self.request_samples.observe(samples)

    def waited(self, done: Done, seconds: float) -> None:
        """What became of a caller's time until all samples had ended. Online calls only: who looks after their
        latency must not see there the queues of work that nobody waits for."""
        self.latency.observe(seconds)
        queue = done.queue or 0.0
        self.queue_time.observe(queue)
        self.inference_time.observe(max(0.0, done.seconds - queue))
        if done.ttft is not None:
            self.prefill_time.observe(max(0.0, done.ttft - queue))
            self.decode_time.observe(max(0.0, done.seconds - done.ttft))

    def write(self, backend: Backend) -> str:
        """The page for Prometheus."""
        facts, load = backend.facts, backend.load
        self.ready.set(float(backend.ready))
        self.restarts.set(backend.restarts)
        self.failed_loads.set(backend.failed_loads)
        if self._supervisor is not None:
            for task, well in self._supervisor.up.items():
                self.tasks_up.set(float(well), task)
                self.task_restarts.set(self._supervisor.restarts[task], task)
        if load is not None:
            self._take(load, facts)
        ceilings = (facts.ceilings if facts is not None and load is not None else None) or {}
        # A ceiling that nobody has measured is left out, and what it would be compared with.
        shown = [family for family in self.families if family not in self._needs or self._needs[family] in ceilings]
        name = self._model if self._model is not None or facts is None else facts.name
        labels = {} if name is None else {"model_name": name}
        return write_families(shown, PREFIX, labels) + write_families(self._known_to_vllm, VLLM_PREFIX, labels)

    def _take(self, load: Load, facts: Facts | None) -> None:
        """The engine counts for itself: it starts again from 0 when it is restarted, as counters may."""
        self.running.set(load.running)
        self.waiting.set(load.waiting)
        self.waiting_tokens.set(load.waiting_tokens)
        self.cache_usage.set(load.pages_used / load.pages_total if load.pages_total else 0.0)
        for family, value in (
            (self.prefix_queries, load.prefix_queries),
            (self.prefix_hits, load.prefix_hits),
            (self.preemptions, load.preemptions),
            (self.steps, load.steps),
        ):
            family.set(value)
        ceilings = (facts.ceilings if facts is not None else None) or {}
        most_bytes, most_flops = ceilings.get("read_bytes_per_s", 0.0), ceilings.get("flops", 0.0)
        self.ceiling_bytes.set(most_bytes)
        self.ceiling_flops.set(most_flops)
        before = _work_of(self._mark(load))
        for kind, work in _work_of(load).items():
            self.busy.set(work.seconds, kind)
            self.bytes_moved.set(work.bytes, kind)
            self.flops.set(work.flops, kind)
            seconds = work.seconds - before[kind].seconds
            bytes_per_s = (work.bytes - before[kind].bytes) / seconds if seconds > 0 else 0.0
            flops_per_s = (work.flops - before[kind].flops) / seconds if seconds > 0 else 0.0
            self.achieved_bytes.set(bytes_per_s, kind)
            self.achieved_flops.set(flops_per_s, kind)
            self.mbu.set(bytes_per_s / most_bytes if most_bytes > 0 else 0.0, kind)
            self.mfu.set(flops_per_s / most_flops if most_flops > 0 else 0.0, kind)

    def _mark(self, load: Load) -> Load:
        """The load at the beginning of the window; a restarted engine begins a new one."""
        now = self._clock()
        if self._marks and load.busy < self._marks[-1][1].busy:
            self._marks.clear()
        self._marks.append((now, load))
        while len(self._marks) > 2 and self._marks[1][0] < now - WINDOW_SECONDS:
            self._marks.popleft()
        if len(self._marks) == 1:
            return _nothing
        return self._marks[0][1]


class Work(NamedTuple):
    seconds: float
    bytes: float
    flops: float


def _work_of(load: Load) -> dict[str, Work]:
    """By the kind of step: those that only decode are bound by memory, those that read prompts by arithmetic."""
    decode = Work(load.decode_busy, load.decode_bytes, load.decode_flops)
    rest = Work(load.busy - decode.seconds, load.bytes_moved - decode.bytes, load.flops - decode.flops)
    return {"decode": decode, "prompt": rest}


_nothing = Load(0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)
