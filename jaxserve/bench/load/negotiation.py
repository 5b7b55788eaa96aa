"""Finds out what a server is and takes before any load: its models, which fields, and how to make prompts whose lengths are true on it."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from jaxserve.bench.load.http_client import HttpClient
from jaxserve.bench.load.openai_system import OpenAISystem, failure_of
from jaxserve.bench.load.system_under_test import RequestFailedError, Stream
from jaxserve.bench.workload.plan import PlannedRequest, Segment
from jaxserve.bench.workload.prompts import WORDS, IdPrompts, PromptMaker, WordPrompts
from jaxserve.errors import BenchmarkError

PROBE_LEN = 16

MAX_TOKENS_PER_WORD = 1.5
"""Of words together: beyond it hardly one is a single token, and looking for it costs two questions a word."""

logger = logging.getLogger(__name__)

Count = Callable[[str], Awaitable[int]]
"""Tokens of a text as a prompt, those that the tokenizer adds of itself included."""


@dataclasses.dataclass(frozen=True)
class Wishes:
    """What a workload would like to send.

    Args:
        endpoint: Which API.
        prompts: ``ids``, ``text``, or ``auto``: ids where they are taken.
        fields: Fields to send unless the server refuses them; they change only how exact the figures are.
        required: Fields to send whatever the server says.
        prefixed: Whether prompts begin with a shared prefix, in a chat a system message.
        multi_turn: Whether sessions have several turns.
    """

    endpoint: Literal["completions", "chat"]
    prompts: Literal["auto", "ids", "text"]
    fields: Mapping[str, Any]
    required: Mapping[str, Any]
    prefixed: bool = False
    multi_turn: bool = False


async def served_model(client: HttpClient, wanted: str | None, url: str) -> str:
    """The model to ask for.

    Args:
        client: Of the server.
        wanted: Its name; ``None`` takes the only one served.
        url: For messages.

    Raises:
        BenchmarkError: No server, no such model, or several and none named.
    """
    try:
        answer = await client.request("GET", "/v1/models")
    except RequestFailedError as error:
        raise BenchmarkError(f"{url} cannot be reached: {error}") from None
    if answer.status in (401, 403):
        raise BenchmarkError(f"{url} refuses the API key: {failure_of(answer)} (give it with --api-key or OPENAI_API_KEY)")
    names: list[str] = []
    if answer.status == 200:
        try:
            names = [str(card["id"]) for card in json.loads(answer.body)["data"]]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise BenchmarkError(f"{url} is no OpenAI-compatible server: /v1/models answers {answer.body[:100]!r}") from None
    elif answer.status != 404:  # a server without this list may still serve
        raise BenchmarkError(f"{url} is not ready: /v1/models answers {failure_of(answer)}")
    if wanted is not None:
        if names and wanted not in names:
            raise BenchmarkError(f"model {wanted!r} is not served by {url}; served: {', '.join(names)}")
        return wanted
    if len(names) != 1:
        raise BenchmarkError(f"{url} serves {', '.join(names) or 'models that it does not list'}; name one with --model")
    return names[0]


async def negotiate(client: HttpClient, model: str, wishes: Wishes, tokenizer: Callable[[str], int] | None) -> OpenAISystem:
    """The server as a system under test that has answered once.

    Args:
        client: Of the server.
        model: Its name.
        wishes: What is wanted.
        tokenizer: Counts the tokens of a text, where one is at hand.

    Raises:
        BenchmarkError: The server refuses even a plain request; the message is its own.
    """
    probe = OpenAISystem(client, model, wishes.endpoint, WordPrompts(), {**wishes.fields, **wishes.required})
    probe = await _settle_fields(probe, wishes)
    if wishes.endpoint == "completions" and wishes.prompts != "text":
        if await _takes_ids(probe):
            return dataclasses.replace(probe, prompts=IdPrompts())
        if wishes.prompts == "ids":
            raise BenchmarkError("the server does not take token ids as a prompt; leave out --prompts ids")
    return dataclasses.replace(probe, prompts=await _text_prompts(probe, wishes, tokenizer))


async def _settle_fields(probe: OpenAISystem, wishes: Wishes) -> OpenAISystem:
    """Drops wished fields that the server refuses, one after the other where it names them, else all together."""
    while True:
        try:
            await _ask(probe)
            return probe
        except RequestFailedError as error:
            optional = [name for name in wishes.fields if name in probe.fields]
            if not str(error).startswith(("status 400", "status 422")) or not optional:
                raise BenchmarkError(f"the server refuses a first small request: {error}") from None
            named = [name for name in optional if name in str(error)] or optional
            for name in named:
                logger.warning("the server does not take %r (%s); it is left out", name, error)
            probe = dataclasses.replace(probe, fields={name: value for name, value in probe.fields.items() if name not in named})


async def _takes_ids(probe: OpenAISystem) -> bool:
    try:
        stream = await _ask(dataclasses.replace(probe, prompts=IdPrompts()))
    except RequestFailedError as error:
        logger.info("no token ids as prompts: %s", error)
        return False
    return stream.prompt_tokens in (None, PROBE_LEN)


async def _ask(system: OpenAISystem, segments: tuple[Segment, ...] = (Segment("probe", PROBE_LEN),)) -> Stream:
    stream = Stream()
    await system.run(system.prepare(PlannedRequest(0, None, segments, output_len=2, session=0)), stream)
    return stream


async def _text_prompts(probe: OpenAISystem, wishes: Wishes, tokenizer: Callable[[str], int] | None) -> PromptMaker:
    """Words that are one token each by the tokenizer or the server's ``/tokenize``, less what server and template add by the server's own count."""
    count = _local_count(tokenizer) if tokenizer else await _server_count(probe)
    words, source = WORDS, "common words, taken to be a token each"
    if count is not None:
        words = tuple(await _single_token_words(WORDS, count))
        source = "words of one token each, by the tokenizer given" if tokenizer else "words of one token each, by the server's /tokenize"
    if len(words) < 16:
        words, count, source = WORDS, None, "common words, few of which are one token each"
    calibrated = dataclasses.replace(probe, prompts=WordPrompts(words))

    async def counted(length: int, *, turns: int = 1) -> tuple[int, int | None]:
        """Words of a small request shaped like the workload's, and its tokens."""
        segments = _conversation(wishes, length, turns)
        try:
            return length * len(segments), (await _ask(calibrated, segments)).prompt_tokens
        except RequestFailedError as error:
            raise BenchmarkError(f"the server refuses a prompt of about {length * len(segments)} words: {error}") from None

    (few, few_tokens), (more, more_tokens) = await counted(PROBE_LEN), await counted(PROBE_LEN * 2)
    if few_tokens is None or more_tokens is None:
        logger.warning("the server does not say how long prompts are: their lengths are estimates (%s)", source)
        return WordPrompts(words, exact=False, source=source)
    tokens_per_word = (more_tokens - few_tokens) / (more - few)
    overhead = round(few_tokens - few * tokens_per_word)
    turn_overhead = 0
    if wishes.multi_turn:
        longer, longer_tokens = await counted(PROBE_LEN, turns=2)
        turn_overhead = round((longer_tokens or 0) - longer * tokens_per_word) - overhead
    if tokens_per_word == 1.0:
        return WordPrompts(words, overhead, turn_overhead, source=f"{source}, confirmed by the server's usage")
    logger.warning("words have %.2f tokens on this server: lengths of prompts are estimates", tokens_per_word)
    return WordPrompts(words, overhead, turn_overhead, tokens_per_word, exact=False, source=f"{source}, scaled by the server's usage")


