"""Admission to the queue: limits of its length, tenants' quotas, deadlines that cannot be met, and which requests must make room. Plain Python; no jax."""

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
"""Time over which the queue's speed is averaged, in seconds: older steps count less and less."""
_LEAST_RETRY_S = 1.0
_MOST_RETRY_S = 120.0
"""Largest retry time given to a client, in seconds, since a queue that hardly moves now may move well in a while."""


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """The part of the engine's state that admission depends on.

    Args:
        num_queued: Number of requests that have not run yet.
        num_queued_tokens: Number of tokens of their prompts.
        num_queued_tokens_of: Number of tokens of their prompts by tenant.
        num_free_slots: Number of free sequence slots. That many requests can start in the next step and do not count as queued.
    """

    num_queued: int
    num_queued_tokens: int
    num_queued_tokens_of: Mapping[str, int]
    num_free_slots: int


class QueueSpeed:
    """An estimate of how many prompt tokens leave the queue in a second, measured while requests wait."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._stuck_s = 0.0  # since the queue moved last

    def note(self, num_tokens: int, seconds: float) -> None:
        """Records a step that began while requests waited.

        Args:
            num_tokens: Prompt tokens that left the queue in the step.
            seconds: Duration of the step.
        """
        self._stuck_s += seconds
        if num_tokens:  # else what is known of the speed grows old, but no less true: the estimate grows as time passes, and no faster
            decay = math.exp(-self._stuck_s / _MEMORY_S)
            self._tokens = self._tokens * decay + num_tokens
            self._seconds = self._seconds * decay + self._stuck_s
            self._stuck_s = 0.0

    def time_for_s(self, num_tokens: int) -> float:
        """Seconds in which ``num_tokens`` prompt tokens are expected to leave the queue; 0 as long as nothing has been measured."""
        return num_tokens * (self._seconds + self._stuck_s) / self._tokens if self._tokens else 0.0


class _Account:
    """One tenant's use: its requests in flight, and a bucket of tokens that refills at a constant rate up to one minute's quota."""

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
    """Decides once about each request, when it arrives, and keeps the tenants' accounts.

    Args:
        config: The limits of the queue.
        tenants: The tenants' quotas and weights.

    Attributes:
        speed: Speed of the queue, from which waiting times are estimated.
    """

    def __init__(self, config: SchedulerConfig, tenants: Tenants) -> None:
        self.speed = QueueSpeed()
        self._config = config
        self._tenants = tenants
        self._accounts: dict[str, _Account] = {}
        self._shedding = make_shedding(config.order, tenants.weights)

    def check(self, request: Request, max_tokens: int, load: Load, now_s: float) -> list[Sequence]:
        """Decides whether a request may join the queue.

        Args:
            request: The request, which fits the context and the pool.
            max_tokens: Largest number of tokens that it may generate.
            load: The engine's state.
            now_s: The time in seconds.

        Returns:
            The queued sequences that must be removed to make room for it; see ``shedding``.

        Raises:
            QuotaExceededError: The request's tenant has used up its quota.
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
        """Seconds after which a client should try again: the time in which half of a queue of ``num_queued_tokens`` tokens is expected to leave it, within
        bounds.
        """
        return min(max(_LEAST_RETRY_S, self.speed.time_for_s(num_queued_tokens) / 2), _MOST_RETRY_S)

    def limit_max_tokens(self, max_tokens: int, load: Load) -> int:
        """Largest number of tokens that a new request may generate: ``max_tokens``, or at most ``degraded_max_tokens`` while the queue is longer than
        the fraction ``degrade_at`` of its limit.
        """
        config = self._config
        if config.degraded_max_tokens is None or config.max_queued_requests is None:
            return max_tokens
        is_long = load.num_queued - load.num_free_slots >= config.degrade_at * config.max_queued_requests
        return min(max_tokens, config.degraded_max_tokens) if is_long else max_tokens

    def enter(self, sequence: Sequence, now_s: float) -> None:
        """Charges the tenant's account for a sequence that has been queued: one request, its prompt and all the tokens that it may generate."""
        account = self._account(sequence.request.options.tenant, now_s)
        account.num_requests += 1
        account.level -= sequence.num_prompt_tokens + sequence.max_tokens
        self._shedding.enter(sequence)

    def leave(self, sequence: Sequence, now_s: float) -> None:
        """Settles the tenant's account at the end of a sequence: tokens that were charged and not used go back to it."""
        account = self._account(sequence.request.options.tenant, now_s)
        account.num_requests -= 1
        unused = sequence.max_tokens - sequence.num_generated_tokens
        if sequence.num_cached_tokens is None:  # it never ran
            unused += sequence.num_prompt_tokens
        account.level = min(account.capacity, account.level + unused)

    def give_back(self, tenant: str, num_tokens: int, now_s: float) -> None:
        """Returns ``num_tokens`` tokens to a tenant's account, for a sequence that has left already."""
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
