"""Workloads and plans: the same bytes for the same seed, the distributions they claim, files read and refused."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxserve.bench.workload import arrivals
from jaxserve.bench.workload.lengths import parse_lengths, read_length_file
from jaxserve.bench.workload.plan import plan, read_sources, to_jsonl
from jaxserve.bench.workload.prompts import IdPrompts, WordPrompts
from jaxserve.bench.workload.randomness import seeded
from jaxserve.bench.workload.traces import read_trace
from jaxserve.bench.workload.workload import Workload, load_workload
from jaxserve.errors import ConfigError

ROOT = Path(__file__).parents[2]

EVERYTHING: dict[str, Any] = {
    "arrival": "gamma",
    "rate": 3.0,
    "burstiness": 0.5,
    "num_requests": 200,
    "input_len": "normal:100:30",
    "output_len": "uniform:5:50",
    "prefix_len": 64,
    "num_prefixes": 4,
    "turns": 3,
    "think_s": 2.0,
    "cancel_share": 0.2,
    "tenants": 5,
    "priorities": (0, 1, 5),
}


def text_of(workload: Workload) -> str:
    return to_jsonl(list(itertools.chain.from_iterable(plan(workload, read_sources(workload)))))


def kolmogorov(values: Sequence[float], cdf: Any) -> float:
    """The Kolmogorov-Smirnov statistic times the root of the sample's size: above 1.95 in one of a thousand samples of that distribution."""
    ordered, count = sorted(values), len(values)
    gaps = (max((rank + 1) / count - cdf(value), cdf(value) - rank / count) for rank, value in enumerate(ordered))
    return max(gaps) * math.sqrt(count)


def gaps_of(times: Any, count: int = 4000) -> list[float]:
    points = [0.0, *itertools.islice(times, count)]
    return [after - before for before, after in itertools.pairwise(points)]


def test_the_same_seed_gives_the_same_bytes() -> None:
    first, again = text_of(Workload(**EVERYTHING)), text_of(Workload(**EVERYTHING))
    assert first == again
    assert first != text_of(Workload(**EVERYTHING | {"seed": 1}))
    # On another machine and Python too.
    assert hashlib.sha256(first.encode()).hexdigest() == "e9dad6f75d11cbbf05937cea372a4206647a399c48ab222cfead72e92f027971"
    requests = list(itertools.chain.from_iterable(plan(Workload(**EVERYTHING))))
    prompts = json.dumps([IdPrompts().prompt(request.segments) for request in requests])
    assert hashlib.sha256(prompts.encode()).hexdigest() == "f7944b00c224c1f1fda5c03981c259aaa83705c311cc78c967e11922aee7ef5a"


def test_one_choice_does_not_move_another() -> None:
    """Other lengths leave the arrivals where they were, so that two runs differ in one thing."""
    plans = [list(itertools.chain.from_iterable(plan(Workload(**EVERYTHING | {"input_len": length})))) for length in ("100", "uniform:1:9")]
    assert [request.arrival_s for request in plans[0]] == [request.arrival_s for request in plans[1]]
    assert [request.priority for request in plans[0]] == [request.priority for request in plans[1]]


def test_poisson_gaps_are_exponential() -> None:
    gaps = gaps_of(arrivals.poisson(5.0, seeded("a")))
    assert kolmogorov(gaps, lambda gap: 1 - math.exp(-5.0 * gap)) < 1.95
    assert kolmogorov(gaps, lambda gap: 1 - math.exp(-5.5 * gap)) > 1.95  # the test has the power to tell


@pytest.mark.parametrize("shape", [2, 4])
def test_gamma_gaps_are_gamma_distributed(shape: int) -> None:
    def cdf(gap: float) -> float:  # Erlang: the closed form of whole shapes
        x = 5.0 * shape * gap
        return 1 - math.exp(-x) * sum(x**k / math.factorial(k) for k in range(shape))

    gaps = gaps_of(arrivals.gamma(5.0, shape, seeded("b")))
    assert kolmogorov(gaps, cdf) < 1.95
    assert kolmogorov(gaps, lambda gap: 1 - math.exp(-5.0 * gap)) > 1.95


def test_bursty_gamma_has_its_mean_and_variation() -> None:
    gaps = gaps_of(arrivals.gamma(5.0, 0.25, seeded("c")), 20_000)
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("kind", ["ramp", "diurnal"])
def test_changing_rates_are_poisson_in_rescaled_time(kind: str) -> None:
    if kind == "ramp":
        times = arrivals.ramp(2.0, 10.0, 300.0, seeded("d"))
        expected = lambda t: 2 * t + 8 * t * t / 600 if t < 300 else 1800 + 10 * (t - 300)  # noqa: E731
    else:
        times = arrivals.diurnal(5.0, 0.8, 60.0, seeded("e"))
        turn = 2 * math.pi / 60
        expected = lambda t: 5 * (t + 0.8 / turn * (1 - math.cos(turn * t)))  # noqa: E731
    points = [0.0, *(expected(time_s) for time_s in itertools.islice(times, 1500))]
    assert kolmogorov([after - before for before, after in itertools.pairwise(points)], lambda gap: 1 - math.exp(-gap)) < 1.95


