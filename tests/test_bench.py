"""scripts/bench: its arithmetic, its clients, and one short run against a real server."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
import yaml
from websockets.sync.server import ServerConnection, serve

from handler.policy import Gr00tPolicy
from handler.wire import Part, Request, decode
from scripts import bench, bench_client
from scripts.bench import BenchError, Clients, Tally, arguments, ceiling, ceiling_rows, figures, parse_setup, percentile
from scripts.package import ROOT, ConfigError, merge_config
from scripts.report import machine
from tests.client import openpi
from tests.conftest import LIBERO

BATCHED = {"batchSize": 8, "maxBatchDelay": 1, "jobQueueSize": 100, "minWorkers": 1}

# ------------------------------------------------------------------------------------------------------- arithmetic


def test_percentiles_are_by_nearest_rank() -> None:
    values = list(range(100, 0, -1))
    assert [percentile(values, q) for q in (50, 95, 99, 100)] == [50, 95, 99, 100]
    assert percentile([3.0, 1.0], 50) == 1.0 and percentile([3.0, 1.0], 51) == 3.0
    assert percentile([7.0], 99) == 7.0
    assert np.isnan(percentile([], 50))


def test_a_poisson_process_has_its_rate_and_no_memory() -> None:
    arrivals = bench.poisson(1000.0, 100.0, seed=3)
    assert np.array_equal(arrivals, bench.poisson(1000.0, 100.0, seed=3))
    assert not np.array_equal(arrivals[:100], bench.poisson(1000.0, 100.0, seed=4)[:100])
    assert abs(len(arrivals) - 100_000) < 5 * 100_000**0.5
    assert (arrivals >= 0).all() and (arrivals < 100).all()
    gaps = np.diff(arrivals)
    assert (gaps >= 0).all()
    assert abs(gaps.std() / gaps.mean() - 1) < 0.02  # exponential gaps
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.02


def test_clients_share_the_arrivals() -> None:
    args = arguments(["--open-loop", "50", "--open-clients", "3", "--seconds", "4", "--clients"])
    assert bench.loads(args) == [{"rate": 50.0, "clients": 3}]
    parts = [what["arrivals"] for what in bench.schedules(bench.loads(args)[0], args, turn=1)]
    assert len(parts) == 3 and max(map(len, parts)) - min(map(len, parts)) <= 1
    assert sorted(at for part in parts for at in part) == bench.poisson(50.0, 4.0, seed=1).tolist()


def test_a_closed_loop_is_bounded_by_requests_or_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(bench_client.time, "monotonic", lambda: clock[0])

    def due(**order: Any) -> list[float]:
        clock[0], seen = 100.0, []
        for time in bench_client.due_times({"arrivals": None, "phase": 0.0, "think": 0.0, "requests": None,
                                            "seconds": None, **order}, 100.0):  # fmt: skip
            seen.append(round(time, 6))
            clock[0] = max(clock[0], time) + 0.25  # an answer takes 250 ms
        return seen

    assert due(requests=3) == [100.0, 100.25, 100.5]
    assert due(requests=3, think=0.5, phase=0.1) == [100.1, 100.85, 101.6]
    assert due(seconds=1.0) == [100.0, 100.25, 100.5, 100.75]
    assert due(seconds=0.2, think=1.0) == [100.0]
    assert due(arrivals=[0.1, 0.15, 2.0]) == [100.1, 100.15, 102.0]  # due when they are, late or not


def test_robots_that_think_start_out_of_step() -> None:
    args = arguments(["--clients", "4", "--think-ms", "200", "--requests", "7"])
    orders = bench.schedules({"clients": 4}, args, turn=0)
    phases = [order["phase"] for order in orders]
    assert len(set(phases)) == 4 and all(0 <= phase < 0.2 for phase in phases)
    assert all(order["requests"] == 7 and order["think"] == 0.2 and order["seconds"] is None for order in orders)
    together = bench.schedules({"clients": 4}, arguments(["--clients", "4"]), turn=0)
    assert [order["phase"] for order in together] == [0.0] * 4


def test_the_ceiling_is_that_of_the_largest_possible_forward() -> None:
    assert ceiling_rows(8, 1) == 1 and ceiling_rows(8, 5) == 5 and ceiling_rows(8, 64) == 8 and ceiling_rows(1, 64) == 1
    assert ceiling_rows(8, None) == 8


def tally(records: list[Any], elapsed: float) -> Tally:
    done = Tally(records=records, elapsed=[elapsed], cpu_s=0.5, differences=[0.0, 2e-6])
    done.answered = [sum(record[3] == "200" for record in records)]
    return done


def test_figures_of_a_closed_loop() -> None:
    # due, sent, received, status, wave_requests, inference_ms: a wave of two, one of one, and a refusal.
    records = [(0.0, 0.0, 0.1, "200", 2, 80.0), (0.0, 0.0, 0.12, "200", 2, 80.0), (0.12, 0.12, 0.2, "200", 1, 60.0),
               (0.2, 0.2, 0.21, "503", 0, 0.0)]  # fmt: skip
    limits = [{"rows": 1, "rows_per_s": 10.0}, {"rows": 2, "rows_per_s": 20.0}, {"rows": 8, "rows_per_s": 50.0}]
    step = figures({"clients": 2}, tally(records, 0.25), BATCHED, limits)
    assert step == {
        "clients": 2, "requests": 3, "refused": {"503": 1}, "elapsed_s": 0.25, "requests_per_s": 12.0,
        "requests_per_s_by_round": [12.0], "mean_ms": 100.0, "p50_ms": 100.0, "p95_ms": 120.0, "p99_ms": 120.0,
        "inference_p50_ms": 80.0, "forward_share": 0.56, "ceiling_rows": 2, "ceiling_requests_per_s": 20.0,
        "share_of_ceiling": 0.6, "requests_by_wave_size": {"1": 1, "2": 2}, "client_cores": 2.0,
        "largest_difference_from_solo": 2e-6,
    }  # fmt: skip
    two_workers = {**BATCHED, "minWorkers": 2}
    step = figures({"clients": 2}, tally(records, 0.25), two_workers, limits, gpus=4)
    assert step["forward_share"] == 0.28 and step["share_of_ceiling"] == 0.3  # two GPUs could do twice as much
    assert figures({"clients": 2}, tally(records, 0.25), two_workers, limits, gpus=1)["share_of_ceiling"] == 0.6


def test_figures_of_an_open_loop_count_from_when_a_request_was_due() -> None:
    records = [(0.0, 0.0, 0.1, "200", 1, 90.0), (0.05, 0.1, 0.2, "200", 1, 90.0)]  # the second waited for its client
    step = figures({"rate": 20.0, "clients": 1}, tally(records, 0.2), BATCHED, [{"rows": 8, "rows_per_s": 50.0}])
    assert step["p50_ms"] == 100.0 and step["p99_ms"] == 150.0 and step["sent_late_p99_ms"] == 50.0
    assert step["ceiling_rows"] == 8 and step["share_of_ceiling"] == 0.2


def test_figures_of_unknown_settings_or_without_answers_leave_out_what_is_not_known() -> None:
    step = figures({"clients": 1}, tally([(0.0, 0.0, 0.1, "200", 0, 0.0)], 0.1), {})
    assert "share_of_ceiling" not in step and step["forward_share"] is None and step["requests_by_wave_size"] == {}
    step = figures({"clients": 1}, tally([(0.0, 0.0, 0.1, "503", 0, 0.0)], 0.1), BATCHED)
    assert step["requests"] == 0 and step["p50_ms"] is None and step["requests_per_s"] == 0
    json.dumps(step, allow_nan=False)


def packed(**values: list[float]) -> bytes:
    return msgpack.packb(openpi({key: np.array([value], np.float32) for key, value in values.items()}))


def test_every_answer_is_compared_and_a_difference_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    done = Tally()
    solo = [{"x": np.array([1.0, 2.0], np.float32)}, {"x": np.array([3.0, 4.0], np.float32)}]
    results = [
        {"records": [(0.0, 0.0, 0.1, "200", 1, 1.0)], "answers": [packed(x=[1, 2])], "cpu_s": 0.0, "complaint": ""},
        {"records": [(0.0, 0.0, 0.3, "200", 1, 1.0)], "answers": [packed(x=[3, 4]), packed(x=[3, 4.5])], "cpu_s": 0.0,
         "complaint": ""},
    ]  # fmt: skip
    done.add(0.0, results, solo)
    assert done.differences == [0.0, 0.0, 0.5] and done.elapsed == [0.3] and done.answered == [2]
    step = figures({"clients": 2}, done, BATCHED)
    line = {"setup": "none", "protocol": "rest", "steps": [step]}
    assert len(bench.verdict({"lines": [line], "tolerance": 1e-5})) == 1
    assert bench.verdict({"lines": [line], "tolerance": 0.5}) == []
    refused = {**step, "refused": {"503": 2}, "largest_difference_from_solo": 0.0}
    assert len(bench.verdict({"lines": [{**line, "steps": [refused]}], "tolerance": 1e-5})) == 1
    assert bench.verdict({"lines": [{**line, "steps": [{**refused, "rate": 9.0}]}], "tolerance": 1e-5}) == []
    with pytest.raises(BenchError, match="actions y, not x"):
        done.add(0.0, [{**results[0], "answers": [packed(y=[1, 2])]}], solo)
    with pytest.raises(BenchError, match="not finite"):
        done.add(0.0, [{**results[0], "answers": [packed(x=[1, float("nan")])]}], solo)


# ------------------------------------------------------------------------------------------------ setups and flags


def test_a_setup_is_overlays_and_values(tmp_path: Path) -> None:
    batched = ROOT / "config" / "batched.yaml"
    assert parse_setup("none", [], tmp_path).overlays == [] and parse_setup("none", [], tmp_path).name == "no overlay"
    setup = parse_setup(f"{batched},maxBatchDelay=7,handler.max_rows=4", [], tmp_path)
    assert setup.name == "config/batched.yaml, maxBatchDelay=7, handler.max_rows=4"
    config = merge_config(setup.overlays)
    assert (config["batchSize"], config["maxBatchDelay"], config["handler"]["max_rows"]) == (8, 7, 4)
    assert parse_setup("torchserve.vmargs=-Da=b,none", [], tmp_path).properties == {"vmargs": "-Da=b"}
    assert setup.properties == {}
    assert parse_setup("none,workers=3", [], tmp_path).workers == 3 and setup.workers is None
    for wrong in ("0", "two", "-1", ""):
        with pytest.raises(BenchError, match="workers must be a whole number from 1"):
            parse_setup(f"workers={wrong}", [], tmp_path)
    other = parse_setup("batchSize=2", [batched], tmp_path)
    assert merge_config(other.overlays)["batchSize"] == 2 and other.overlays[1] != setup.overlays[1]
    assert yaml.safe_load(other.overlays[1].read_text()) == {"batchSize": 2}
    with pytest.raises(ConfigError, match="maxBatchDelay"):
        merge_config(parse_setup("maxBatchDeley=7", [], tmp_path).overlays)


def test_defaults_compare_no_overlay_with_the_batched_one() -> None:
    assert arguments([]).compare == ["none", str(ROOT / "config" / "batched.yaml")]
    assert arguments(["--overlay", "a.yaml"]).compare == ["none"]
    assert arguments(["--compare", "a.yaml", "none"]).compare == ["a.yaml", "none"]


@pytest.mark.parametrize(
    "words", [["--clients", "0"], ["--clients"], ["--golden", "--ceiling-rows"], ["--seconds", "0"], ["--warmup", "-1"],
              ["--encodings", "jpeg", "--protocols", "grpc"]],
)
def test_flags_that_measure_nothing_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        arguments(words)
    assert ended.value.code == 2 and "error:" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------- clients


def test_a_client_imports_nothing_heavy() -> None:
    code = "import sys, scripts.bench_client; print([m for m in sys.modules if '.' not in m])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "msgpack" in done.stdout
    assert not {"torch", "numpy", "handler", "requests", "grpc", "websockets"} & set(eval(done.stdout))


def test_a_client_that_ends_is_an_error_not_a_wait(capfd: pytest.CaptureFixture[str]) -> None:
    args = arguments(["--clients", "1"])
    order = {"protocol": "rest", "url": "http://127.0.0.1:9/x", "key": None, "content_type": "a/b", "body": b"",
             **bench.schedules({"clients": 1}, args, 0)[0]}  # fmt: skip
    with Clients(1) as clients:
        with pytest.raises(BenchError, match="a client ended"):
            clients.run([order])
        process = clients.processes[0]
    assert process.returncode == 1
    assert "ConnectionRefusedError" in capfd.readouterr().err


def test_the_ceiling_and_jpeg_of_the_small_checkpoint(policy: Gr00tPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "CEILING_SECONDS", 0.0)
    fields = [bench.observation(policy.describe(), LIBERO, (64, 96), seed) for seed in range(2)]
    lines = ceiling(policy, fields, [1, 3])
    assert [line["rows"] for line in lines] == [1, 3]
    for line in lines:
        assert line["rows_per_s"] == pytest.approx(line["rows"] / line["get_action_ms"] * 1e3, rel=1e-2)
    seen, kind, body = bench.encode(fields[0], "jpeg")
    assert kind.startswith("multipart/form-data") and len(body) < len(bench.encode(fields[0], "msgpack")[2])
    for key, frames in fields[0]["video"].items():
        apart = np.abs(seen["video"][key].astype(int) - frames.astype(int))
        assert seen["video"][key].shape == frames.shape and 0 < apart.mean() < 12


def test_golden_actions_come_first(policy: Gr00tPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                   capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.setattr(bench, "CEILING_SECONDS", 0.0)
    golden = json.loads(bench.GOLDEN.read_text())
    fields = golden["observation"]
    seen = {**fields, "video": {key: np.zeros(shape, np.uint8) for key, shape in fields["video"].items()}}
    actions = policy.get_action(seen)
    golden["actions"] = {key: [actions[key][0, step].tolist() for step in golden["steps"]] for key in actions}
    own = tmp_path / "golden.json"
    own.write_text(json.dumps(golden))
    args = arguments(["--golden", str(own), "--ceiling-rows", "1", "--clients", "1", "--compare", "none"])
    report: dict[str, Any] = {}
    bodies, right = bench.alone([parse_setup("none", [], tmp_path)], [{"clients": 1}], args, tmp_path, report)
    assert report["golden"]["largest_difference"] == 0 and len(bodies["msgpack"]) == len(right["msgpack"]) == 1
    # The published ones are not those of random weights: no server is started.
    assert bench.main(["--golden", "--ceiling-rows", "1", "--clients", "1"]) == 1
    assert "golden actions differ" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------- a real run


@pytest.fixture
def gateway(policy: Gr00tPolicy) -> Iterator[str]:
    """A server of openpi's protocol: metadata first, then actions for observations. It wants its key."""

    def robot(connection: ServerConnection) -> None:
        assert connection.request is not None
        assert connection.request.headers["Authorization"] == "Api-Key secret"
        connection.send(msgpack.packb({"server": "test"}))
        for message in connection:
            assert isinstance(message, bytes)
            fields, _ = decode(Request({"Content-Type": "application/msgpack"}, [Part("body", "", message)]))
            actions = policy.get_action(fields)
            joined = np.concatenate(list(actions.values()), axis=-1)
            connection.send(msgpack.packb(openpi({**actions, "actions": joined, "server_timing": {}})))

    with serve(robot, "127.0.0.1", 0, compression=None, max_size=None) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join()


