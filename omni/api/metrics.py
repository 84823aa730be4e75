"""GET /metrics for Prometheus, from the pipeline's status at the time of asking and from what HTTP saw.

| name | labels | what |
|---|---|---|
| omni_requests_running | | requests at work in stages |
| omni_requests_waiting | | requests waiting to be |
| omni_requests_done_total | | requests that succeeded |
| omni_requests_failed_total | reason | requests that failed, by error code |
| omni_stage_ready | stage | replicas that take requests |
| omni_stage_queue_depth | stage, replica | requests in the replica's own queue |
| omni_stage_running | stage, replica | requests that the replica works on |
| omni_stage_step_seconds | stage, replica | time of one engine step, moving average |
| omni_prompt_tokens_total, omni_prefix_hit_tokens_total, omni_generated_tokens_total, omni_preemptions_total | stage, replica | ar |
| omni_kv_pages, omni_kv_pages_used, omni_kv_pages_cached | stage, replica | ar: the KV pool |
| omni_first_token_seconds, omni_inter_token_seconds | stage, replica | ar: histograms |
| omni_queue_seconds | stage, replica | histogram: arrival at the stage to the first step |
| omni_denoise_steps_total, omni_denoiser_forwards_total | stage, replica | diffusion: steps of requests, forwards that made them |
| omni_prompt_cache_hits_total, omni_prompt_cache_misses_total, omni_prompt_cache_bytes | stage, replica | diffusion |
| omni_edge_payloads_total | source, target | payloads that crossed the edge |
| omni_edge_bytes_total | source, target | their bytes |
| omni_leases | | payloads that stages keep for others |
| omni_lease_bytes | | their bytes |
| omni_junk_frames_total | | frames dropped because they broke the wire's rules |
| omni_http_requests_total | route, status | answers; status 499 is a caller that left before it |
| omni_http_request_seconds | route | histogram: from the request's headers to the answer's last byte |

Invariant: label values come from the deploy and the table of routes, never from a caller.
"""

from collections.abc import Callable, Iterable
from itertools import accumulate
from time import perf_counter
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omni.api.errors import CLIENT_GONE
from omni.pipeline import Pipeline
from omni.status import PipelineStatus
from proto.figures import FIGURES, HISTOGRAMS, Sort

_SECONDS: Final = (0.005, 0.02, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """Has a registry of its own, so that several servers in one process do not mix."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline: Final = pipeline
        self._registry: Final = CollectorRegistry()
        self._status: Final = _StatusCollector()
        self._registry.register(self._status)
        self.http_requests: Final = Counter(
            "omni_http_requests", "HTTP answers", ("route", "status"), registry=self._registry
        )
        self.http_seconds: Final = Histogram(
            "omni_http_request_seconds", "HTTP request time", ("route",), buckets=_SECONDS, registry=self._registry
        )

    async def scrape(self, http: Request) -> Response:
        status = await self._pipeline.status()
        encode, content_type = choose_encoder(http.headers.get("accept", ""))
        # No await from here on: the collector must see this status, not that of another scrape.
        self._status.latest = status
        return Response(encode(self._registry), headers={"content-type": content_type})


class _StatusCollector(Collector):
    latest: PipelineStatus | None = None

    def collect(self) -> Iterable[Metric]:
        if self.latest is not None:
            yield from _requests(self.latest)
            yield from _stages(self.latest)
            yield from _figures(self.latest)
            yield from _edges(self.latest)


def _requests(status: PipelineStatus) -> Iterable[Metric]:
    yield GaugeMetricFamily("omni_requests_running", "Requests at work in stages", status.running)
    yield GaugeMetricFamily("omni_requests_waiting", "Requests waiting to be", status.queued)
    yield CounterMetricFamily("omni_requests_done", "Requests that succeeded", status.done)
    failed = CounterMetricFamily("omni_requests_failed", "Requests that failed", labels=("reason",))
    for reason, count in status.failed.items():
        failed.add_metric((reason,), count)
    yield failed
    yield GaugeMetricFamily("omni_leases", "Payloads that stages keep for others", status.leases)
    yield GaugeMetricFamily("omni_lease_bytes", "Bytes of those payloads", status.lease_bytes)
    yield CounterMetricFamily("omni_junk_frames", "Frames that broke the wire's rules", status.junk)


def _stages(status: PipelineStatus) -> Iterable[Metric]:
    ready = GaugeMetricFamily("omni_stage_ready", "Replicas that take requests", labels=("stage",))
    one = ("stage", "replica")
    queued = GaugeMetricFamily("omni_stage_queue_depth", "Requests in the replica's queue", labels=one)
    running = GaugeMetricFamily("omni_stage_running", "Requests that the replica works on", labels=one)
    step = GaugeMetricFamily("omni_stage_step_seconds", "Time of an engine step, moving average", labels=one)
    for stage in status.stages:
        ready.add_metric((stage.stage,), stage.ready)
        for replica in stage.replicas:
            labels = (stage.stage, str(replica.replica))
            queued.add_metric(labels, replica.queued)
            running.add_metric(labels, replica.running)
            step.add_metric(labels, replica.step_s)
    return ready, queued, running, step


def _figures(status: PipelineStatus) -> Iterable[Metric]:
    """What engines count, where one does."""
    one = ("stage", "replica")
    numbers: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    spreads: dict[str, HistogramMetricFamily] = {}
    for stage in status.stages:
        for replica in stage.replicas:
            labels = (stage.stage, str(replica.replica))
            for name, value in replica.figures.numbers.items():
                sort, text = FIGURES[name]
                family = CounterMetricFamily if sort is Sort.COUNTER else GaugeMetricFamily
                numbers.setdefault(name, family(f"omni_{name}", text, labels=one)).add_metric(labels, value)
            for name, spread in replica.figures.spreads.items():
                text, bounds = HISTOGRAMS[name]
                uppers = [*(str(float(bound)) for bound in bounds), "+Inf"]
                buckets = list(zip(uppers, accumulate(spread.counts), strict=True))
                histogram = spreads.setdefault(name, HistogramMetricFamily(f"omni_{name}", text, labels=one))
                histogram.add_metric(labels, buckets, spread.total)
    return (*numbers.values(), *spreads.values())


def _edges(status: PipelineStatus) -> Iterable[Metric]:
    payloads = CounterMetricFamily("omni_edge_payloads", "Payloads over the edge", labels=("source", "target"))
    size = CounterMetricFamily("omni_edge_bytes", "Bytes over the edge", labels=("source", "target"))
    for edge in status.edges:
        payloads.add_metric((edge.source, edge.target), edge.payloads)
        size.add_metric((edge.source, edge.target), edge.bytes)
    return payloads, size


class CountRequests:
    """ASGI middleware: one count and one time for each request, streams included."""

    def __init__(self, app: ASGIApp, metrics: Metrics, route_of: Callable[[str], str]) -> None:
        self._app: Final = app
        self._metrics: Final = metrics
        self._route_of: Final = route_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_GONE

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        began = perf_counter()
        try:
            await self._app(scope, receive, watched)
        except Exception:
            if status == CLIENT_GONE:
                status = 500  # a fault of ours: the layer around this one answers it
            raise
        finally:
            route = self._route_of(scope["path"])
            self._metrics.http_requests.labels(route, str(status)).inc()
            self._metrics.http_seconds.labels(route).observe(perf_counter() - began)
