"""Who may join the queue: bounds of its length, tenants' quotas, deadlines that cannot be kept, and who must leave for whom. Plain Python; imports no jax."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping

from jaxserve.config import SchedulerConfig
from jaxserve.engine.requests.shedding import make_shedding
from jaxserve.engine.scheduling.sequence import Sequence
from jaxserve.errors import OverloadedError, QuotaExceededError
from jaxserve.request import Request
from jaxserve.tenants import Tenants

_MEMORY_S = 10.0
"""Over about this time the queue's speed is averaged."""
_LEAST_RETRY_S = 1.0
_MOST_RETRY_S = 120.0
"""A queue that hardly moves now may move well in a while: nobody is sent away for longer because of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """The engine's state as far as admission goes.

    Args:
        num_queued: Requests that have not run yet.
        num_queued_tokens: Tokens of their prompts.
        num_queued_tokens_of: The same by tenant.
        num_free_slots: Sequences that can start in the next step; as many requests do not count as queued.
    """

    num_queued: int
    num_queued_tokens: int
    num_queued_tokens_of: Mapping[str, int]
    num_free_slots: int


class QueueSpeed:
    """Prompt tokens that leave the queue in a second, while there is one."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._stuck_s = 0.0  # since the queue moved last

    def note(self, num_tokens: int, seconds: float) -> None:
        """Notes a step at whose beginning somebody waited, and the tokens that left the queue in it."""
        self._stuck_s += seconds
        if num_tokens:  # else what is known of the speed grows old, but no less true: the estimate grows as time passes, and no faster
            decay = math.exp(-self._stuck_s / _MEMORY_S)
            self._tokens = self._tokens * decay + num_tokens
            self._seconds = self._seconds * decay + self._stuck_s
            self._stuck_s = 0.0

    def time_for_s(self, num_tokens: int) -> float:
        """How long so many tokens are likely to wait; 0 as long as nothing is known."""
        return num_tokens * (self._seconds + self._stuck_s) / self._tokens if self._tokens else 0.0


class _Account:
    """One tenant's use: requests in flight, and a bucket of tokens that fills by the minute."""

    def __init__(self, tokens_per_minute: int | None, now_s: float) -> None:
        self.num_requests = 0
        self.rate = (tokens_per_minute or 0) / 60
        self.capacity = float(tokens_per_minute or 0)
        self.level = self.capacity
        self._updated_s = now_s

    def refill(self, now_s: float) -> None:
        self.level = min(self.capacity, self.level + self.rate * (now_s - self._updated_s))
        self._updated_s = now_s