def test_clients_count_their_requests_and_return_what_they_got(gateway: str, policy: Gr00tPolicy) -> None:
    fields = [bench.observation(policy.describe(), LIBERO, (64, 64), seed) for seed in range(2)]
    common = {"protocol": "openpi", "url": gateway, "key": "secret", "content_type": ""}
    schedules = bench.schedules({"clients": 2}, arguments(["--requests", "3"]), 0)
    orders = [{**common, "body": bench.encode(f, "msgpack")[2], **when}
              for f, when in zip(fields, schedules, strict=True)]  # fmt: skip
    with Clients(3) as clients:
        for _ in range(2):  # they live on
            start, results = clients.run(orders)
            for f, result in zip(fields, results, strict=True):
                assert [record[3] for record in result["records"]] == ["200"] * 3
                (answer,) = result["answers"]
                assert bench.distance(bench.arrays(answer), policy.get_action(f)) == 0
                for due, sent, received, *_ in result["records"]:
                    assert start <= due <= sent < received
    assert [process.returncode for process in clients.processes] == [0, 0, 0]


def test_a_short_run(policy: Gr00tPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                     capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.setattr(bench, "CEILING_SECONDS", 0.0)
    report_file, plot_file = tmp_path / "reports" / "bench.json", tmp_path / "bench.png"
    words = ["--compare", f"{ROOT}/config/batched.yaml,maxBatchDelay=3,torchserve.metrics_mode=log,workers=2"]
    words += ["--clients", "1", "3", "--warmup", "1"]
    words += ["--seconds", "1", "--rounds", "2", "--open-loop", "8", "--open-clients", "4", "--ceiling-rows", "2"]
    words += ["--protocols", "rest", "grpc", "gateway", "openpi", "--encodings", "msgpack", "jpeg"]
    words += ["--size", "64", "64"]
    code = bench.main([*words, "--json", str(report_file), "--plot", str(plot_file)])
    output = capsys.readouterr()
    assert code == 0, output.err
    report = json.loads(report_file.read_text())
    assert report["checkpoint"] == policy.checkpoint and report["compared_with"] == "the policy in process"
    assert [limit["rows"] for limit in report["ceiling"]] == [1, 2, 3, 8]
    assert [(line["protocol"], line["encoding"]) for line in report["lines"]] == [
        ("rest", "msgpack"), ("rest", "jpeg"), ("grpc", "msgpack"),
        ("gateway", "msgpack"), ("gateway", "jpeg"), ("openpi", "msgpack"),
    ]  # fmt: skip
    arrivals = sum(len(bench.poisson(8.0, 1.0, turn)) for turn in range(2))
    for line in report["lines"]:
        assert line["solo_largest_difference"] <= 1e-5
        assert [step["clients"] for step in line["steps"]] == [1, 3, 4]
        assert [step.get("rate") for step in line["steps"]] == [None, None, 8.0]
        assert line["steps"][2]["requests"] == arrivals and line["steps"][2]["sent_late_p99_ms"] >= 0
        for step in line["steps"]:
            assert step["refused"] == {} and step["requests"] >= 2  # one a round, however slow the machine is
            assert step["largest_difference_from_solo"] <= 1e-5
            assert step["p50_ms"] <= step["p95_ms"] <= step["p99_ms"]
            assert step["requests_per_s"] == pytest.approx(step["requests"] / step["elapsed_s"], abs=0.02)
            assert len(step["requests_per_s_by_round"]) == 2 and step["client_cores"] > 0
            assert line["in_force"] == {**BATCHED, "maxBatchDelay": 3, "minWorkers": 2}
            sizes = {int(size): count for size, count in step["requests_by_wave_size"].items()}
            assert sum(sizes.values()) == step["requests"] and max(sizes) <= step["clients"]
            assert 0 < step["forward_share"] <= 1
            (limit,) = (limit for limit in report["ceiling"] if limit["rows"] == step["ceiling_rows"])
            assert step["share_of_ceiling"] == pytest.approx(step["requests_per_s"] / limit["rows_per_s"], abs=0.01)
    assert plot_file.read_bytes().startswith(b"\x89PNG")
    assert "rest jpeg" in output.out and "\r" not in output.out + output.err


def test_a_report_says_whether_the_gpu_was_shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A sleeping program with the daemon's name stands in for it."""
    assert machine()["gpu"] == "none" or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert machine()["gpu"] == "NVIDIA H200"
    daemon = tmp_path / "nvidia-cuda-mps-control"
    shutil.copy(str(shutil.which("sleep")), daemon)
    process = subprocess.Popen([daemon, "60"])
    try:
        assert machine()["gpu"] == "NVIDIA H200, shared by MPS"
    finally:
        process.kill()
        process.wait()
