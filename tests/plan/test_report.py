"""The command and its reports over compilers that answer at once: what is printed, marked, sorted, advised, and how it exits."""

import json

import pytest
from typer.testing import CliRunner

from jaxserve.cli.app import app
from jaxserve.config import load_config
from jaxserve.errors import ConfigError
from jaxserve.kernels_pallas.chips import GIB
from jaxserve.models.loading.specs import open_spec
from jaxserve.plan import planner
from jaxserve.plan.request import LayoutRequest
from jaxserve.plan.topology import parse_topology

MODEL = "llama-3.1-70b"


def fake_rows(module, arguments, environment, *, time_limit_s):
    """A compiler that knows no temporaries, copies nothing, and reduces twice a layer and once for the embedding."""
    request = LayoutRequest.from_json(arguments[0])
    spec, config = open_spec(request.source)[1], load_config(overrides=request.settings)
    question = planner.Question(source=request.source, name=MODEL, spec=spec, config=config, settings=request.settings, load=request.load)
    target = parse_topology(request.target)
    split = question.split(target, request.mesh)
    weights, kv = sum(split.parameter_bytes().values()), question.pool_bytes(split)
    yield {"arrays": {"weights": weights, "kv": kv}, "attention": "pallas_tpu", "layers": "scan"}, ""
    if weights + kv > target.chip.usable_bytes:
        yield {"error": "Ran out of memory on HBM", "kind": "memory"}, ""
        return
    tokens = request.load.tokens(request.step, request.mesh.data)
    reduces = {"kind": "all-reduce", "axis": "model", "count": 161, "bytes": 161 * tokens * 8192 * 2, "group_size": request.mesh.model}
    yield {
        "compile_s": 3.0, "temp": GIB // 8, "total": weights + kv + GIB // 8,
        "traffic": {"collectives": [reduces] if request.mesh.model > 1 else [], "sometimes": [], "weight_copy_bytes": 0, "num_unknown_loops": 0},
    }, ""  # fmt: skip


@pytest.fixture(autouse=True)
def compilers(monkeypatch):
    monkeypatch.setattr(planner, "rows_of", fake_rows)
    monkeypatch.setattr(planner.targets, "missing", lambda target: None)


def run(*words):
    return CliRunner().invoke(app, ["plan", *words])


def layouts(*words):
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["layouts"]


def test_json_is_one_object_of_the_documented_form():
    found = layouts(MODEL, "--on", "v6e:2x4", "--on", "h200:8")
    assert [(one["target"], one["mesh"]["data"], one["mesh"]["model"], one["fits"]) for one in found] == [
        ("v6e:2x4", 1, 8, True), ("v6e:2x4", 2, 4, False), ("v6e:2x4", 4, 2, False), ("v6e:2x4", 8, 1, False),
        ("h200:8", 1, 8, True), ("h200:8", 2, 4, True), ("h200:8", 4, 2, True), ("h200:8", 8, 1, False),
    ]  # fmt: skip
    first = found[0]
    assert first["bytes_per_device"]["weights"] == pytest.approx(17.64e9, rel=0.001)
    assert first["decode"]["collectives"] == [{"kind": "all-reduce", "axis": "model", "count": 161, "bytes": 161 * 64 * 8192 * 2}]
    assert first["decode"]["predicted"]["weights_ms"] == pytest.approx(10.6, abs=0.05)
    assert first["compile_s"] == 6.0 and set(first["best_for"]) == {"latency", "throughput"}
    assert first["mixed"]["predicted"]["step_ms"] > first["decode"]["predicted"]["step_ms"]
    misfit = found[1]
    assert misfit["decode"] is None and misfit["mixed"] is None and misfit["reason"] == "decode step: Ran out of memory on HBM"
    assert misfit["bytes_per_device"]["weights"] == pytest.approx(35.3e9, rel=0.001) and misfit["missing_bytes"] > 0


def test_the_best_are_marked_and_say_why():
    found = layouts(MODEL, "--on", "h200:8")
    assert {tuple(one["mesh"].values()): one["best_for"] for one in found if one["best_for"]} == {(1, 8): ["latency", "throughput"]}
    text = run(MODEL, "--on", "h200:8").stdout
    assert "best for latency on h200:8: data=1,model=8: a decode step takes" in text and "bound by" in text
    assert "best for throughput on h200:8" in text and "tokens/s a chip with its memory full" in text
    assert "predictions" in text


def test_sorting():
    def order(key):
        return [tuple(one["mesh"].values()) for one in layouts(MODEL, "--on", "h200:8", "--sort", key)]

    assert order("given")[0] == (1, 8) and order("memory")[0] == (1, 8) and order("room")[-1] == (8, 1)
    found = layouts(MODEL, "--on", "h200:8", "--sort", "throughput")
    rates = [one["room"]["predicted"]["tokens_per_s_per_chip"] for one in found if one["room"]]
    assert rates == sorted(rates, reverse=True)
    times = [one["decode"]["predicted"]["step_ms"] for one in layouts(MODEL, "--on", "h200:8", "--sort", "latency") if one["fits"]]
    assert times == sorted(times)


