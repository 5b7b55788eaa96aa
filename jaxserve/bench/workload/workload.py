"""A workload as plain data: what a user can ask for, from options or a YAML file. ``plan.py`` turns it into requests."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from jaxserve.bench.workload.lengths import parse_lengths
from jaxserve.config_fields import Between, NotBlank, check, coerce
from jaxserve.config_yaml import read_yaml
from jaxserve.errors import ConfigError

Arrival = Literal["closed", "steady", "poisson", "gamma", "burst", "diurnal", "ramp", "trace"]

DEFAULT_NUM_REQUESTS = 100
"""Where neither a number nor a duration is given, and no trace that has an end of its own."""

_OWN_FIELDS: Mapping[str, tuple[Arrival, ...]] = {
    "rate": ("steady", "poisson", "gamma", "burst", "diurnal", "ramp"),
    "concurrency": ("closed",),
    "burstiness": ("gamma",),
    "burst_size": ("burst",),
    "period_s": ("diurnal",),
    "swing": ("diurnal",),
    "end_rate": ("ramp",),
}
"""Field -> the kinds of arrival that read it: given with another kind it would be ignored, and that is an error instead."""

_NEEDED: Mapping[Arrival, tuple[str, ...]] = {
    "closed": ("concurrency",),
    "steady": ("rate",),
    "poisson": ("rate",),
    "gamma": ("rate", "burstiness"),
    "burst": ("rate", "burst_size"),
    "diurnal": ("rate", "period_s"),
    "ramp": ("rate", "end_rate"),
    "trace": ("trace",),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests over time. Times are seconds, lengths tokens; equal workloads give equal requests, byte for byte.

    Args:
        arrival: ``closed`` keeps ``concurrency`` requests running; ``steady`` sends at equal gaps; ``poisson`` at exponential, ``gamma`` at gamma-distributed
            gaps; ``burst`` sends ``burst_size`` at once, again and again; ``diurnal`` is Poisson with a rate that swings like a day; ``ramp`` is Poisson
            from ``rate`` to ``end_rate``; ``trace`` sends at the trace's times.
        rate: Requests per second, on average; at the start for ``ramp``.
        concurrency: Of ``closed``: how many requests (or sessions) run at any time.
        burstiness: Shape of the gamma distribution: 1 is Poisson, less is burstier, more is steadier.
        burst_size: Requests of a burst.
        period_s: Length of a ``diurnal`` day.
        swing: Of ``diurnal``: the rate goes from ``rate * (1 - swing)`` to ``rate * (1 + swing)``; 0.8 if left out.
        end_rate: Requests per second at the end of a ``ramp``.
        trace: A file of timestamped requests, CSV or JSON lines (docs/benchmarking.md). Its path, and that of ``lengths``, is relative to the YAML file
            that names it, else to the current folder.
        trace_unit: Of numeric timestamps in the trace.
        trace_speedup: Replay the trace that many times faster.
        num_requests: How many; ``None`` for no limit but ``duration_s``. With neither, the whole trace, or 100.
        duration_s: Nothing is sent after that long; what runs then runs to its end.
        input_len: Prompt tokens: ``128``, ``uniform:64:256`` or ``normal:MEAN:STD`` (never below 1).
        output_len: Tokens to generate, in the same form.
        lengths: Prompt and output lengths together, instead of both above: a file with a joint histogram or ShareGPT's conversations, or ``trace``.
        prefix_len: Tokens that prompts share; they come before the ``input_len`` own ones.
        num_prefixes: How many different shared prefixes there are; a request takes one at random.
        turns: Requests of a session. Each repeats the conversation so far (answers as made-up tokens of their planned length) and adds its own tokens.
        think_s: Pause between an answer and the session's next request: exponentially distributed, with this mean.
        cancel_share: Share of the requests whose client goes away.
        cancel_after_s: They go at a random moment up to this long after sending.
        tenants: Number of tenants, sent as OpenAI's ``user``; 0 sends none.
        priorities: Each request gets one of these at random, sent as vLLM's ``priority``; empty sends none.
        endpoint: ``completions`` or ``chat``.
        seed: Of everything random.

    Raises:
        ConfigError: A value out of its range, or two that contradict each other.
    """

    arrival: Arrival = "poisson"
    rate: Annotated[float, Between(0, 1e6, open_low=True)] | None = None
    concurrency: Annotated[int, Between(1, 100_000)] | None = None
    burstiness: Annotated[float, Between(0, 1e6, open_low=True)] | None = None
    burst_size: Annotated[int, Between(1, 100_000)] | None = None
    period_s: Annotated[float, Between(0, 1e7, open_low=True)] | None = None
    swing: Annotated[float, Between(0, 1)] | None = None
    end_rate: Annotated[float, Between(0, 1e6, open_low=True)] | None = None
    trace: Annotated[str, NotBlank()] | None = None
    trace_unit: Literal["s", "ms"] = "s"
    trace_speedup: Annotated[float, Between(0, 1e6, open_low=True)] = 1.0
    num_requests: Annotated[int, Between(1, 10_000_000)] | None = None
    duration_s: Annotated[float, Between(0, 1e7, open_low=True)] | None = None
    input_len: Annotated[str, NotBlank()] = "128"
    output_len: Annotated[str, NotBlank()] = "128"
    lengths: Annotated[str, NotBlank()] | None = None
    prefix_len: Annotated[int, Between(0, 10_000_000)] = 0
    num_prefixes: Annotated[int, Between(1, 1_000_000)] = 1
    turns: Annotated[int, Between(1, 10_000)] = 1
    think_s: Annotated[float, Between(0, 1e6)] = 0.0
    cancel_share: Annotated[float, Between(0, 1)] = 0.0
    cancel_after_s: Annotated[float, Between(0, 1e6, open_low=True)] = 1.0
    tenants: Annotated[int, Between(0, 1_000_000)] = 0
    priorities: tuple[int, ...] = ()
    endpoint: Literal["completions", "chat"] = "completions"
    seed: int = 0

    def __post_init__(self) -> None:
        for key, annotation in _declared().items():
            check(getattr(self, key), annotation, key)
        for key in _NEEDED[self.arrival]:
            if getattr(self, key) is None:
                raise ConfigError(
                    f"arrival is {self.arrival!r}, which needs {key}{' (concurrency, burstiness or a trace imply other kinds)' if key == 'rate' else ''}"
                )
        for key, kinds in _OWN_FIELDS.items():
            if getattr(self, key) is not None and self.arrival not in kinds:
                raise ConfigError(f"{key} is {getattr(self, key)} but arrival is {self.arrival!r}; {key} belongs to {' and '.join(kinds)}")
        if self.lengths == "trace" and self.trace is None:
            raise ConfigError("lengths is 'trace', which needs trace")
        if self.trace is not None and self.arrival != "trace" and self.lengths != "trace":
            raise ConfigError(f"trace is {self.trace!r} but neither arrival nor lengths is 'trace', so nothing would be read from it")
        if self.turns > 1 and self.lengths == "trace":
            raise ConfigError(f"turns is {self.turns} but lengths come from the trace, whose rows are whole requests; turns must be 1")
        for key in ("input_len", "output_len"):
            parse_lengths(getattr(self, key), key)


