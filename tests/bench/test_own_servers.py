"""The benchmark against jaxserve's own front ends, around a fake engine: the HTTP and the gRPC API as they are."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from jaxserve.bench.load.session import Result, RunOptions, ServerOptions, open_session
from jaxserve.bench.workload.workload import Workload
from jaxserve.errors import BenchmarkError, ConfigError
from jaxserve.serving.grpc_api.bench_system import open_grpc_session
from tests.serving.fake_engine import FakeAsyncEngine
from tests.serving.servers import grpc_server, http_server, server_config

WORK: dict[str, Any] = {"arrival": "closed", "concurrency": 2, "num_requests": 6, "input_len": "30", "output_len": "5"}


def over_http(**fields: Any) -> Result:
    async def main() -> Result:
        work = Workload(**WORK | fields)
        async with http_server(FakeAsyncEngine()) as port, open_session(ServerOptions(url=f"127.0.0.1:{port}"), work) as session:
            return await session.run(work, RunOptions())

    return asyncio.run(main())


def test_completions() -> None:
    result = over_http()
    assert result.metrics.completed == 6
    assert result.metrics.output_tokens == 30
    assert result.info.fields["ignore_eos"] is True


def test_chat_on_a_tokenizer_of_bytes() -> None:
    """Words have several tokens here: lengths are scaled by what the server counts, and called estimates."""
    result = over_http(endpoint="chat", input_len="400")
    assert result.metrics.completed == 6
    assert not result.info.exact_prompts
    assert all(record.prompt_tokens == pytest.approx(400, rel=0.15) for record in result.run.records)


def test_grpc() -> None:
    async def main(**options: Any) -> Result:
        work = Workload(**WORK)
        config = server_config(api_keys=("secret",))
        async with grpc_server(FakeAsyncEngine(), config) as server:
            url = f"http://127.0.0.1:{server.port}"
            async with open_grpc_session(ServerOptions(**{"url": url, "api_key": "secret"} | options), work) as session:
                return await session.run(work, RunOptions())

    result = asyncio.run(main())
    assert (result.metrics.completed, result.metrics.output_tokens, result.metrics.input_mismatches) == (6, 30, 0)
    assert result.metrics.cached_tokens is not None
    with pytest.raises(BenchmarkError, match="UNAUTHENTICATED"):
        asyncio.run(main(api_key="wrong"))
    with pytest.raises(BenchmarkError, match="NOT_FOUND.*other"):
        asyncio.run(main(model="other"))
    with pytest.raises(BenchmarkError, match="UNAVAILABLE"):
        asyncio.run(main(url="127.0.0.1:9"))
    with pytest.raises(ConfigError, match="token ids"):
        asyncio.run(main(prompts="text"))
