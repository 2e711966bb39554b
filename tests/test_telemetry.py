"""What a wave leaves in metrics and in the log: counted by hand, in a real server, in Prometheus and by its rules."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import msgpack
import numpy as np
import pytest
import requests
import torch
import yaml
from ts.metrics import metric_cache_yaml_impl
from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl

from handler.gr00t.engine import padded_length
from handler.observation import Limits
from handler.policy import Gr00tPolicy
from handler.problem import REASONS, TITLES, Problem
from handler.telemetry import Telemetry, reason, size_label
from handler.wave import Slot, fill, run
from handler.wire import Part, Request
from scripts.bench_client import PREDICTIONS as GRPC_PREDICTIONS
from scripts.bench_client import prediction, predictions_request
from scripts.package import ROOT, build
from scripts.serve import Server, local_session
from tests.client import Body, as_msgpack, patient_archive, post, read, wave
from tests.conftest import LIBERO, observation

Series = dict[str, float]  # "name{label="value"}", without the host's name -> value
PROMPT = "sort the confidential samples"


def request(body: Body, own_id: str = "own") -> Request:
    return Request(dict(body[0]), [Part("body", "", body[1])], own_id)


def without(fields: dict[str, Any], key: str) -> dict[str, Any]:
    del fields["state"][key]
    return fields


# ------------------------------------------------------------------------------------------------------ counted by hand


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ("robot-7/step.12:a_b+c=@", "robot-7/step.12:a_b+c=@"),
        ("  spaced id ", "spaced_id"),
        ("a\r\n[METRICS]x", "a___METRICS_x"),
        ("caf\u00e9 \u0663", "caf___"),
        ("x" * 500, "x" * 128),
        ("   ", "own"),
        ("", "own"),
        (None, "own"),
    ],
)
def test_a_client_s_request_id_is_bounded_and_harmless(sent: str | None, expected: str) -> None:
    assert Request({} if sent is None else {"X-REQUEST-id": sent}, [], "own").request_id == expected


@pytest.mark.parametrize(("count", "label"), [(0, "0"), (1, "1"), (8, "8"), (9, "12"), (33, "48"), (129, "more")])
def test_labels_that_count_take_few_values(count: int, label: str) -> None:
    assert size_label(count) == label


def test_reasons_are_fixed_words() -> None:
    assert {status for status in TITLES if status != 422} == set(REASONS)
    for status, words in REASONS.items():
        assert reason(Problem(status, "x")) == words[0]
    assert reason(Problem(500, "x", reason="not_finite")) == "not_finite"
    pointers = {"/state/yaw": "state", "/state.yaw": "state", "/images/front": "video", "/video.front": "video",
                "/prompt": "language", "/options/seed": "options", "/rm -rf": "other", "/stately": "other",
                None: "other"}  # fmt: skip
    assert {pointer: reason(Problem(422, "x", pointer)) for pointer in pointers} == pointers
    assert reason(None) == "ok"


@pytest.fixture
def metrics() -> MetricsCacheYamlImpl:
    cache = MetricsCacheYamlImpl(str(ROOT / "config" / "metrics.yaml"))
    cache.initialize_cache()
    return cache


def emitted(caplog: pytest.LogCaptureFixture) -> dict[tuple[str, ...], list[float]]:
    """(name, labels...) -> the values of the metric lines since the last call, in order."""
    found: dict[tuple[str, ...], list[float]] = {}
    for record in caplog.records:
        if line := re.match(r"\[METRICS\](\w+)\.\w+:([0-9.e-]+)\|#([^|]*)\|#type:", record.getMessage()):
            labels = [pair.partition(":")[2] for pair in filter(None, line[3].split(","))]
            found.setdefault((line[1], *labels), []).append(float(line[2]))
    caplog.clear()
    return found


def serve(telemetry: Telemetry, policy: Gr00tPolicy, wanted: list[Request]) -> list[Slot]:
    with telemetry.stage("preprocess"):
        slots = fill(wanted, policy)
    with telemetry.stage("inference"):
        run(slots, policy)
    with telemetry.stage("postprocess"):
        pass
    telemetry.wave(slots)
    telemetry.flush()
    return slots


def test_a_wave_in_metrics_and_in_one_line(
    policy: Gr00tPolicy, metrics: MetricsCacheYamlImpl, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    telemetry = Telemetry(metrics, policy)
    start = emitted(caplog)
    info = ("gr00t_model_info", policy.checkpoint, "float32", "cpu", "plain", "false")
    assert start.pop(("gr00t_worker_starts_total",)) == start.pop(info) == [1]
    assert all(values == [0] for values in start.values())  # so that a rate sees the first event
    outcomes = {(int(name[1]), name[2]) for name in start if name[0] == "gr00t_requests_total"}
    fields = ("video", "state", "language", "options", "other")
    assert outcomes == {(200, "ok"), *((422, field) for field in fields),
                        *((status, word) for status, words in REASONS.items() for word in words)}  # fmt: skip

    long = observation(policy, seed=1, prompt=PROMPT)
    body = as_msgpack(without(observation(policy, seed=3, prompt=PROMPT), "yaw"))
    slots = serve(telemetry, policy, [
        request(as_msgpack(observation(policy, seed=0)), "a"),
        request(as_msgpack(long), "b"),
        request(as_msgpack(observation(policy, seed=2, size=(180, 320))), "c"),  # a group of its own
        request(({**body[0], "X-Request-Id": "robot 1"}, body[1]), "d"),
        request(({"Content-Type": "text/plain"}, b"hello"), "e"),
    ])  # fmt: skip
    line = json.loads(next(r.getMessage() for r in caplog.records if r.getMessage().startswith('{"wave"')))
    assert PROMPT not in caplog.text
    lengths = [len(slots[n].rows[0].input_ids) for n in range(3)]
    got = emitted(caplog)
    stages = {name[1]: values for name, values in got.items() if name[0] == "gr00t_stage_seconds"}
    assert {name: len(values) for name, values in stages.items()} == {
        "preprocess": 1, "inference": 1, "postprocess": 1}  # fmt: skip
    assert {name: values for name, values in got.items() if name[0] != "gr00t_stage_seconds"} == {
        ("gr00t_requests_total", "200", "ok"): [3],
        ("gr00t_requests_total", "422", "state"): [1],
        ("gr00t_requests_total", "415", "content_type"): [1],
        ("gr00t_waves_total", "5"): [1],
        ("gr00t_waves_by_rows_total", "3"): [1],
        ("gr00t_groups_total",): [2],
        ("gr00t_forwards_total", "2"): [1],
        ("gr00t_forwards_total", "1"): [1],
        ("gr00t_rows_total", "real"): [3],
        ("gr00t_tokens_total", "real"): [sum(lengths)],
        ("gr00t_tokens_total", "padding"): [abs(lengths[0] - lengths[1])],  # to the longer of the two
    }
    for stage, (seconds,) in stages.items():
        assert line.pop(f"{stage}_ms") == pytest.approx(seconds * 1e3, abs=1e-3)
    assert line == {
        "wave": ["a", "b", "c", "robot_1", "e"], "rows": 3, "groups": 2,
        "failures": [{"id": "robot_1", "status": 422, "reason": "state", "pointer": "/state/yaw"},
                     {"id": "e", "status": 415, "reason": "content_type"}],
    }  # fmt: skip
    serve(telemetry, policy, [request(({"Content-Type": "text/plain"}, b"hello"))])
    got = emitted(caplog)
    assert got["gr00t_waves_by_rows_total", "0"] == [1]
    assert not {name[0] for name in got} & {"gr00t_groups_total", "gr00t_forwards_total", "gr00t_tokens_total"}


@pytest.mark.parametrize(("engine", "reproducible", "rows"), [(True, False, 6), (True, True, 8), (False, True, 8)])
def test_padding_of_rungs_and_of_reproducible_mode(
    checkpoint: Path, metrics: MetricsCacheYamlImpl, caplog: pytest.LogCaptureFixture,
    engine: bool, reproducible: bool, rows: int,
) -> None:  # fmt: skip
    """Five rows: the engine runs six, reproducible mode eight, both as long as the token rung."""
    caplog.set_level(logging.INFO)
    policy = Gr00tPolicy(checkpoint, limits=Limits(max_rows=8), engine=engine, reproducible=reproducible)
    telemetry = Telemetry(metrics, policy)
    assert emitted(caplog)["gr00t_model_info", policy.checkpoint, "float32", "cpu", "fused" if engine else "plain",
                           str(reproducible).lower()] == [1]  # fmt: skip
    slots = serve(telemetry, policy, [request(as_msgpack(observation(policy, seed=n))) for n in range(5)])
    row = slots[0].rows[0]
    tokens, length = padded_length(row.grids, len(row.input_ids), policy.config.vision), len(row.input_ids)
    got = emitted(caplog)
    assert got["gr00t_forwards_total", str(rows)] == [1]
    assert (got["gr00t_rows_total", "real"], got["gr00t_rows_total", "padding"]) == ([5], [rows - 5])
    assert got["gr00t_tokens_total", "real"] == [5 * length]
    assert got["gr00t_tokens_total", "padding"] == [rows * tokens - 5 * length]


def test_gpu_memory_is_told_of_a_gpu_only(
    metrics: MetricsCacheYamlImpl, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And captures of the engine, from the end of the warm-up on."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5 << 30)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 6 << 30)
    policy: Any = SimpleNamespace(
        work={}, engine=SimpleNamespace(captures=40), checkpoint="c", dtype=torch.bfloat16, reproducible=False,
        device=torch.device("cuda:1"),
    )  # fmt: skip
    telemetry = Telemetry(metrics, policy)
    assert emitted(caplog)["gr00t_engine_captures_total",] == [0]
    policy.engine.captures = 42
    telemetry.wave([])
    telemetry.flush()
    got = emitted(caplog)
    assert got["gr00t_engine_captures_total",] == [2]
    assert got["gr00t_gpu_memory_allocated_bytes", "1"] == [5 << 30]
    assert got["gr00t_gpu_memory_reserved_bytes", "1"] == [6 << 30]


def test_accounts_that_fail_cost_no_reply(
    policy: Gr00tPolicy, metrics: MetricsCacheYamlImpl, caplog: pytest.LogCaptureFixture
) -> None:
    telemetry = Telemetry(metrics, policy)
    telemetry.metrics = None
    telemetry.wave([])
    telemetry.flush()
    assert [record.getMessage() for record in caplog.records] == ["a wave could not be accounted for"]


def test_torchserve_s_own_metrics_are_those_that_it_ships() -> None:
    shipped = Path(metric_cache_yaml_impl.__file__).parents[1] / "configs" / "metrics.yaml"
    ours = yaml.safe_load((ROOT / "config" / "metrics.yaml").read_text())
    assert ours["ts_metrics"] == yaml.safe_load(shipped.read_text())["ts_metrics"]


# -------------------------------------------------------------------------------------------------------- a real server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("telemetry")
    with Server(patient_archive(folder), run_dir=folder / "run") as server:
        yield server


def scrape(server: Server) -> tuple[Series, str]:
    """The metrics port's answer to one who has no key."""
    with local_session() as session:
        reply = session.get(f"{server.metrics_url}/metrics", timeout=30)
    assert reply.status_code == 200
    series: Series = {}
    for line in reply.text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            name = re.sub(r'[Hh]ostname="[^"]*",', "", name).replace(",}", "}").removesuffix("{}")
            series[name] = float(value)
    return series, reply.text