def load_workload(file: Path | None, values: Mapping[str, Any]) -> Workload:
    """A workload from a YAML file of its fields, then ``values`` over it.

    Where ``values`` name no arrival they imply one: ``concurrency`` a closed loop, ``burstiness`` gamma, ``trace`` its replay, ``rate`` what the file says or
    Poisson. A trace brings its lengths where no others are given. Fields of the file that belong to another kind of arrival than the one in force are
    dropped; among ``values`` they are errors.

    Args:
        file: May be ``None``.
        values: Field -> value; text is read by the field's annotation.

    Raises:
        ConfigError: A file that cannot be read, an unknown field, a value that cannot be used, or two that contradict each other.
    """
    from_file: dict[str, Any] = {}
    if file is not None:
        try:
            from_file = _beside(file, _read(read_yaml(file)))
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from None
    given = _read(values)
    if "arrival" not in given and (implied := _implied_arrival(given, from_file)) is not None:
        given["arrival"] = implied
    arrival = given.get("arrival", from_file.get("arrival"))
    if "arrival" in given:
        from_file = {key: value for key, value in from_file.items() if arrival in _OWN_FIELDS.get(key, (arrival,))}
    merged = from_file | given
    if merged.get("trace") is not None and not merged.keys() & {"lengths", "input_len", "output_len"}:
        merged["lengths"] = "trace"
    return Workload(**merged)


def _implied_arrival(given: Mapping[str, Any], from_file: Mapping[str, Any]) -> Arrival | None:
    if given.get("concurrency") is not None:
        return "closed"
    if given.get("burstiness") is not None:
        return "gamma"
    if given.get("rate") is not None:
        return None if from_file.get("arrival", "closed") in _OWN_FIELDS["rate"] else "poisson"
    return "trace" if given.get("trace") is not None else None


def _beside(file: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a file whose paths are relative to its folder, relative to the current one."""
    paths = {key: path for key in ("trace", "lengths") if (path := fields.get(key)) is not None and (key, path) != ("lengths", "trace")}
    return fields | {key: str(file.parent / Path(path).expanduser()) for key, path in paths.items()}


def _read(given: Mapping[str, Any]) -> dict[str, Any]:
    for key in given:
        if key not in _declared():
            close = difflib.get_close_matches(key, _declared(), n=1)
            raise ConfigError(f"unknown field {key!r} of a workload; {f'did you mean {close[0]!r}?' if close else 'known: ' + ', '.join(_declared())}")
    return {key: coerce(value, _declared()[key], key) for key, value in given.items()}


@cache
def _declared() -> dict[str, Any]:
    return get_type_hints(Workload, include_extras=True)