def test_steady_and_burst_times() -> None:
    assert list(itertools.islice(arrivals.steady(4.0), 3)) == [0, 0.25, 0.5]
    assert list(itertools.islice(arrivals.burst(2.0, 3), 7)) == [0, 0, 0, 1.5, 1.5, 1.5, 3.0]


def test_lengths_follow_their_distributions() -> None:
    rng = seeded("lengths")
    normal = [parse_lengths("normal:100:20", "x").draw(rng) for _ in range(4000)]
    assert statistics.fmean(normal) == pytest.approx(100, abs=1.5)
    assert statistics.pstdev(normal) == pytest.approx(20, rel=0.06)
    assert min(parse_lengths("normal:2:20", "x").draw(rng) for _ in range(1000)) == 1
    uniform = [parse_lengths("uniform:3:7", "x").draw(rng) for _ in range(1000)]
    assert set(uniform) == {3, 4, 5, 6, 7}
    assert parse_lengths("17", "x").draw(rng) == 17


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "1.5", "x", "uniform:3", "uniform:7:3", "uniform:0:3", "normal:0:3", "normal:5", "normal:nan:2", "1:2:3", "1e99"]
)
def test_bad_lengths(text: str) -> None:
    with pytest.raises(ConfigError, match="input_len"):
        parse_lengths(text, "input_len")


def test_joint_lengths(tmp_path: Path) -> None:
    histogram = tmp_path / "histogram.json"
    bins = [{"input": [10, 19], "output": [1, 1], "weight": 3}, {"input": [900, 999], "output": [50, 60], "weight": 1}, {"input": [5, 2]}]
    histogram.write_text(json.dumps({"bins": bins}))
    file = read_length_file(str(histogram))
    assert file.broken == 1
    drawn = list(itertools.islice(file.pairs(seeded("h"), len), 4000))
    short = [pair for pair in drawn if pair[0] < 20]
    assert {output for _, output in short} == {1}
    assert len(short) == pytest.approx(3000, abs=120)

    sharegpt = tmp_path / "sharegpt.json"
    turns = [{"from": "human", "value": "one two three"}, {"from": "gpt", "value": "four"}]
    sharegpt.write_text(
        json.dumps([{"conversations": turns}, {"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d e"}]}, {}])
    )
    work = Workload(rate=1, lengths=str(sharegpt), num_requests=50)
    pairs = {(request.input_len, request.output_len) for (request,) in plan(work, read_sources(work), lambda text: len(text.split()))}
    assert pairs == {(3, 1), (2, 3)}


def test_published_traces_are_read(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n")
    rows = read_trace(str(azure)).rows
    assert [(row.input_len, row.output_len) for row in rows] == [(374, 44), (396, 109)]
    assert rows[1].arrival_s == pytest.approx(4.314579)
    burst_gpt = tmp_path / "burst.csv"
    burst_gpt.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,230,1317,x\n"
    )
    assert [row.arrival_s for row in read_trace(str(burst_gpt)).rows] == [0, 40]
    mooncake = tmp_path / "mooncake.jsonl"
    mooncake.write_text(
        '{"timestamp": 2500, "input_length": 9, "output_length": 2, "hash_ids": [1]}\n{"timestamp": 0, "input_length": 7, "output_length": 1}\n'
    )
    assert [(row.arrival_s, row.input_len) for row in read_trace(str(mooncake), unit="ms").rows] == [(0, 7), (2.5, 9)]


def test_a_column_without_a_name_is_read_for_no_other(tmp_path: Path) -> None:
    """Tables are often saved with their row numbers in a first column without a name."""
    file = tmp_path / "trace.csv"
    file.write_text(",timestamp,input_length\n" + "".join(f"{index},{index},5\n" for index in range(1, 5)))
    with pytest.raises(ConfigError, match="4 of 4 rows cannot be read"):
        read_trace(str(file))


def test_paths_in_a_file_are_relative_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / "work.yaml"
    file.write_text("arrival: trace\ntrace: trace.csv\nlengths: trace\n")
    monkeypatch.chdir(tmp_path)
    named = load_workload(Path("a/work.yaml"), {})
    assert (named.trace, named.lengths) == ("a/trace.csv", "trace")
    assert load_workload(file, {"trace": "other.csv"}).trace == "other.csv"
    file.write_text(f"rate: 1\nlengths: {tmp_path}/joint.json\n")
    assert load_workload(file, {}).lengths == f"{tmp_path}/joint.json"


