"""The metrics of the service. Names follow vLLM's where it has them, under the prefix `bankfull:`; the others show how
close the machine is to its limits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bankfull.fleet.attainment import SloMeter
from bankfull.serve.engine.backend import Backend
from bankfull.serve.engine.wire import Facts, Load, RequestDone
from bankfull.serve.replicas.view import ReplicaView
from bankfull.serve.supervise import Supervisor
from bankfull.serve.telemetry.exposition import Family, Histogram, ScalarMetric, write_families
from bankfull.serve.telemetry.families import pin_families, replica_families, tier_families

PREFIX = "bankfull:"
VLLM_PREFIX = "vllm:"
WINDOW_SECONDS = 60.0
"""Seconds over which achieved bytes and operations are averaged."""

_LATENCY = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_FIRST_TOKEN = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
_SAMPLES = (1, 2, 5, 10, 20, 50, 100)


class ServiceMetrics:
    """`model` is the served name of the model; None uses the name that the engine reports."""

    def __init__(
        self,
        model: str | None = None,
        *,
        vllm_names: bool = False,
        clock: Callable[[], float] = time.monotonic,
        supervisor: Supervisor | None = None,
        replicas: Callable[[], Sequence[ReplicaView]] | None = None,
        slo: SloMeter | None = None,
    ) -> None:
        self.slo = slo
        """Counts requests that meet the latency objectives; None without objectives."""
        self.more: list[Callable[[], list[ScalarMetric]]] = []
        """Families of other parts of the service, made anew for each response."""
        self._model, self._clock, self._supervisor = model, clock, supervisor
        self._replicas = replicas
        self._marks: deque[tuple[float, Load]] = deque()
        gauge, counter = "gauge", "counter"
        # -- metrics that vLLM has too
        self.running = ScalarMetric(gauge, "num_requests_running", "Requests that are running in the engine.")
        self.waiting = ScalarMetric(gauge, "num_requests_waiting", "Requests waiting in the engine's queue.")
        self.cache_usage = ScalarMetric(gauge, "kv_cache_usage_perc", "Fraction of KV cache pages in use; 1 means all.")
        self.prefix_queries = ScalarMetric(
            counter, "prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."
        )
        self.prefix_hits = ScalarMetric(counter, "prefix_cache_hits_total", "Prompt tokens found in the prefix cache.")
        self.preemptions = ScalarMetric(counter, "num_preemptions_total", "Requests that were preempted.")
        self.drafts = ScalarMetric(
            counter, "spec_decode_num_drafts_total", "Draft chains or trees verified, one per sequence and step."
        )
        self.draft_tokens = ScalarMetric(counter, "spec_decode_num_draft_tokens_total", "Draft tokens verified.")
        self.accepted_tokens = ScalarMetric(counter, "spec_decode_num_accepted_tokens_total", "Draft tokens accepted.")
        self.accepted_at = ScalarMetric(
            counter,
            "spec_decode_num_accepted_tokens_per_pos_total",
            "Draft tokens accepted, by position from 0.",
            ["position"],
        )
        self.prompt_tokens = ScalarMetric(
            counter, "prompt_tokens_total", "Prompt tokens processed, including cached ones."
        )
        self.generation_tokens = ScalarMetric(counter, "generation_tokens_total", "Tokens generated.")
        self.success = ScalarMetric(
            counter, "request_success_total", "Finished samples by finish reason.", ["finished_reason"]
        )
        self.first_token = Histogram(
            "time_to_first_token_seconds", "Time from the arrival of a request to its first token.", _FIRST_TOKEN
        )
        self.between_tokens = Histogram(
            "inter_token_latency_seconds", "Time between two consecutive steps with tokens.", _BETWEEN_TOKENS
        )
        self.latency = Histogram(
            "e2e_request_latency_seconds", "Time from the arrival of a request to its last token.", _LATENCY
        )
        self.queue_time = Histogram(
            "request_queue_time_seconds", "Time that a request spends in the engine's queue.", _LATENCY
        )
        self.prefill_time = Histogram(
            "request_prefill_time_seconds", "Time from leaving the queue to the first token.", _LATENCY
        )
        self.decode_time = Histogram("request_decode_time_seconds", "Time from the first token to the last.", _LATENCY)
        self.inference_time = Histogram(
            "request_inference_time_seconds", "Time from leaving the queue to the last token.", _LATENCY
        )
        self.request_prompt = Histogram("request_prompt_tokens", "Prompt tokens per request.", _TOKENS)
        self.request_generation = Histogram("request_generation_tokens", "Generated tokens per request.", _TOKENS)
        self.request_samples = Histogram("request_params_n", "Samples per request (`n`).", _SAMPLES)
        self._vllm_families = self.families if vllm_names else []
        # -- further metrics
        self.draft_width = ScalarMetric(
            gauge,
            "spec_decode_width",
            "Draft tokens per sequence and step over the last minute; 0 while none are verified.",
        )
        self.acceptance_length = ScalarMetric(
            gauge,
            "spec_decode_mean_acceptance_length",
            "Tokens per verification over the last minute: accepted drafts and the sampled token.",
        )
        self.http_requests = ScalarMetric(
            counter, "http_requests_total", "HTTP responses by method, route and status.", ["method", "route", "status"]
        )
        self.failures = ScalarMetric(
            counter, "request_failures_total", "Requests that did not finish, by reason.", ["reason"]
        )
        self.batch_prompt_tokens = ScalarMetric(
            counter, "batch_prompt_tokens_total", "Prompt tokens of batches; also counted in prompt_tokens."
        )
        self.batch_generation_tokens = ScalarMetric(
            counter, "batch_generation_tokens_total", "Generated tokens of batches; also counted in generation_tokens."
        )
        self.batch_requests = ScalarMetric(
            counter, "batch_requests_total", "Batch lines with a result, by outcome.", ["outcome"]
        )
        self.slo_requests = ScalarMetric(
            counter, "slo_requests_total", "Online requests that met or missed the objectives of --slo.", ["outcome"]
        )
        self.ready = ScalarMetric(gauge, "ready", "1 if the engine accepts requests.")
        self.restarts = ScalarMetric(counter, "engine_restarts_total", "Restarts of the engine process.")
        self.failed_loads = ScalarMetric(
            counter, "engine_failed_loads_total", "Engine processes that exited while loading the model."
        )
        self.tasks_up = ScalarMetric(gauge, "background_task_up", "1 while a background task is healthy.", ["task"])
        self.task_restarts = ScalarMetric(
            counter, "background_task_restarts_total", "Restarts of background tasks after a failure.", ["task"]
        )
        self.waiting_tokens = ScalarMetric(gauge, "num_tokens_waiting", "Prompt tokens waiting in the engine's queue.")
        kinds = ["step_kind"]
        self.steps = ScalarMetric(counter, "engine_steps_total", "Steps that the engine has run.")
        self.busy = ScalarMetric(
            counter, "engine_busy_seconds_total", "Seconds that the engine has spent in steps.", kinds
        )
        self.bytes_moved = ScalarMetric(
            counter, "engine_bytes_moved_total", "Bytes that steps had to move, from the cost model.", kinds
        )
        self.flops = ScalarMetric(
            counter, "engine_flops_total", "Floating-point operations of steps, from the cost model.", kinds
        )
        self.achieved_bytes = ScalarMetric(
            gauge, "achieved_bytes_per_second", "Bytes moved per second of step time over the last minute.", kinds
        )
        self.achieved_flops = ScalarMetric(
            gauge, "achieved_flops_per_second", "Operations per second of step time over the last minute.", kinds
        )
        self.ceiling_bytes = ScalarMetric(
            gauge, "ceiling_bytes_per_second", "Measured memory bandwidth of this machine."
        )
        self.ceiling_flops = ScalarMetric(
            gauge, "ceiling_flops_per_second", "Measured peak compute rate of this machine."
        )
        self.mbu = ScalarMetric(
            gauge, "mbu_ratio", "Achieved bandwidth divided by the ceiling, over the last minute.", kinds
        )
        self.mfu = ScalarMetric(
            gauge, "mfu_ratio", "Achieved compute rate divided by the ceiling, over the last minute.", kinds
        )
        self._needs = {
            self.ceiling_bytes: "read_bytes_per_s",
            self.mbu: "read_bytes_per_s",
            self.ceiling_flops: "flops",
            self.mfu: "flops",
        }

    @property
    def families(self) -> list[Family]:
        return [family for family in vars(self).values() if isinstance(family, ScalarMetric | Histogram)]

    def observe_sizes(self, prompt_tokens: int, output_tokens: int, samples: int) -> None:
        """Record the sizes of a request whose samples have all ended."""
        self.request_prompt.observe(prompt_tokens)
        self.request_generation.observe(output_tokens)
        self.request_samples.observe(samples)

    def observe_latency(self, done: RequestDone, seconds: float) -> None:
        """Record the times of an online request. Batch lines are left out: their queueing time would hide the latency
        of online calls."""
        self.latency.observe(seconds)
        queue = done.queue or 0.0
        self.queue_time.observe(queue)
        self.inference_time.observe(max(0.0, done.seconds - queue))
        if done.ttft is not None:
            self.prefill_time.observe(max(0.0, done.ttft - queue))
            self.decode_time.observe(max(0.0, done.seconds - done.ttft))

    def write(self, backend: Backend) -> str:
        """All metrics in the text format of Prometheus."""
        facts, load = backend.facts, backend.load
        self.ready.set(float(backend.ready))
        self.restarts.set(backend.restarts)
        self.failed_loads.set(backend.failed_loads)
        if self._supervisor is not None:
            for task, well in self._supervisor.up.items():
                self.tasks_up.set(float(well), task)
                self.task_restarts.set(self._supervisor.restarts[task], task)
        if self.slo is not None:
            self.slo.settle()
            self.slo_requests.set(self.slo.met, "met")
            self.slo_requests.set(self.slo.missed, "missed")
        if load is not None:
            self._update(load, facts)
        ceilings = (facts.ceilings if facts is not None and load is not None else None) or {}
        # Leave out a ceiling that was not measured, and its ratio.
        shown = [family for family in self.families if family not in self._needs or self._needs[family] in ceilings]
        name = self._model if self._model is not None or facts is None else facts.name
        labels = {} if name is None else {"model_name": name}
        shown += tier_families(load) + pin_families(load)
        for more in self.more:
            shown += more()
        if self._replicas is not None:
            shown += replica_families(self._replicas())
        return write_families(shown, PREFIX, labels) + write_families(self._vllm_families, VLLM_PREFIX, labels)

    def _update(self, load: Load, facts: Facts | None) -> None:
        """Copy the engine's counters. They restart from 0 with the engine, which Prometheus counters may do."""
        self.running.set(load.running)
        self.waiting.set(load.waiting)
        self.waiting_tokens.set(load.waiting_tokens)
        self.cache_usage.set(load.pages_used / load.pages_total if load.pages_total else 0.0)
        for family, value in (
            (self.prefix_queries, load.prefix_queries),
            (self.prefix_hits, load.prefix_hits),
            (self.preemptions, load.preemptions),
            (self.steps, load.steps),
            (self.drafts, load.drafted[0] if load.drafted else 0),
            (self.draft_tokens, sum(load.drafted)),
            (self.accepted_tokens, sum(load.accepted)),
        ):
            family.set(value)
        for position, accepted in enumerate(load.accepted):
            self.accepted_at.set(accepted, str(position))
        ceilings = (facts.ceilings if facts is not None else None) or {}
        most_bytes, most_flops = ceilings.get("read_bytes_per_s", 0.0), ceilings.get("flops", 0.0)
        self.ceiling_bytes.set(most_bytes)
        self.ceiling_flops.set(most_flops)
        start = self._window_start(load)
        self._update_widths(start, load)
        before = _work_of(start)
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

    def _update_widths(self, start: Load, load: Load) -> None:
        """Averages over the window. A sequence gets its accepted drafts and one sampled token in each step."""
        drafted, accepted = (
            sum(after) - sum(before)
            for before, after in ((start.drafted, load.drafted), (start.accepted, load.accepted))
        )
        steps = load.sampled - start.sampled - accepted
        self.draft_width.set(drafted / steps if steps > 0 else 0.0)
        verifications = sum(load.drafted[:1]) - sum(start.drafted[:1])
        self.acceptance_length.set(1 + accepted / verifications if verifications > 0 else 0.0)

    def _window_start(self, load: Load) -> Load:
        """The load at the start of the window; a restarted engine starts a new window."""
        now = self._clock()
        if self._marks and load.busy < self._marks[-1][1].busy:
            self._marks.clear()
        self._marks.append((now, load))
        while len(self._marks) > 2 and self._marks[1][0] < now - WINDOW_SECONDS:
            self._marks.popleft()
        if len(self._marks) == 1:
            return _NO_LOAD
        return self._marks[0][1]


class StepWork(NamedTuple):
    seconds: float
    bytes: float
    flops: float


def _work_of(load: Load) -> dict[str, StepWork]:
    """Work by kind of step: decode steps are memory bound, steps with prompt tokens are compute bound."""
    decode = StepWork(load.decode_busy, load.decode_bytes, load.decode_flops)
    rest = StepWork(load.busy - decode.seconds, load.bytes_moved - decode.bytes, load.flops - decode.flops)
    return {"decode": decode, "prompt": rest}


_NO_LOAD = Load(0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)
