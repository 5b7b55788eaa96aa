"""Reading a server's ``/metrics`` page from afar, and what two readings say about the time between them."""

from __future__ import annotations

import dataclasses
import http.client
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence

from prometheus_client.parser import text_string_to_metric_families

from jaxserve.bench.load.buckets import Buckets
from jaxserve.errors import ConfigError, JaxserveError

_TIMEOUT_S = 5.0
_MAX_PAGE_BYTES = 16 * 2**20


class ScrapeError(JaxserveError):
    """A server that does not answer, or whose page is no jaxserve server's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """One look at a page.

    Args:
        time_s: When it was, of a monotonic clock.
        samples: Name of a sample -> its series, each a pair of labels and value.
    """

    time_s: float
    samples: Mapping[str, Sequence[tuple[Mapping[str, str], float]]]

    def value(self, name: str) -> float:
        """A sample, summed over its series; 0 if the page does not have it."""
        return sum(value for _, value in self.samples.get(name, ()))

    def label(self, name: str, label: str) -> str | None:
        """A label of the first series that is not 0."""
        return next((labels.get(label) for labels, value in self.samples.get(name, ()) if value), None)

    def buckets(self, family: str) -> Buckets:
        """A histogram, summed over its series."""
        totals: dict[float, float] = {}
        for labels, value in self.samples.get(f"{family}_bucket", ()):
            bound = float(labels["le"])
            totals[bound] = totals.get(bound, 0.0) + value
        return Buckets.of_totals(totals)

    def is_older_run(self, later: Reading) -> bool:
        """Whether the server has been started anew between this reading and a later one."""
        return later.value("jaxserve_steps_total") < self.value("jaxserve_steps_total") or later.value("process_start_time_seconds") != self.value(
            "process_start_time_seconds"
        )


def metrics_url(url: str) -> str:
    """Where a server's page is.

    Args:
        url: The server, with or without a scheme, ``/v1`` or ``/metrics`` at its end.

    Raises:
        ConfigError: It is no HTTP URL.
    """
    full = url if "://" in url else f"http://{url}"
    try:
        parts = urllib.parse.urlsplit(full)
        has_host = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # a port that is no number, or an unclosed bracket
        parts, has_host = urllib.parse.SplitResult("", "", "", "", ""), False
    if parts.scheme not in ("http", "https") or not has_host:
        raise ConfigError(f"--url is {url!r}; must be a server such as http://localhost:8000")
    path = parts.path.rstrip("/").removesuffix("/metrics").removesuffix("/v1")
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc, f"{path}/metrics", "", ""))


def read_page(url: str) -> Reading:
    """Reads a page now.

    Raises:
        ScrapeError: No answer, an answer that is none, or a page without jaxserve's metrics.
    """
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:  # noqa: S310  (metrics_url lets only HTTP through)
            text = response.read(_MAX_PAGE_BYTES).decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        with error:
            raise ScrapeError(f"{url} answers {error.code} {error.reason}; is this a jaxserve server?") from None
    except http.client.HTTPException:
        raise ScrapeError(f"{url} does not answer in HTTP; is this the server's HTTP port?") from None
    except OSError as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise ScrapeError(f"{url} cannot be read: {reason}; --url names another server") from None
    reading = parse_page(text, time.monotonic())
    if "jaxserve_engine_state" not in reading.samples:
        raise ScrapeError(f"{url} is not a jaxserve server's page of metrics")
    return reading


def parse_page(text: str, time_s: float) -> Reading:
    """Takes a page apart; what cannot be parsed gives a reading without samples."""
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except (ValueError, KeyError, IndexError):  # the parser's ways to say that this is no such page
        return Reading(time_s, {})
    return Reading(time_s, samples)
