"""The checks of a request that are possible before it runs: its token ids, and its length against the context and the page pool. Imports no jax."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from jaxserve.dims import ceil_div
from jaxserve.errors import ContextLengthError, InvalidRequestError
from jaxserve.request import SamplingParams


class Door:
    """Refuses requests that can never be served. May be used from any thread.

    Args:
        vocab_size: V, the size of the vocabulary.
        max_model_len: Largest number of tokens that prompt and output may have together.
        num_pages: Pages of one data rank's pool.
        page_size: Tokens that one page holds.
    """

    def __init__(self, vocab_size: int, max_model_len: int, *, num_pages: int, page_size: int) -> None:
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._num_pages = num_pages
        self._page_size = page_size

    def check(self, prompt_token_ids: Iterable[int], sampling_params: SamplingParams) -> list[int]:
        """The prompt's token ids as plain integers, after all checks of the request.

        Raises:
            InvalidRequestError: The prompt is empty, or an id in the prompt or among the stop tokens is not an integer in ``[0, V)``.
            ContextLengthError: The request has more tokens than the model's context or the page pool can hold.
        """
        try:
            token_ids = [operator.index(token_id) for token_id in prompt_token_ids]
        except TypeError as error:
            raise InvalidRequestError(f"the prompt's token ids must be integers: {error}", param="prompt") from error
        if not token_ids:
            raise InvalidRequestError("the prompt is empty; at least one token is needed", param="prompt")
        self._check_vocabulary(token_ids, "prompt")
        self._check_vocabulary(sampling_params.stop_token_ids, "stop_token_ids")
        self.max_tokens(len(token_ids), sampling_params)
        return token_ids

    def max_tokens(self, num_prompt_tokens: int, sampling_params: SamplingParams) -> int:
        """Largest number of tokens to generate: the requested number, or if there is none, as many as fit.

        Raises:
            ContextLengthError: The prompt and the requested tokens (at least one) do not fit.
        """
        max_len = self._max_model_len
        if num_prompt_tokens >= max_len:
            raise ContextLengthError(
                f"This model's maximum context length is {max_len} tokens. However, your prompt has {num_prompt_tokens} tokens; "
                f"at most {max_len - 1} are allowed, to leave room for one more. Please reduce the length of the prompt.",
                param="prompt",
            )
        num_tokens = num_prompt_tokens + (sampling_params.max_tokens or 1)
        if num_tokens > max_len:
            raise ContextLengthError(
                f"This model's maximum context length is {max_len} tokens. However, you requested {num_tokens} tokens "
                f"({num_prompt_tokens} in the prompt, {sampling_params.max_tokens} for the completion). Please reduce the length of the prompt or max_tokens.",
                param="max_tokens",
            )
        pool_tokens = self._num_pages * self._page_size
        if num_tokens > pool_tokens:
            raise ContextLengthError(
                f"This server's KV cache can hold at most {pool_tokens} tokens ({self._num_pages} pages of {self._page_size}). However, you requested "
                f"{num_tokens} tokens ({num_prompt_tokens} in the prompt, {sampling_params.max_tokens or 'at least 1'} for the completion), which need "
                f"{ceil_div(num_tokens, self._page_size)} pages. Please reduce the length of the prompt or max_tokens, or serve with a larger "
                f"cache.num_pages.",
                param="prompt" if sampling_params.max_tokens is None else "max_tokens",
            )
        return sampling_params.max_tokens or min(max_len, pool_tokens) - num_prompt_tokens

    def _check_vocabulary(self, token_ids: SequenceOf[int], param: str) -> None:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < self._vocab_size)
            raise InvalidRequestError(f"token id {wrong} in {param} is out of range; the vocabulary is [0, {self._vocab_size})", param=param)
