"""Metrics: what GET /metrics shows. Series are fixed: no label ever holds what a client sent.

Gauges and token counters come from the engine; times are those that a client sees, taken in the front. A time to
first token, a queue time and a prompt are counted once a prompt; ends and gaps once a choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nanoserve.core.errors import ContextLengthError, NanoserveError, RequestError
from nanoserve.core.request import FinishReason
from nanoserve.engine.client import AsyncEngine

PREFIX = "nanoserve:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
TIME_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
TOKEN_BUCKETS = tuple(float(2**power) for power in range(20))
REJECTIONS = ("context_length", "overloaded", "invalid", "unavailable")


class Metrics:
    def __init__(self, engine: AsyncEngine):
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine))

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(PREFIX + name, help, registry=self._registry, buckets=buckets)

        def counters(name: str, help: str, label: str, values: tuple[str, ...]) -> dict[str, Counter]:
            family = Counter(PREFIX + name, help, [label], registry=self._registry)
            return {value: family.labels(value) for value in values}

        self._first = histogram("time_to_first_token_seconds", "arrival to first token", TIME_BUCKETS)
        self._gap = histogram("inter_token_latency_seconds", "one token to the next", GAP_BUCKETS)
        self._total = histogram("e2e_request_latency_seconds", "arrival to last token", TIME_BUCKETS)
        self._queue = histogram("request_queue_time_seconds", "arrival to first admission", TIME_BUCKETS)
        self._prefill = histogram("request_prefill_time_seconds", "first admission to first token", TIME_BUCKETS)
        self._decode = histogram("request_decode_time_seconds", "first token to last token", TIME_BUCKETS)
        self._prompt = histogram("request_prompt_tokens", "tokens of a prompt", TOKEN_BUCKETS)
        self._generation = histogram("request_generation_tokens", "tokens of a choice", TOKEN_BUCKETS)
        self._ends = counters("request_success", "choices that ended", "finished_reason", tuple(FinishReason))
        self._rejections = counters("admission_rejections", "calls refused", "reason", REJECTIONS)

    def began(self, seconds: float, queued: float, prompt_tokens: int) -> None:
        self._first.observe(seconds)
        self._queue.observe(queued)
        self._prefill.observe(max(0.0, seconds - queued))
        self._prompt.observe(prompt_tokens)

    def continued(self, gap: float, count: int) -> None:
        for _ in range(count):
            self._gap.observe(gap)

    def ended(self, reason: str, seconds: float, decode_seconds: float, tokens: int) -> None:
        self._total.observe(seconds)
        self._decode.observe(decode_seconds)
        self._generation.observe(tokens)
        self._ends[reason].inc()

    def lost(self, reason: str) -> None:
        """A choice that did not come to its end."""
        self._ends[reason].inc()

    @contextmanager
    def rejections(self) -> Iterator[None]:
        """Counts a call that ends in an error inside."""
        try:
            yield
        except NanoserveError as error:
            self._rejections[_reason(error)].inc()
            raise

    def render(self) -> bytes:
        return generate_latest(self._registry)


def _reason(error: NanoserveError) -> str:
    match error:
        case ContextLengthError():
            return "context_length"
        case RequestError() if error.status < 500:
            return "overloaded" if error.status == 429 else "invalid"
    return "unavailable"


class _EngineCollector(Collector):
    """Reads the engine's latest stats when it is asked."""

    def __init__(self, engine: AsyncEngine):
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        for name, help, value in (
            ("num_requests_running", "sequences that run", stats.num_running),
            ("num_requests_waiting", "sequences that wait", stats.num_waiting),
            ("kv_cache_usage_perc", "share of KV blocks held, 0 to 1", stats.kv_cache_usage),
        ):
            yield GaugeMetricFamily(PREFIX + name, help, value)
        for name, help, count in (
            ("prefix_cache_queries", "prompt tokens looked up in the prefix cache", stats.prefix_cache_queries),
            ("prefix_cache_hits", "prompt tokens found in the prefix cache", stats.prefix_cache_hits),
            ("num_preemptions", "sequences set back to waiting", stats.num_preemptions),
            ("prompt_tokens", "prompt tokens", stats.prompt_tokens),
            ("generation_tokens", "tokens generated", stats.generation_tokens),
            ("engine_steps", "steps of the engine", stats.num_steps),
            ("engine_step_tokens", "tokens computed over all steps", stats.step_tokens),
        ):
            yield CounterMetricFamily(PREFIX + name, help, count)