class Admission:
    """Decides about each request once, when it comes; keeps the tenants' accounts.

    Args:
        config: The bounds.
        tenants: Their quotas.

    Attributes:
        speed: Of the queue, for the times it is asked about.
    """

    def __init__(self, config: SchedulerConfig, tenants: Tenants) -> None:
        self.speed = QueueSpeed()
        self._config = config
        self._tenants = tenants
        self._accounts: dict[str, _Account] = {}
        self._shedding = make_shedding(config.order, tenants.weights)

    def check(self, request: Request, max_tokens: int, load: Load, now_s: float) -> list[Sequence]:
        """Decides whether a request may join.

        Args:
            request: It fits the context and the pool.
            max_tokens: Most tokens that it may generate.
            load: The state.
            now_s: The time.

        Returns:
            Queued sequences that must leave for it; see ``shedding``.

        Raises:
            QuotaExceededError: Its tenant has used up what it may.
            OverloadedError: The queue is full, or so long that the request's deadline would pass.
        """
        self._check_tenant(request, max_tokens, load, now_s)
        num_tokens = len(request.prompt_token_ids)
        num_ahead = load.num_queued_tokens if self._config.order == "fcfs" else 0  # in other orders it may pass them all
        wait_s = self.speed.time_for_s(num_ahead + num_tokens)
        deadline_ms = request.options.deadline_ms
        if deadline_ms is not None and load.num_queued >= load.num_free_slots and wait_s * 1000 > deadline_ms:
            raise OverloadedError(
                f"the request would wait for about {wait_s:.1f} s, longer than its deadline_ms of {deadline_ms}",
                retry_after_s=self.retry_after_s(load.num_queued_tokens),
            )
        return self._make_room(request, num_tokens, load)

    def retry_after_s(self, num_queued_tokens: int) -> float:
        """When to try again: half of a queue of so many tokens is likely to be gone then."""
        return min(max(_LEAST_RETRY_S, self.speed.time_for_s(num_queued_tokens) / 2), _MOST_RETRY_S)

    def limit_max_tokens(self, max_tokens: int, load: Load) -> int:
        """The most tokens that new work may generate now: fewer than it asked for while the queue is longer than ``degrade_at`` of its bound."""
        config = self._config
        if config.degraded_max_tokens is None or config.max_queued_requests is None:
            return max_tokens
        is_long = load.num_queued - load.num_free_slots >= config.degrade_at * config.max_queued_requests
        return min(max_tokens, config.degraded_max_tokens) if is_long else max_tokens

    def enter(self, sequence: Sequence, now_s: float) -> None:
        """Books a sequence that has been admitted."""
        account = self._account(sequence.request.options.tenant, now_s)
        account.num_requests += 1
        account.level -= sequence.num_prompt_tokens + sequence.max_tokens
        self._shedding.enter(sequence)

    def leave(self, sequence: Sequence, now_s: float) -> None:
        """Books the end of a sequence: what it was allowed and did not use goes back to its tenant."""
        account = self._account(sequence.request.options.tenant, now_s)
        account.num_requests -= 1
        unused = sequence.max_tokens - sequence.num_generated_tokens
        if sequence.num_cached_tokens is None:  # it never ran
            unused += sequence.num_prompt_tokens
        account.level = min(account.capacity, account.level + unused)

    def give_back(self, tenant: str, num_tokens: int, now_s: float) -> None:
        """Books that so many tokens of a sequence that has left were none of its tenant's use."""
        account = self._account(tenant, now_s)
        account.level = min(account.capacity, account.level + num_tokens)

    def _account(self, tenant: str, now_s: float) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account(self._tenants.of(tenant).tokens_per_minute, now_s)
        account.refill(now_s)
        return account

    def _check_tenant(self, request: Request, max_tokens: int, load: Load, now_s: float) -> None:
        tenant = request.options.tenant
        limits, account = self._tenants.of(tenant), self._account(tenant, now_s)
        whose = f"tenant {tenant!r}" if tenant else "this server's clients together"
        if limits.max_requests is not None and account.num_requests >= limits.max_requests:
            raise QuotaExceededError(
                f"{whose}: {account.num_requests} requests are in flight; at most {limits.max_requests} are allowed",
                retry_after_s=self.retry_after_s(load.num_queued_tokens),
            )
        if limits.tokens_per_minute is not None:
            wanted = len(request.prompt_token_ids) + max_tokens
            missing = min(wanted, account.capacity) - account.level  # one that wants more than a minute's worth waits for a full bucket
            if missing > 0:
                raise QuotaExceededError(
                    f"{whose}: the request may take {wanted} tokens, {max(0, int(account.level))} are left of {limits.tokens_per_minute} a minute",
                    retry_after_s=max(_LEAST_RETRY_S, missing / account.rate),
                )

    def _make_room(self, request: Request, num_tokens: int, load: Load) -> list[Sequence]:
        config = self._config
        num_over = -math.inf if config.max_queued_requests is None else load.num_queued - load.num_free_slots + 1 - config.max_queued_requests
        tokens_over = -math.inf
        if config.max_queued_tokens is not None and load.num_queued >= load.num_free_slots:
            tokens_over = load.num_queued_tokens + num_tokens - config.max_queued_tokens
        num_queued_tokens = Counter(load.num_queued_tokens_of)
        num_queued_tokens[request.options.tenant] += num_tokens
        shed: list[Sequence] = []
        while num_over > 0 or tokens_over > 0:
            sequences = self._shedding.choose(request, num_queued_tokens)
            if sequences is None:
                for sequence in reversed(shed):
                    self._shedding.enter(sequence)
                raise OverloadedError(
                    f"the queue is full: {load.num_queued} requests of {load.num_queued_tokens} tokens wait (scheduler.max_queued_requests is "
                    f"{config.max_queued_requests}, max_queued_tokens {config.max_queued_tokens})",
                    retry_after_s=self.retry_after_s(load.num_queued_tokens),
                )
            sequence = sequences.pop()
            shed.append(sequence)
            num_over -= 1
            tokens_over -= sequence.num_prompt_tokens
            num_queued_tokens[sequence.request.options.tenant] -= sequence.num_prompt_tokens
        return shed