def until(condition: Callable[[], Any], seconds: float = 120) -> Any:
    """What `condition` returns once that is true: lines and scrapes come a little after the reply."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.2)
    return result


def growth(server: Server, before: Series, waves: int) -> Series:
    """How gr00t_ series have grown, once so many more waves are accounted for to the last line."""
    count = 'gr00t_stage_seconds_count{stage="postprocess"}'

    def grown() -> Series | None:
        now = scrape(server)[0]
        return now if now[count] - before.get(count, 0) >= waves else None

    now = until(grown)
    return {
        name: value - before.get(name, 0) for name, value in now.items()
        if name.startswith("gr00t_") and "stage_seconds" not in name and value != before.get(name, 0)
    }  # fmt: skip


def wave_lines(server: Server) -> list[dict[str, Any]]:
    text = (server.run_dir / "logs" / "model_log.log").read_text(encoding="utf-8")
    return [json.loads(line) for line in re.findall(r'MODEL_LOG - (\{"wave".*)', text)]


def test_a_known_wave_is_counted_logged_and_named(server: Server, policy: Gr00tPolicy) -> None:
    """Three good and two bad requests behind a blocker, each with an id of its own."""
    before = scrape(server)[0]
    good = [as_msgpack(observation(policy, LIBERO, seed=seed, prompt=PROMPT)) for seed in range(3)]
    bodies = [good[0], as_msgpack(without(observation(policy), "yaw")), good[1],
              ({"Content-Type": "application/json"}, b"{"), good[2]]  # fmt: skip
    sent = [({**headers, "X-Request-Id": f"robot-{n} caf\u00e9".encode()}, body)
            for n, (headers, body) in enumerate(bodies)]  # fmt: skip
    replies = wave(server, sent, as_msgpack(observation(policy, seed=99)))  # type: ignore[arg-type]
    assert [reply.status_code for reply in replies] == [200, 422, 200, 400, 200]
    ids = [reply.headers["X-Client-Request-Id"] for reply in replies]
    assert all(re.fullmatch(rf"robot-{n}_caf_+", name) for n, name in enumerate(ids)), ids
    assert replies[1].json()["request_id"] == ids[1] and read(replies[0])[1]["request_id"] == ids[0]

    grown = growth(server, before, waves=2)
    tokens = [grown.pop(f'gr00t_tokens_total{{kind="{kind}"}}', 0) for kind in ("real", "padding")]
    rows = policy.prepare(policy.check(observation(policy, prompt=PROMPT)))
    blocker = policy.prepare(policy.check(observation(policy)))
    assert tokens == [3 * len(rows[0].input_ids) + len(blocker[0].input_ids), 0]
    assert grown == {
        'gr00t_requests_total{status="200",reason="ok"}': 4,
        'gr00t_requests_total{status="422",reason="state"}': 1,
        'gr00t_requests_total{status="400",reason="undecodable"}': 1,
        'gr00t_waves_total{requests="1"}': 1,
        'gr00t_waves_total{requests="5"}': 1,
        'gr00t_waves_by_rows_total{rows="1"}': 1,
        'gr00t_waves_by_rows_total{rows="3"}': 1,
        "gr00t_groups_total": 2,
        'gr00t_forwards_total{rows="1"}': 1,
        'gr00t_forwards_total{rows="3"}': 1,
        'gr00t_rows_total{kind="real"}': 4,
    }
    line = until(lambda: next((line for line in wave_lines(server) if line["wave"] == ids), None))
    assert (line["rows"], line["groups"]) == (3, 1)
    assert line["failures"] == [
        {"id": ids[1], "status": 422, "reason": "state", "pointer": "/state/yaw"},
        {"id": ids[3], "status": 400, "reason": "undecodable"},
    ]
    assert all(line[f"{stage}_ms"] > 0 for stage in ("preprocess", "inference", "postprocess"))


def test_without_an_id_of_the_client_s_it_is_torchserve_s(server: Server, policy: Gr00tPolicy) -> None:
    reply = post(server, as_msgpack(observation(policy, seed=1)))
    own = reply.headers["X-Request-Id"]
    assert reply.headers["X-Client-Request-Id"] == read(reply)[1]["request_id"] == own
    until(lambda: [own] in [line["wave"] for line in wave_lines(server)])


def test_a_grpc_call_s_id_is_an_input(server: Server, policy: Gr00tPolicy) -> None:
    inputs = {"body": as_msgpack(observation(policy, seed=1))[1], "content_type": b"application/msgpack",
              "x_request_id": b"arm 3"}  # fmt: skip
    with grpc.insecure_channel(f"127.0.0.1:{server.ports[3]}") as channel:
        call = channel.unary_unary(GRPC_PREDICTIONS)
        key = (("authorization", f"Bearer {server.inference_key}"),)
        reply = prediction(call(predictions_request(**inputs), metadata=key, timeout=60))
    assert msgpack.unpackb(reply, strict_map_key=False)["info"]["request_id"] == "arm_3"
    until(lambda: ["arm_3"] in [line["wave"] for line in wave_lines(server)])


def test_counters_outlive_a_worker(server: Server, policy: Gr00tPolicy) -> None:
    before = scrape(server)[0]
    pids = server.worker_pids()
    os.kill(pids[0], signal.SIGKILL)
    server.wait_for_other_workers(pids, 120)
    assert post(server, as_msgpack(observation(policy, seed=1))).status_code == 200
    grown = growth(server, before, waves=1)
    assert grown["gr00t_worker_starts_total"] == grown['gr00t_waves_total{requests="1"}'] == 1
    assert grown['gr00t_requests_total{status="200",reason="ok"}'] == 1


def test_logs_and_metrics_hold_no_key_prompt_or_path(server: Server, policy: Gr00tPolicy) -> None:
    post(server, as_msgpack(without(observation(policy, prompt=PROMPT), "yaw")))
    text = scrape(server)[1]
    logs = {file.name: file.read_text(encoding="utf-8") for file in (server.run_dir / "logs").iterdir()}
    assert {"access_log.log", "console.log", "model_log.log", "ts_log.log"} <= logs.keys()
    for content in (text, *logs.values()):
        assert server.inference_key and server.inference_key not in content
        assert PROMPT not in content
    assert str(server.run_dir) not in text and "/" not in re.sub("#.*", "", text)
    # TorchServe's lines for every wave and metric are gone, those that ./scripts/serve reads are not.
    assert not re.search(r"\[METRICS\]|Flushing req|Backend received|Backend response|Looping|Sending response|jobId",
                         "".join(logs.values()))  # fmt: skip
    assert "MODEL_LOG - checkpoint " in logs["console.log"] and "Retry worker: " in logs["console.log"]


def test_a_full_disk_does_not_stop_serving(policy: Gr00tPolicy, tmp_path: Path) -> None:
    class FullDisk(Server):
        def _settings(self) -> str:  # called when the last run's console.log is gone, and before anything is written
            for name in ("console", "access_log", "model_log", "ts_log"):
                (self.log_path.parent / f"{name}.log").symlink_to("/dev/full")
            return super()._settings()

    archive = build(None, [ROOT / "config" / "batched.yaml"], tmp_path / "store" / "gr00t.mar")
    with FullDisk(archive, run_dir=tmp_path / "run") as server:
        fields = observation(policy, seed=1)
        want = policy.get_action(fields)
        pids = server.worker_pids()
        for _ in range(10):
            actions, _ = read(post(server, as_msgpack(fields)))
            assert all(np.array_equal(actions[key], want[key]) for key in want)
            assert post(server, as_msgpack(without(observation(policy), "yaw"))).status_code == 422
        assert growth(server, {}, waves=20)['gr00t_requests_total{status="200",reason="ok"}'] == 10
        assert server.worker_pids() == pids
        for name in ("console", "access_log", "model_log", "ts_log"):
            assert os.readlink(server.log_path.parent / f"{name}.log") == "/dev/full"


# ---------------------------------------------------------------------------------------- Prometheus and the dashboard

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")), reason="Prometheus is not installed"
)
RULES = ROOT / "config" / "prometheus" / "gr00t.rules.yml"


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Prometheus with the repository's configuration, but this server, and every second."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = (ROOT / "config" / "prometheus" / "prometheus.yml").read_text()
    assert "127.0.0.1:8082" in config and "15s" in config
    own = config.replace("127.0.0.1:8082", f"127.0.0.1:{server.ports[2]}").replace("15s", "1s")
    (folder / "prometheus.yml").write_text(own)
    shutil.copy(RULES, folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
               f"--web.listen-address={address}"]  # fmt: skip
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            until(lambda: _answers(f"http://{address}/-/ready"))
            yield f"http://{address}/api/v1"
        finally:
            process.terminate()


def _answers(url: str) -> bool:
    try:
        with local_session() as session:
            return session.get(url, timeout=10).ok
    except requests.ConnectionError:
        return False


def query(prometheus: str, expression: str) -> list[dict[str, Any]]:
    with local_session() as session:
        reply = session.get(f"{prometheus}/query", params={"query": expression}, timeout=30).json()
    assert reply["status"] == "success", (expression, reply)
    result: list[dict[str, Any]] = reply["data"]["result"]
    return result


def dashboard_queries() -> list[str]:
    dashboard = json.loads((ROOT / "config" / "grafana" / "gr00t.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return [e.replace("$instance", ".*").replace("$__rate_interval", "1m") for e in expressions]


@needs_prometheus
def test_prometheus_agrees_with_what_was_sent(server: Server, prometheus: str, policy: Gr00tPolicy) -> None:
    before = scrape(server)[0]
    until(lambda: query(prometheus, "gr00t_waves_total"))
    good, bad = as_msgpack(observation(policy, seed=1)), as_msgpack(without(observation(policy), "yaw"))
    for _ in range(5):
        post(server, good)
        post(server, bad)
    post(server, ({"Content-Type": "text/plain"}, b"hello"))
    outcomes = {("200", "ok"): 5, ("422", "state"): 5, ("415", "content_type"): 1}

    def agree() -> bool:
        found = {(r["metric"]["status"], r["metric"]["reason"]): float(r["value"][1])
                 for r in query(prometheus, "sum by (status, reason) (gr00t_requests_total)")}  # fmt: skip
        return all(
            count - before[f'gr00t_requests_total{{status="{status}",reason="{why}"}}']
            == outcomes.get((status, why), 0) for (status, why), count in found.items()
        )  # fmt: skip

    until(agree)
    assert [float(r["value"][1]) for r in query(prometheus, 'up{job="gr00t"}')] == [1]
    # Every query of the dashboard has an answer, but for what cannot have happened here.
    absent = ("Requests5XX", *(() if torch.cuda.is_available() else ("gr00t_gpu_memory",)))
    queries = [q for q in dashboard_queries() if not any(name in q for name in absent)]
    until(lambda: all(query(prometheus, q) for q in queries))
    assert all(isinstance(query(prometheus, q), list) for q in dashboard_queries())
    rules = until(lambda: evaluated(prometheus))
    assert {rule["name"]: rule["health"] for rule in rules} == {
        rule["alert"]: "ok" for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    }


def evaluated(prometheus: str) -> list[dict[str, Any]] | None:
    """The rules as Prometheus sees them, once it has evaluated each."""
    with local_session() as session:
        (group,) = session.get(f"{prometheus}/rules", timeout=30).json()["data"]["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules if all(rule["health"] != "unknown" for rule in rules) else None


@needs_prometheus
def test_rules_fire_when_they_should(tmp_path: Path) -> None:
    """promtool's own tests, with made-up series: each alert fires on its own trouble, none on a healthy server."""
    healthy = {
        'up{job="gr00t"}': "1+0x30",
        "ts_inference_requests_total{}": "0+600x30",
        "ts_queue_latency_microseconds{}": "0+6000000x30",
        "gr00t_worker_starts_total{}": "1+0x30",
        'gr00t_waves_total{requests="1"}': "0+600x30",
        'gr00t_requests_total{status="200",reason="ok"}': "0+600x30",
        'gr00t_requests_total{status="500",reason="not_finite"}': "0+0x30",
        'gr00t_requests_total{status="503",reason="out_of_memory"}': "0+0x30",
        'gr00t_requests_total{status="504",reason="deadline"}': "0+0x30",
        'gr00t_requests_total{status="422",reason="state"}': "0+0x30",
        "Requests5XX{}": "0+0x30",
    }
    hangs = {'gr00t_waves_total{requests="1"}': "600+0x30",
             'gr00t_requests_total{status="200",reason="ok"}': "600+0x30"}  # fmt: skip
    first_hangs = {'gr00t_waves_total{requests="1"}': "_x30",  # no series before the first wave
                   'gr00t_requests_total{status="200",reason="ok"}': "0+0x30"}  # fmt: skip
    troubles: dict[str, dict[str, str]] = {
        "Gr00tDown": {'up{job="gr00t"}': "0+0x30"},
        "Gr00tStalled": hangs,
        "Gr00tWorkerRestarts": {"gr00t_worker_starts_total{}": "1+1x30"},
        "Gr00tFailures": {'gr00t_requests_total{status="503",reason="out_of_memory"}': "0+12x30",
                          "Requests5XX{}": "0+12x30"},
        "Gr00tTurnedAway": {"Requests5XX{}": "0+60x30"},
        "Gr00tLate": {'gr00t_requests_total{status="504",reason="deadline"}': "0+60x30", "Requests5XX{}": "0+60x30"},
        "Gr00tQueueSlow": {"ts_queue_latency_microseconds{}": "0+600000000x30"},
        "Gr00tRefusals": {'gr00t_requests_total{status="422",reason="state"}': "0+120x30"},
        "Gr00tNotFinite": {'gr00t_requests_total{status="500",reason="not_finite"}': "0+1x30",
                           "Requests5XX{}": "0+1x30"},
    }  # fmt: skip
    alerts = [rule["alert"] for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]]
    assert set(alerts) == set(troubles)
    cases = []
    for trouble, changed in [("none", {}), *troubles.items(), ("Gr00tStalled", first_hangs)]:
        series = [{"series": name.replace("{}", "{job=\"gr00t\"}"), "values": values}
                  for name, values in (healthy | changed).items()]  # fmt: skip
        firing = {
            "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
            "eval_time": "25m",
            "exp_samples": [{"labels": f'{{alertname="{trouble}"}}', "value": 1}] if changed else [],
        }
        cases.append({"interval": "1m", "input_series": series, "promql_expr_test": [firing]})
    file = tmp_path / "rules_test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": cases}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
