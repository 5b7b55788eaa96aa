"""A long prompt among running streams, with chunked prefill and without, on a real model in one run."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from jaxserve.engine.engine import Engine
from jaxserve.llm import LLM
from jaxserve.request import SamplingParams
from tests.real_models import require_model

MODEL = "gemma3-270m"
NUM_STREAMS, PROMPT_LEN = 16, 4000
BUDGET = 152
"""About the middle between what the streams and what the prompt allow, on two cores (docs/scheduling.md, "Choosing the chunk budget")."""
TOKEN_BUCKETS = (80, 96, 112, 128, 144)
MOST_INTERVAL, MOST_FIRST_TOKEN = 2.5, 2.0
"""The streams' 99th percentile between tokens over their undisturbed median; the prompt's time to its first token over that in one piece."""
NUM_TRIES = 8

pytestmark = pytest.mark.slow


def make_engine(budget: int, token_buckets: tuple[int, ...]) -> Engine:
    require_model(MODEL)
    overrides = {
        "model.max_model_len": 8192, "cache.num_pages": 1024, "cache.prefix": "off", "scheduler.max_num_seqs": NUM_STREAMS + 1,
        "scheduler.max_tokens_per_step": budget, "engine.token_buckets": token_buckets, "engine.sequence_buckets": (NUM_STREAMS + 1,),
    }  # fmt: skip
    return LLM(MODEL, overrides=overrides).engine


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def long_prompt_among_streams(engine: Engine) -> tuple[float, float, float]:
    """Median time between tokens of the streams while nothing else runs; their 99th percentile until the prompt's first token; its time to that. Seconds."""
    draw = random.Random(0)

    def add(length: int, max_tokens: int) -> str:
        prompt = [draw.randrange(1000, 40_000) for _ in range(length)]
        request = engine.make_request(prompt, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens))
        engine.add(request)
        return request.request_id

    streams = [add(32, 4000) for _ in range(NUM_STREAMS)]
    times: dict[str, list[float]] = {stream: [] for stream in streams}

    def step() -> set[str]:
        """Who has a token more."""
        grown = {output.request_id for output in engine.step() if output.token_ids}
        now = time.perf_counter()
        for stream in grown & times.keys():
            times[stream].append(now)
        return grown

    def intervals() -> list[float]:
        return [after - before for each in times.values() for before, after in itertools.pairwise(each)]

    while not all(len(each) > 40 for each in times.values()):
        step()
    undisturbed = quantile([after - before for each in times.values() for before, after in itertools.pairwise(each[-30:])], 0.5)
    for each in times.values():
        del each[:-1]
    arrival = time.perf_counter()
    long = add(PROMPT_LEN, 2)
    while long not in step():
        pass
    first_token = time.perf_counter() - arrival
    disturbed = quantile(intervals(), 0.99)
    for request_id in [*streams, long]:
        engine.abort(request_id)
    return undisturbed, disturbed, first_token


def test_streams_hardly_notice_a_long_prompt_and_it_is_not_much_later() -> None:
    """One try of several keeps both limits: other work on the machine only ever adds time, and one slow step in a hundred is the 99th percentile."""

    def try_once(name: str, engine: Engine) -> tuple[float, float]:
        undisturbed, disturbed, first_token = long_prompt_among_streams(engine)
        print(f"{name}: between tokens {undisturbed * 1e3:.1f} ms, disturbed {disturbed / undisturbed:.2f} times that; first token after {first_token:.2f} s")
        return disturbed / undisturbed, first_token

    engine = make_engine(PROMPT_LEN + NUM_STREAMS, ())
    whole = [try_once("whole", engine) for _ in range(3)]
    most_first_token = MOST_FIRST_TOKEN * min(first_token for _, first_token in whole)
    engine = make_engine(BUDGET, TOKEN_BUCKETS)
    tries: list[tuple[float, float]] = []
    while len(tries) < NUM_TRIES:
        interval, first_token = try_once("chunked", engine)
        tries.append((interval, first_token))
        if interval <= MOST_INTERVAL and first_token <= most_first_token:
            break
    else:
        pytest.fail(f"no try of {tries} keeps {MOST_INTERVAL} times and {most_first_token:.2f} s")
    assert min(interval for interval, _ in whole) > MOST_INTERVAL
