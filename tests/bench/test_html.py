"""Pages of runs in which much or everything failed."""

from __future__ import annotations

import dataclasses

import pytest

from jaxserve.bench.load.metrics import measure
from jaxserve.bench.load.session import Result
from jaxserve.bench.load.sweep import Sweep
from jaxserve.bench.report.html import to_page
from jaxserve.bench.workload.workload import Workload
from tests.bench.test_compare import turn

pytest.importorskip("matplotlib")


def level(rate: float, ttft_ms: float | None) -> Result:
    result = turn("a", 0, 10, ttft_ms).result
    return dataclasses.replace(result, workload=Workload(rate=rate), info=dataclasses.replace(result.info, model="$x$ <y>"))


@pytest.mark.parametrize("ttfts_ms", [(None,), (None, None), (20.0, None), (20.0, 30.0, None)])
def test_levels_that_failed_are_shown(ttfts_ms: tuple[float | None, ...]) -> None:
    results = tuple(level(rate, ttft_ms) for rate, ttft_ms in enumerate(ttfts_ms, 1))
    page = to_page(Sweep(results, "the server <went> away"))
    assert "$x$ &lt;y&gt;" in page
    if len(results) > 1:
        assert all(f"<td>{rate} req/s</td>" in page for rate in range(1, len(results) + 1))
        assert "the server &lt;went&gt; away" in page


def test_an_answer_without_any_text() -> None:
    result = level(1, None)
    (record,) = result.run.records
    run = dataclasses.replace(result.run, records=(dataclasses.replace(record, outcome="success"),))
    assert to_page(Sweep((dataclasses.replace(result, run=run, metrics=measure(run)),))).count("<svg") == 2
