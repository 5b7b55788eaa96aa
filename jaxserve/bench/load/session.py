"""One server under benchmark: reached and understood once, then any number of workloads against it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import urllib.parse
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Any, Literal

from jaxserve.bench.load.http_client import HttpClient
from jaxserve.bench.load.load import Observer, Run, run_load
from jaxserve.bench.load.metrics import Metrics, Slo, measure
from jaxserve.bench.load.negotiation import Wishes, negotiate, served_model
from jaxserve.bench.load.openai_system import OpenAISystem
from jaxserve.bench.load.server_metrics import Samples, ServerFigures, compare_samples, read_samples
from jaxserve.bench.load.system_under_test import RequestFailedError, SystemUnderTest
from jaxserve.bench.workload.plan import plan, read_sources, request_limit
from jaxserve.bench.workload.workload import Workload
from jaxserve.errors import BenchmarkError, ConfigError

METRICS_INTERVAL_S = 2.0

WARMUP_SEED_OFFSET = 1_000_003
"""Warm-up prompts are others than the measured ones: these must not find them in a prefix cache."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How to reach a server and what to ask of it.

    Args:
        url: ``http://host:port``, with or without ``/v1``.
        model: ``None`` takes the only one served.
        api_key: Sent as a bearer token.
        prompts: ``ids`` sends token ids, ``text`` words, ``auto`` ids where the server takes them.
        count_tokens: A local tokenizer's count of a text, where there is one.
        ignore_eos: Ask for answers of exactly the planned length.
        fields: Further fields of every body.
        timeout_s: Of one request.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    prompts: Literal["auto", "ids", "text"] = "auto"
    count_tokens: Callable[[str], int] | None = None
    ignore_eos: bool = True
    fields: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"temperature": 0.0})
    timeout_s: float = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a workload is run and measured.

    Args:
        num_warmup: Requests sent before, all at once; in no figure.
        timeout_s: Of one request.
        slo: For goodput.
        price_per_hour: Of the server.
    """

    num_warmup: int = 2
    timeout_s: float = 600.0
    slo: Slo | None = None
    price_per_hour: float | None = None


@dataclasses.dataclass(frozen=True)
class ServerInfo:
    """What a server turned out to be.

    Args:
        api: ``openai``, ``openai-chat`` or ``grpc``.
        prompt_source: How prompts are made and how true their lengths are.
        exact_prompts: Whether lengths are true by construction.
        fields: Sent in every request.
    """

    url: str
    model: str
    api: str
    prompt_source: str
    exact_prompts: bool
    fields: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Result:
    """A workload that was run."""

    workload: Workload
    info: ServerInfo
    metrics: Metrics
    server: ServerFigures
    run: Run
    broken_rows: int = 0


@dataclasses.dataclass(frozen=True)
class Session:
    """A server that has answered.

    Args:
        system: Takes the load.
        info: For reports.
        read_metrics: Reads the server's own figures, ``None`` where it shows none.
        count_tokens: A local tokenizer's count of a text, where there is one: for lengths that come as texts, and to check what the server counts.
        runs: Numbers the runs; each has other prompts, so that what the server has cached of one does not help it in the next.
    """

    system: SystemUnderTest
    info: ServerInfo
    read_metrics: Callable[[], Any]
    count_tokens: Callable[[str], int] | None
    runs: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    async def run(
        self, workload: Workload, options: RunOptions, *, observer: Callable[[int | None], Observer] | None = None, stop: asyncio.Event | None = None
    ) -> Result:
        """Warms up, runs the workload, measures.

        Args:
            workload: What to send.
            options: How.
            observer: Makes one for that many requests (``None``: not known), told of the measured requests.
            stop: Setting it ends the run early; the result then holds what there was.

        Raises:
            ConfigError: A file of the workload that cannot be used.
            BenchmarkError: Every request, of the warm-up or of the run, ended in an error.
        """
        sources = read_sources(workload)
        if sources.broken:
            logger.warning("%d rows of the workload's files cannot be read and are left out", sources.broken)

        number = next(self.runs)

        def sessions(seed: int) -> Any:
            return plan(dataclasses.replace(workload, seed=seed), sources, self.count_tokens or estimate_tokens, run=number)

        if options.num_warmup:
            first = (requests[:1] for requests in sessions(workload.seed + WARMUP_SEED_OFFSET))
            warmup = [[dataclasses.replace(request, cancel_after_s=None) for request in requests] for requests in itertools.islice(first, options.num_warmup)]
            warm = await run_load(warmup, self.system, concurrency=options.num_warmup, timeout_s=options.timeout_s, stop=stop)
            if not (stop and stop.is_set()):
                _require_answers(warm, "warm-up")
        total = request_limit(workload)
        measured: Any = sessions(workload.seed)
        if workload.arrival != "closed":
            measured = list(measured)
            total = sum(map(len, measured))
        async with self._watched() as figures:
            run = await run_load(
                measured,
                self.system,
                concurrency=workload.concurrency if workload.arrival == "closed" else None,
                duration_s=workload.duration_s,
                timeout_s=options.timeout_s,
                keep_text=self.count_tokens is not None,
                observer=observer(total) if observer else None,
                stop=stop,
            )
        if not (stop and stop.is_set()):
            _require_answers(run, "run")
        if (count := self.count_tokens) is not None:
            run = dataclasses.replace(run, records=tuple(dataclasses.replace(record, own_tokens=count(record.text)) for record in run.records))
        return Result(workload, self.info, measure(run, options.slo, options.price_per_hour), figures(), run, sources.broken)

    @contextlib.asynccontextmanager
    async def _watched(self) -> AsyncGenerator[Callable[[], ServerFigures]]:
        """Reads the server's figures before, meanwhile and after; yields what gives them once all is over."""
        before: Samples | None = await self.read_metrics()
        pages: list[Samples] = []

        async def sample() -> None:
            while True:
                await asyncio.sleep(METRICS_INTERVAL_S)
                if (page := await self.read_metrics()) is not None:
                    pages.append(page)

        sampling = asyncio.ensure_future(sample()) if before is not None else None
        after: list[Samples | None] = []
        try:
            yield lambda: compare_samples(before, pages, after[0]) if before is not None and after and after[0] is not None else ServerFigures()
        finally:
            if sampling is not None:
                sampling.cancel()
                await asyncio.gather(sampling, return_exceptions=True)
                after.append(await self.read_metrics())


