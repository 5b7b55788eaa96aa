"""Front ends as processes of their own: the same answers, and what happens when one of them, its clients or the engine is gone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from jaxserve.engine.engine import fold_seed
from tests.engine_host.fakes import SlowRunner, plain_run
from tests.serving.front_ends import Served, front_ends, text_of
from tests.waiting import LIMIT_S


def run(coroutine: Any) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 5 * LIMIT_S))


def alone(prompt: str, num_tokens: int, seed: int) -> str:
    """What a request alone in the world answers."""
    return text_of(plain_run(list(prompt.encode()), num_tokens, fold_seed(seed)))


async def complete(served: Served, index: int, prompt: str, **fields: Any) -> dict[str, Any]:
    answer = await served.clients[index].post("/v1/completions", json={"prompt": prompt, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_both_front_ends_answer_as_one_process_does() -> None:
    async def body() -> None:
        async with front_ends(SlowRunner(num_pages=512, max_num_seqs=16)) as served:
            for index in (0, 1):
                for seed in range(3):
                    answer = await complete(served, index, f"prompt {seed}", max_tokens=20, seed=seed)
                    assert answer["choices"][0]["text"] == alone(f"prompt {seed}", 20, seed)
                    assert answer["usage"] == {
                        "prompt_tokens": 8, "completion_tokens": 20, "total_tokens": 28, "prompt_tokens_details": answer["usage"]["prompt_tokens_details"],
                    }  # fmt: skip
            await served.all_free()

    run(body())