def test_the_budget_stands_beside_the_compilers_figures():
    text = run(MODEL, "--on", "v6e:2x4", "--mesh", "data=1,model=8", "--budget").stdout
    assert "8.820e9 weights of 2 bytes on each of 8 model ranks" in text
    assert "2 x 80 layers x 1 KV heads x 128 x 2 bytes" in text and "40.00 KiB" in text
    # 31.24 GiB less 16.43 of weights, nine tenths of it, in tokens of 40 KiB.
    tokens = int(0.9 * (31.24 * GIB - 17_640_734_720) / 40_960)
    assert f"{tokens:,}" in text
    for length, name in ((4096, "4k"), (16_384, "16k"), (131_072, "128k")):
        line = next(line for line in text.splitlines() if f"requests of {name}" in line)
        assert line.split()[3:5] == [str(tokens // length)] * 2


def test_a_budget_is_part_of_the_json_too():
    (found,) = layouts(MODEL, "--on", "v6e:2x4", "--mesh", "data=1,model=8", "--budget")
    lines = {line["name"]: line for line in found["budget"]}
    assert lines["KV of one token"]["by_hand"] == lines["KV of one token"]["compiled"] == 40_960


def test_a_model_that_fits_nowhere_says_by_how_much_and_what_would_fit():
    result = run(MODEL, "--on", "v6e:2x2", "--json")
    assert result.exit_code == 1
    assert [one["fits"] for one in json.loads(result.stdout)["layouts"]] == [False] * 3
    assert "fits on no layout of v6e:2x2: data=1,model=4 comes nearest and needs 52.9 GiB" in result.stderr
    assert "21.6 GiB more than there is (31.2 GiB)" in result.stderr
    assert "more chips: v6e:2x4" in result.stderr
    little = run("llama-3.1-8b", "--on", "v5e:1x1", "--batch", "2", "--context", "16384")
    assert little.exit_code == 1 and "weights of 8 bits" in little.stderr
    long = run("llama-3.1-8b", "--on", "h200:1", "--context", "131072")
    assert "less context: " in long.stderr


def test_a_page_without_a_folder_is_refused_before_anything_compiles(tmp_path, monkeypatch):
    monkeypatch.setattr(planner, "rows_of", None)
    result = run(MODEL, "--on", "h200:8", "--html", str(tmp_path / "none" / "plan.html"))
    assert isinstance(result.exception, ConfigError) and "there is no folder" in str(result.exception)


def test_a_page_is_self_contained(tmp_path):
    pytest.importorskip("matplotlib")
    page = tmp_path / "plan.html"
    assert run(MODEL, "--on", "h200:8", "--html", str(page)).exit_code == 0
    text = page.read_text()
    assert text.count("<svg") == 4 and "data=1,model=8" in text
    assert "<script" not in text and "src=" not in text and "<link" not in text


def test_measured_steps_stand_beside_the_predicted(tmp_path):
    file = tmp_path / "measured.jsonl"
    file.write_text('{"target": "h200:8", "mesh": {"data": 1, "model": 8}, "step": "decode", "step_ms": 18.0}\n\n')
    words = (MODEL, "--on", "h200:8", "--mesh", "data=1,model=8", "--measured", str(file))
    (found,) = layouts(*words)
    assert found["decode"]["measured"] == {"step_ms": 18.0} and "measured" not in found["mixed"]
    ratio = 18 / found["decode"]["predicted"]["step_ms"]
    assert f"18.00 ms, {ratio:.2f} times the predicted" in run(*words).stdout
    file.write_text('{"target": "h200:8", "step": "decode", "step_ms": 18.0}')
    assert "line 1 must hold" in str(run(*words).exception)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--on", "v9:2x2"), "unknown chip 'v9'"),
        (("--on", "v6e:5x5"), "v6e does not come as '5x5'"),
        (("--on", "v6e:2x4", "--mesh", "data=3,model=8"), "needs 24 devices; v6e:2x4 has 8"),
        (("--on", "v6e:2x4", "--mesh", "rows=3"), "has an axis 'rows'"),
        (("--on", "v6e:2x4", "--mesh", "data=2,data=4"), "twice"),
        (("--on", "v6e:2x4", "--context", "200000"), "must be in [2, 131072]"),
        (("--on", "v6e:2x4", "sharding.width=[model]"), "both split"),
        (("--on", "v6e:2x4", "model.dtyp=float32"), "did you mean"),
    ],
)
def test_bad_input(words, message):
    result = run(MODEL, *words)
    if isinstance(result.exception, ConfigError):
        assert message in str(result.exception)
    else:
        assert result.exit_code == 1 and message in result.stdout + result.stderr


def test_layouts_that_cannot_be_split_are_refused_by_name():
    found = layouts(MODEL, "--on", "v6e:4x4", "--mesh", "data=1,model=16", "--mesh", "data=2,model=8")
    assert found[0]["status"] == "refused" and "replicate_kv_heads" in found[0]["reason"] and found[1]["fits"]
    assert layouts(MODEL, "--on", "v6e:4x4", "--mesh", "data=1,model=16", "mesh.replicate_kv_heads=true")[0]["fits"]


def test_unknown_models_are_named():
    result = run("no-such-model", "--on", "v6e")
    assert "no-such-model" in str(result.exception)