def _conversation(wishes: Wishes, length: int, turns: int) -> tuple[Segment, ...]:
    """Segments of ``length`` with the roles of a session's request number ``turns``: what a template adds depends on them."""
    prefix = (Segment("calibrate/prefix", length, "system"),) if wishes.prefixed else ()
    said = tuple(
        segment for turn in range(1, turns) for segment in (Segment(f"calibrate/{turn}", length), Segment(f"calibrate/answer/{turn}", length, "assistant"))
    )
    return (*prefix, *said, Segment("calibrate/last", length))


def _local_count(tokenizer: Callable[[str], int]) -> Count:
    async def count(text: str) -> int:
        return tokenizer(text)

    return count


async def _server_count(probe: OpenAISystem) -> Count | None:
    async def count(text: str) -> int:
        for body in ({"model": probe.model, "prompt": text}, {"content": text}):  # vLLM and jaxserve, llama.cpp
            answer = await probe.client.request("POST", "/tokenize", json.dumps(body).encode())
            try:
                tree: Any = json.loads(answer.body) if answer.status == 200 else {}
                if tokens := int(tree.get("count") or len(tree.get("tokens") or ())):  # llama.cpp finds no tokens where it does not know the field
                    return tokens
            except (ValueError, AttributeError, TypeError, RecursionError):
                continue
        raise RequestFailedError("/tokenize counts nothing")

    try:
        await count("one two three")
    except RequestFailedError:
        return None
    return count


async def _single_token_words(words: Sequence[str], count: Count) -> list[str]:
    """Those that are one token after a blank: halves of the list whose count fits are taken whole."""
    tokens = await count("a " + " ".join(words)) - await count("a")
    if tokens == len(words):
        return list(words)
    if len(words) == 1 or tokens > MAX_TOKENS_PER_WORD * len(words):
        return []
    middle = len(words) // 2
    return await _single_token_words(words[:middle], count) + await _single_token_words(words[middle:], count)