def _require_answers(run: Run, what: str) -> None:
    if run.records and all(record.outcome == "error" for record in run.records):
        first = next(record for record in run.records)
        raise BenchmarkError(f"none of {len(run.records)} requests of the {what} succeeded; the first: {first.error}")


@contextlib.asynccontextmanager
async def open_session(options: ServerOptions, workload: Workload) -> AsyncGenerator[Session]:
    """Reaches an HTTP server and finds out what it takes.

    Args:
        options: Which server.
        workload: Its endpoint, tenants and priorities decide what is tried.

    Raises:
        BenchmarkError: No server, no such model, or it refuses a first small request or does not answer it in time.
        ConfigError: The URL is none.
    """
    url = normalize_url(options.url)
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else None
    client = HttpClient(url, headers, timeout_s=options.timeout_s)
    try:
        model = await served_model(client, options.model, url)
        shape = {"prefixed": workload.prefix_len > 0, "multi_turn": workload.turns > 1}
        wishes = Wishes(workload.endpoint, options.prompts, _wished_fields(options, workload), options.fields, **shape)
        try:
            system: OpenAISystem = await negotiate(client, model, wishes, options.count_tokens)
        except RequestFailedError as error:
            raise BenchmarkError(f"{url}: {error}") from None
        info = ServerInfo(
            url, model, "openai" if workload.endpoint == "completions" else "openai-chat", system.prompts.source, system.prompts.exact, system.fields
        )
        yield Session(system, info, lambda: read_samples(client), options.count_tokens)
    finally:
        await client.close()


def normalize_url(url: str) -> str:
    """Without ``/v1`` and slashes at its end; with ``http://`` where it has no scheme.

    Raises:
        ConfigError: It is no HTTP URL.
    """
    full = url.strip() if "://" in url else f"http://{url.strip()}"
    try:
        parts = urllib.parse.urlsplit(full)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or an unclosed bracket
        good = False
    if not good or not all("!" <= character <= "~" for character in full):
        raise ConfigError(f"the URL is {url!r}; must be one such as http://localhost:8000")
    return full.rstrip("/").removesuffix("/v1").rstrip("/")


def estimate_tokens(text: str) -> int:
    """Four characters a token: for recorded texts where no tokenizer is at hand."""
    return max(1, round(len(text) / 4))


def _wished_fields(options: ServerOptions, workload: Workload) -> dict[str, Any]:
    wished: dict[str, Any] = {"stream_options": {"include_usage": True}}
    if options.ignore_eos:
        wished["ignore_eos"] = True
    if workload.tenants:
        wished["user"] = "tenant-0"
    if workload.priorities:
        wished["priority"] = workload.priorities[0]
    return wished