def test_broken_rows_are_counted_and_too_many_are_fatal(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    good = '{"timestamp": 1, "input_tokens": 5, "output_tokens": 5}\n'
    bad = ['{"timestamp": "x", "input_tokens": 5, "output_tokens": 5}', '{"timestamp": 1, "input_tokens": 0, "output_tokens": 5}', "{", "7", '{"timestamp": 1}']
    file.write_text(good * 5 + "\n".join(bad))
    assert read_trace(str(file)).broken == 5
    file.write_text(good * 4 + "\n".join(bad))
    with pytest.raises(ConfigError, match="5 of 9 rows cannot be read"):
        read_trace(str(file))
    file.write_text("")
    with pytest.raises(ConfigError, match="0 of 0"):
        read_trace(str(file))
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(str(tmp_path / "none.csv"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rate": "2", "concurrency": "4"}, "rate is 2.0 but arrival is 'closed'"),
        ({}, "needs rate"),
        ({"arrival": "closed"}, "needs concurrency"),
        ({"arrival": "ramp", "rate": 1}, "needs end_rate"),
        ({"rate": 1, "swing": 0.5}, "swing belongs to diurnal"),
        ({"rate": 0}, "rate is 0.0; must be in"),
        ({"rate": "nan"}, "rate"),
        ({"rate": 1, "lengths": "trace"}, "needs trace"),
        ({"rate": 1, "trace": "x.csv", "input_len": "5"}, "nothing would be read"),
        ({"trace": "x.csv", "lengths": "trace", "arrival": "trace", "turns": 2}, "turns must be 1"),
        ({"rate": 1, "tenant": 3}, "did you mean 'tenants'"),
        ({"rate": 1, "input_len": "lots"}, "input_len is 'lots'"),
        ({"rate": 1, "cancel_share": 1.5}, "cancel_share"),
        ({"arrival": "sinus", "rate": 1}, "arrival"),
    ],
)
def test_contradictions_and_bad_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_workload(None, values)


def test_what_options_imply() -> None:
    assert load_workload(None, {"concurrency": 2}).arrival == "closed"
    assert load_workload(None, {"rate": 2, "burstiness": 0.5}).arrival == "gamma"
    assert load_workload(None, {"rate": 2, "arrival": "steady"}).arrival == "steady"
    replayed = load_workload(None, {"trace": "x.csv"})
    assert (replayed.arrival, replayed.lengths) == ("trace", "trace")
    assert load_workload(None, {"trace": "x.csv", "input_len": "5"}).lengths is None
    assert load_workload(None, {"trace": "x.csv", "rate": 3}).arrival == "poisson"


@pytest.mark.parametrize("name", sorted(file.name for file in (ROOT / "configs" / "workloads").glob("*.yaml")))
def test_workload_files(name: str) -> None:
    file = ROOT / "configs" / "workloads" / name
    assert len(text_of(load_workload(file, {"num_requests": 20})).splitlines()) == 20
    closed = load_workload(file, {"concurrency": 4, "num_requests": 20})
    assert closed.arrival == "closed"
    assert closed.rate is None
    assert load_workload(file, {"rate": 9}).rate == 9


def test_prompts_have_their_lengths_and_share_what_they_should() -> None:
    requests = [request for (request,) in plan(Workload(rate=1, num_requests=3, input_len="20", prefix_len=50))]
    ids = [IdPrompts().prompt(request.segments) for request in requests]
    assert [len(prompt) for prompt in ids] == [70, 70, 70]
    assert ids[0][:50] == ids[1][:50] == ids[2][:50]
    assert ids[0][50:] != ids[1][50:]
    words = WordPrompts(overhead=3)
    assert [len(words.prompt(request.segments).split()) for request in requests] == [67, 67, 67]
    messages = words.messages(requests[0].segments)
    assert [message["role"] for message in messages] == ["system", "user"]
    assert sum(len(message["content"].split()) for message in messages) == 67


def test_runs_of_a_plan_differ_in_their_prompts_alone() -> None:
    work = load_workload(None, {"rate": 2, "num_requests": 6, "prefix_len": 5, "turns": 2, "input_len": "uniform:1:50"})
    first, second = (list(itertools.chain.from_iterable(plan(work, run=run))) for run in (0, 3))
    assert [dataclasses.replace(request, segments=()) for request in first] == [dataclasses.replace(request, segments=()) for request in second]
    assert [[segment.length for segment in request.segments] for request in first] == [[segment.length for segment in request.segments] for request in second]
    assert not {segment.key for request in first for segment in request.segments} & {segment.key for request in second for segment in request.segments}
