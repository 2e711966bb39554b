"""Measures the server: closed-loop or Poisson robots in processes of their own, for several settings side by side.

First the policy alone, in this process: its answers, which the server's must equal, and its rows per second, the
ceiling. Then a server for each setup, and on all of them in turn every number of clients, protocol and encoding. Every
answer is compared with the one that the same observation got alone. Exit status 1 when answers differ or are refused.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cv2
import msgpack
import numpy as np
import requests
import torch
import yaml
from numpy.typing import NDArray

from handler.gr00t.checkpoint import CheckpointError
from handler.images import decode_image
from handler.observation import Limits
from handler.policy import DTYPES, ENGINES, Gr00tPolicy
from handler.problem import Problem
from scripts.bench_client import actions_of, connect
from scripts.bench_engine import batch_of, free
from scripts.check_golden import GOLDEN, compare
from scripts.gateway import GatewayProcess
from scripts.gateway_translate import arrays_of, pack
from scripts.make_checkpoint import write_checkpoint
from scripts.package import EMBEDDED, MODEL_NAME, ROOT, ConfigError, build, merge_config
from scripts.report import command, machine, relative, write_report
from scripts.scale import ManageError, Management, Progress, scale
from scripts.serve import Server, StartError

Arrays = dict[str, NDArray[np.float32]]

TOLERANCE = {"float32": 1e-5, "bfloat16": 0.05}  # between two answers to one observation, in an action's own unit
JPEG_QUALITY = 90
CEILING_SECONDS = 2.0  # for each number of rows; at least five runs
START_SECONDS = 0.05  # from the word to the start, for the word to reach all clients
SCALE_SECONDS = 900.0  # for further workers to be READY
SHOWN = ("batchSize", "maxBatchDelay", "jobQueueSize", "minWorkers")


class BenchError(RuntimeError):
    """The sweep cannot go on, or its figures would be worth nothing. The text says why."""


# ------------------------------------------------------------------------------------------------------- observations


def observation(contract: dict[str, Any], tag: str, size: tuple[int, int], seed: int) -> dict[str, Any]:
    """An observation of one robot, random but for its instruction; `seed` is also its noise's.

    Frames of (height, width) are blurred noise, so that a JPEG of them has about the size of a camera's.
    """
    rng = np.random.default_rng(seed)
    embodiment = contract["embodiments"][tag]
    video, state = embodiment["video"], embodiment["state"]

    def frame() -> NDArray[np.uint8]:
        coarse = rng.integers(0, 256, (size[0] // 16 + 1, size[1] // 16 + 1, 3), dtype=np.uint8)
        grain = rng.integers(-6, 7, (*size, 3))
        blurred = cv2.resize(coarse, size[::-1], interpolation=cv2.INTER_CUBIC)
        return np.clip(blurred + grain, 0, 255).astype(np.uint8)

    fields: dict[str, Any] = {
        "video": {key: np.stack([frame() for _ in range(video["frames"])])[None] for key in video["keys"]},
        "state": {key: rng.uniform(-0.3, 0.3, (1, s["steps"], s["width"])).astype(np.float32)
                  for key, s in state.items()},
        "language": {embodiment["language"]["keys"][0]: [["pick up the red object and put it into the drawer"]]},
        "options": {"embodiment_tag": tag, "seed": seed},
    }  # fmt: skip
    for key, action in embodiment["action"].items():
        if action.get("relative_to") and action["width"] == 9:  # a pose: its last six numbers are a rotation
            fields["state"][action.get("relative_to", key)][..., 3:] = (1, 0, 0, 0, 1, 0)
    return fields


def encode(fields: dict[str, Any], encoding: str) -> tuple[dict[str, Any], str, bytes]:
    """(the observation as the server will see it, content type, body); JPEG changes the frames."""
    if encoding == "msgpack":
        return fields, "application/msgpack", pack(fields)
    parts: list[tuple[str, Any]] = [("options", (None, json.dumps(fields["options"])))]
    seen: dict[str, Any] = {**fields, "video": {}}
    for key, frames in fields["video"].items():
        files = [cv2.imencode(".jpg", frame[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])[1].tobytes()
                 for frame in frames[0]]  # fmt: skip
        parts += [(f"video.{key}", (f"{key}.jpg", file, "image/jpeg")) for file in files]
        seen["video"][key] = np.stack([decode_image(file, key, 1 << 25) for file in files])[None]
    parts += [(f"state.{key}", (None, json.dumps(value[0].tolist()))) for key, value in fields["state"].items()]
    parts.append(("prompt", (None, next(iter(fields["language"].values()))[0][0])))
    form = requests.Request("POST", "http://localhost", files=parts).prepare()
    assert isinstance(form.body, bytes)
    return seen, form.headers["Content-Type"], form.body


def arrays(actions: bytes) -> Arrays:
    """A reply's `actions`, still packed, as arrays."""
    return arrays_of(msgpack.unpackb(actions, strict_map_key=False))


def distance(a: Arrays, b: Arrays) -> float:
    """The largest |a - b| of any action; B may be missing in one of them."""
    if a.keys() != b.keys():
        raise BenchError(f"the answer has the actions {', '.join(a)}, not {', '.join(b)}")
    if not all(np.isfinite(value).all() for value in a.values()):
        raise BenchError("an answer is not finite")
    return max(float(np.abs(a[key].reshape(b[key].shape) - b[key]).max()) for key in b)


# ---------------------------------------------------------------------------------------------------------- the setups


@dataclass
class Setup:
    """Settings to measure: `name` as it was typed, the overlays and lines of config.properties that it means, and to
    how many workers the management API brings the server."""

    name: str
    overlays: list[Path] = field(default_factory=list)
    properties: dict[str, str] = field(default_factory=dict)
    workers: int | None = None
    server: Server | None = None
    gateway: GatewayProcess | None = None
    in_force: dict[str, int] = field(default_factory=dict)
    ready_after_s: float | None = None
    letter: str = "?"  # in the table


def parse_setup(text: str, common: list[Path], folder: Path) -> Setup:
    """What `--compare` takes: overlay files and KEY=VALUE joined by commas, or `none`; merged over `common`.

    KEY=VALUE and handler.KEY=VALUE become an overlay in `folder`, torchserve.KEY=VALUE a line of config.properties;
    workers=N is what ./scripts/scale does with the running server. Raises BenchError: N is no such number.
    """
    pieces = [piece for piece in text.split(",") if piece not in ("", "none")]
    files = [Path(piece) for piece in pieces if "=" not in piece]
    values: dict[str, Any] = {}
    properties: dict[str, str] = {}
    workers = None
    for piece in pieces:
        key, _, value = piece.partition("=")
        if key == "workers":
            if not value.isdecimal() or int(value) < 1:
                raise BenchError(f"workers must be a whole number from 1, got {value!r}")
            workers = int(value)
        elif key.startswith("torchserve."):
            properties[key.removeprefix("torchserve.")] = value
        elif key.startswith("handler."):
            values.setdefault("handler", {})[key.removeprefix("handler.")] = yaml.safe_load(value)
        elif "=" in piece:
            values[key] = yaml.safe_load(value)
    if values:
        folder.mkdir(parents=True, exist_ok=True)
        own = folder / f"{len(list(folder.iterdir()))}.yaml"
        own.write_text(yaml.safe_dump(values), encoding="utf-8")
        files.append(own)
    typed = [relative(str(file)) for file in common] + [relative(piece) for piece in pieces]
    return Setup(", ".join(typed) or "no overlay", [*common, *files], properties, workers)


class TunedServer(Server):
    """A server with further lines in its config.properties."""

    def __init__(self, archive: Path, *, run_dir: Path, properties: dict[str, str]) -> None:
        super().__init__(archive, run_dir=run_dir)
        self.properties = properties

    def _settings(self) -> str:
        return super()._settings() + "".join(f"{key}={value}\n" for key, value in self.properties.items())


@dataclass
class Line:
    """One line of the plots: a setup asked over one protocol in one encoding. `orders` has what client i sends."""

    setup: Setup
    protocol: str
    encoding: str
    orders: list[dict[str, Any]] = field(default_factory=list)
    solo: list[Arrays] = field(default_factory=list)  # the answers to them, each alone
    steps: list[dict[str, Any]] = field(default_factory=list)


# ---------------------------------------------------------------------------------------------------------- the policy


def load_policy(args: argparse.Namespace, config: dict[str, Any], temp: Path) -> Gr00tPolicy:
    """The policy as a worker with this model config would load it."""
    settings = config["handler"]
    folder = settings["checkpoint"] if args.checkpoint is None else args.checkpoint
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.set_num_threads(1)  # as the handler does
    policy = Gr00tPolicy(
        write_checkpoint(temp / "tiny", size="tiny", seed=0) if folder == EMBEDDED else Path(folder),
        device,
        DTYPES[settings["dtype"]],
        tokenizer=Path(settings["tokenizer"]) if settings["tokenizer"] else None,
        limits=Limits(**{name: settings[name] for name in vars(Limits()) if name in settings}),
        engine=ENGINES[settings["engine"]],
        reproducible=settings["reproducible"],
    )
    policy.warm_up()
    return policy


def ceiling(policy: Gr00tPolicy, fields: Sequence[dict[str, Any]], rows: Sequence[int]) -> list[dict[str, float]]:
    """Rows per second of `get_action` for observations of so many rows, from median times."""
    out = []
    for count in rows:
        joined = batch_of([fields[n % len(fields)] for n in range(count)])
        times: list[float] = []
        while len(times) < 5 or (sum(times) < CEILING_SECONDS and len(times) < 100):
            begin = time.perf_counter()
            policy.get_action(joined)
            times.append(time.perf_counter() - begin)
        ms = float(np.median(times[2:])) * 1e3  # the first two warm up
        out.append({"rows": count, "get_action_ms": round(ms, 3), "rows_per_s": round(count / ms * 1e3, 2)})
    return out


def ceiling_rows(batch_size: int, clients: int | None) -> int:
    """Rows of the largest forward that can form: the clients bound it in a closed loop, the batch size always."""
    return batch_size if clients is None else min(clients, batch_size)


# ----------------------------------------------------------------------------------------------------------- the steps


class Clients:
    """Client processes that live through all steps: `with Clients(8) as clients: clients.run(orders)`."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __enter__(self) -> Clients:
        self.connections: list[Connection] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
        for _ in range(self.count):
            ours, theirs = multiprocessing.Pipe()
            self.processes.append(subprocess.Popen([sys.executable, "-m", "scripts.bench_client", str(theirs.fileno())],
                                                   pass_fds=[theirs.fileno()], env=env))  # fmt: skip
            theirs.close()
            self.connections.append(ours)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for connection in self.connections:
            connection.close()  # what ends a client
        for process in self.processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:  # one that is still at a step
                process.kill()
                process.wait()

    def run(self, orders: Sequence[dict[str, Any]]) -> tuple[float, list[dict[str, Any]]]:
        """A step, an order a client, all started at once: the time of the start, and what each client returned.

        Raises BenchError when a client ended, as it does when an answer takes longer than its patience.
        """
        used = self.connections[: len(orders)]
        try:
            for connection, order in zip(used, orders, strict=True):
                connection.send(order)
            for connection in used:
                connection.recv()  # ready
            start = time.monotonic() + START_SECONDS
            for connection in used:
                connection.send(start)
            return start, [connection.recv() for connection in used]
        except (EOFError, OSError):
            raise BenchError("a client ended; its last words are above") from None


def poisson(rate: float, seconds: float, seed: int) -> NDArray[np.float64]:
    """Arrival times of a Poisson process of `rate` a second, sorted: given their number, they are uniform."""
    rng = np.random.default_rng(seed)
    return np.sort(rng.uniform(0, seconds, rng.poisson(rate * seconds)))


def loads(args: argparse.Namespace) -> list[dict[str, float]]:
    """The steps of every line: {"clients": n} in a closed loop, {"rate": r, "clients": n} in an open one."""
    return [*({"clients": n} for n in args.clients),
            *({"rate": rate, "clients": args.open_clients} for rate in args.open_loop)]  # fmt: skip


def schedules(load: dict[str, float], args: argparse.Namespace, turn: int) -> list[dict[str, Any]]:
    """What tells the clients of a step when to send, see `bench_client.due_times`."""
    clients = int(load["clients"])
    base = {"warmup": args.warmup, "requests": None, "seconds": None, "think": args.think_ms / 1e3, "phase": 0.0,
            "arrivals": None}  # fmt: skip
    if "rate" in load:
        seconds = args.seconds if args.seconds is not None else 10.0
        arrivals = poisson(load["rate"], seconds, turn)
        return [{**base, "arrivals": arrivals[n::clients].tolist()} for n in range(clients)]
    requests = args.requests or (30 if args.seconds is None else None)
    # Robots that think are not in step; those that do not start together.
    phases = np.random.default_rng(turn).uniform(0, base["think"], clients)
    return [{**base, "requests": requests, "seconds": args.seconds, "phase": float(phase)} for phase in phases]


@dataclass
class Tally:
    """A step's outcome, over all its rounds."""

    records: list[Any] = field(default_factory=list)
    elapsed: list[float] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)
    cpu_s: float = 0.0
    differences: list[float] = field(default_factory=list)
    complaint: str = ""

    def add(self, start: float, results: Sequence[dict[str, Any]], solo: Sequence[Arrays]) -> None:
        """A round's results, client i's answers being those to the observation that got solo[i] alone."""
        records = [record for result in results for record in result["records"]]
        self.records += records
        self.elapsed.append(max((record[2] for record in records), default=start) - start)
        self.answered.append(sum(record[3] == "200" for record in records))
        self.cpu_s += sum(result["cpu_s"] for result in results)
        for result, alone in zip(results, solo, strict=False):
            self.differences += [distance(arrays(answer), alone) for answer in result["answers"]]
            self.complaint = result["complaint"] or self.complaint


def percentile(values: Sequence[float], q: float) -> float:
    """The smallest of the values that at least q % of them do not exceed (nearest rank); nan of none."""
    return float(np.percentile(values, q, method="inverted_cdf")) if len(values) else float("nan")


def figures(load: dict[str, float], tally: Tally, in_force: dict[str, int],
            limits: Sequence[dict[str, float]] = (), gpus: int = 0) -> dict[str, Any]:  # fmt: skip
    """A step's report. in_force: the server's settings; limits: what `ceiling` returned.

    Latencies are milliseconds of the requests that were answered: in a closed loop from sending, in an open one from
    when the request was due, whether or not a client was free then. `forward_share`: time in forwards, each wave
    counted once, of the elapsed time of all workers; an upper bound of the accelerator's busy time. `client_cores`: CPU
    time of all clients together by elapsed time. `share_of_ceiling`: requests/s of the policy's own rows/s at the most
    rows that a forward can have here, on each GPU that has a worker.
    """
    open_loop = "rate" in load
    good = [record for record in tally.records if record[3] == "200"]
    latencies = [(received - (due if open_loop else sent)) * 1e3 for due, sent, received, *_ in good]
    elapsed, waves = sum(tally.elapsed), Counter(record[4] for record in good if record[4])
    forwards = sum(record[5] / record[4] for record in good if record[4]) / 1e3
    rate = len(good) / elapsed if elapsed else 0.0
    workers = in_force.get("minWorkers", 1)
    rows = ceiling_rows(in_force["batchSize"], None if open_loop else int(load["clients"])) if in_force else None
    most = sum(line["rows_per_s"] for line in limits if line["rows"] == rows) * max(1, min(workers, gpus))
    by_round = [n / s if s else 0.0 for n, s in zip(tally.answered, tally.elapsed, strict=True)]

    def ms(value: float) -> float | None:
        return None if np.isnan(value) else round(value, 2)

    return {
        **load,
        "requests": len(good),
        "refused": dict(Counter(record[3] for record in tally.records if record[3] != "200")),
        **({"first_refusal_says": tally.complaint} if tally.complaint else {}),
        "elapsed_s": round(elapsed, 3),
        "requests_per_s": round(rate, 2),
        "requests_per_s_by_round": [round(value, 2) for value in by_round],
        "mean_ms": ms(float(np.mean(latencies)) if latencies else float("nan")),
        **{f"p{q}_ms": ms(percentile(latencies, q)) for q in (50, 95, 99)},
        **({"sent_late_p99_ms": ms(percentile([(r[1] - r[0]) * 1e3 for r in tally.records], 99))} if open_loop else {}),
        "inference_p50_ms": ms(percentile([record[5] for record in good if record[4]], 50)),
        "forward_share": round(forwards / elapsed / workers, 3) if forwards else None,
        **({"ceiling_rows": rows, "ceiling_requests_per_s": round(most, 2), "share_of_ceiling": round(rate / most, 3)}
           if most else {}),
        "requests_by_wave_size": {str(size): waves[size] for size in sorted(waves)},
        "client_cores": round(tally.cpu_s / elapsed, 3) if elapsed else 0.0,
        "largest_difference_from_solo": max(tally.differences, default=None),
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- the sweep


Bodies = dict[str, list[tuple[dict[str, Any], str, bytes]]]  # by encoding, a client's each: see `encode`


def make_bodies(contract: dict[str, Any], count: int, args: argparse.Namespace) -> Bodies:
    """What each of so many clients sends. Raises BenchError where the checkpoint has no such embodiment."""
    tags = list(contract["embodiments"])
    args.embodiment_tag = args.embodiment_tag or tags[0]
    if args.embodiment_tag not in tags:
        raise BenchError(f"the checkpoint has no embodiment {args.embodiment_tag}, but {', '.join(tags)}")
    fields = [observation(contract, args.embodiment_tag, tuple(args.size), seed) for seed in range(count)]
    return {encoding: [encode(f, encoding) for f in fields] for encoding in args.encodings}


def alone(setups: list[Setup], steps: list[dict[str, float]], args: argparse.Namespace, temp: Path,
          report: dict[str, Any]) -> tuple[Bodies, dict[str, list[Arrays]]]:  # fmt: skip
    """The policy in this process: bodies, right answers by encoding, and into the report its golden test and ceiling.

    It has the first setup's settings, and is gone again when this returns, before a server needs its memory.
    """
    configs = [merge_config(setup.overlays) for setup in setups]
    policy = load_policy(args, configs[0], temp)
    bodies = make_bodies(policy.describe(), max(int(load["clients"]) for load in steps), args)
    if args.golden:
        golden = json.loads(args.golden.read_text(encoding="utf-8"))
        worst = float(np.max([difference for _, _, difference in compare(policy, golden)]))
        report["golden"] = {"what": golden["what"], "largest_difference": worst, "allowed": golden["atol"]}
        if not worst <= golden["atol"]:
            raise BenchError(f"golden actions differ by {worst:.2g}; {golden['atol']} is allowed")
    answers = {encoding: [policy.get_action(seen) for seen, _, _ in bodies[encoding]] for encoding in bodies}
    needed = {ceiling_rows(config["batchSize"], None if "rate" in load else int(load["clients"]))
              for config in configs for load in steps}  # fmt: skip
    rows = sorted(n for n in needed | set(args.ceiling_rows) if n <= policy.limits.max_rows)
    report["ceiling"] = ceiling(policy, [seen for seen, _, _ in bodies[args.encodings[0]]], rows)
    for line in report["ceiling"]:
        print(f"policy alone, {line['rows']:2} rows: {line['get_action_ms']:8.2f} ms, {line['rows_per_s']:8.2f} rows/s")
    del policy
    free()
    return bodies, answers


def orders(line: Line, bodies: Bodies, args: argparse.Namespace) -> list[dict[str, Any]]:
    """What the clients of this line send, and where, see `bench_client.connect`."""
    server, gateway = line.setup.server, line.setup.gateway
    assert server is not None
    url = {"rest": server.predict_url, "grpc": f"http://127.0.0.1:{server.ports[3]}",
           "openpi": gateway.url if gateway else "",
           "gateway": f"{gateway.url.replace('ws', 'http', 1)}/predictions/{MODEL_NAME}" if gateway else "",
           }[line.protocol]  # fmt: skip
    common = {"protocol": line.protocol, "url": url, "key": server.inference_key}
    return [{**common, "content_type": kind, "body": body} for _, kind, body in bodies[line.encoding]]


def ask_alone(order: dict[str, Any]) -> Arrays:
    """The answer to a request without company."""
    ask, close = connect(order)
    try:
        status, body = ask()
    finally:
        close()
    if status != "200":
        raise BenchError(f"{order['protocol']} answered {status}: {body[:300].decode('utf-8', 'replace')}")
    return arrays(msgpack.packb(actions_of(order, msgpack.unpackb(body, strict_map_key=False))))


def sweep(args: argparse.Namespace, temp: Path) -> dict[str, Any]:
    """The whole measurement: its report. Prints as it goes.

    Raises BenchError, ConfigError, StartError, ManageError; CheckpointError, Problem: the policy in this process cannot
    be used.
    """
    setups = [parse_setup(text, args.overlay, temp / "overlays") for text in args.compare]
    steps = loads(args)
    report: dict[str, Any] = {"command": command("bench"), "machine": machine(), "ceiling": []}
    if not torch.cuda.is_available():
        report["machine"]["torch_threads"] = str(torch.get_num_threads())  # the workers' too: OMP_NUM_THREADS
    print(f"{report['machine']['gpu']} / {report['machine']['cpu']}")
    bodies, right = alone(setups, steps, args, temp, report) if args.ceiling_rows else ({}, {})
    with contextlib.ExitStack() as stack:
        for n, setup in enumerate(setups):  # one idles while another is measured
            archive = build(args.checkpoint, setup.overlays, temp / f"store{n}" / f"{MODEL_NAME}.mar")
            began = time.perf_counter()
            setup.server = stack.enter_context(
                TunedServer(archive, run_dir=temp / f"run{n}", properties=setup.properties)
            )
            if setup.workers is not None:
                api = Management(setup.server.management_url, setup.server.management_key)
                show_scaling = Progress("bench")
                scale(api, MODEL_NAME, None, setup.workers, SCALE_SECONDS, setup.server.log_path, show_scaling)
                show_scaling.end()
            setup.ready_after_s = round(time.perf_counter() - began, 1)
            if {"openpi", "gateway"} & set(args.protocols):
                setup.gateway = stack.enter_context(GatewayProcess(setup.server, temp / f"gateway{n}"))
            # With other settings in force a server does not start.
            setup.in_force = {key: setup.server.config[key] for key in SHOWN}
            setup.in_force["minWorkers"] = setup.workers or setup.in_force["minWorkers"]
            setup.letter = chr(ord("A") + n)
            print(f"{setup.letter}  {setup.name}: READY after {setup.ready_after_s} s with {setup.in_force}")
        assert setups[0].server is not None
        contract = setups[0].server.describe(customized=True)["customizedMetadata"]
        bodies = bodies or make_bodies(contract, max(int(load["clients"]) for load in steps), args)
        # TorchServe takes forms over REST alone, OpenPI has none.
        http = ("rest", "gateway")
        lines = [Line(setup, protocol, encoding) for setup in setups for protocol in args.protocols
                 for encoding in args.encodings if protocol in http or encoding == "msgpack"]  # fmt: skip
        report |= {
            "checkpoint": contract["checkpoint"],
            "dtype": contract["dtype"],
            "embodiment": args.embodiment_tag,
            "frame_size": list(args.size),
            "request_bytes": {encoding: len(bodies[encoding][0][2]) for encoding in bodies},
            "think_ms": args.think_ms,
            "rounds": args.rounds,
            "tolerance": TOLERANCE[contract["dtype"]],
            "compared_with": "the policy in process" if right else "the first line's solo answers",
            "lines": [],
        }
        for line in lines:  # right before fast
            line.orders = orders(line, bodies, args)
            line.solo = [ask_alone(order) for order in line.orders]
            apart = max(map(distance, line.solo, right.setdefault(line.encoding, line.solo)))
            report["lines"].append({
                "setup": line.setup.name,
                "in_force": line.setup.in_force,
                "ready_after_s": line.setup.ready_after_s,
                "protocol": line.protocol,
                "encoding": line.encoding,
                "solo_largest_difference": apart,
                "steps": line.steps,
            })  # fmt: skip
            if not apart <= report["tolerance"]:
                raise BenchError(f"{line.setup.name}, {line.protocol} {line.encoding}: solo answers differ from "
                                 f"{report['compared_with']} by {apart:.2g}; {report['tolerance']} is allowed")
        measure(lines, steps, args, report)
    return report


def measure(lines: list[Line], steps: list[dict[str, float]], args: argparse.Namespace,
            report: dict[str, Any]) -> None:  # fmt: skip
    """Every step of every line, `rounds` times; lines take turns, so that what else the machine does meets them all.

    Each step's figures go to `--json` at once: a run that is ended before the last leaves those before it.
    """
    gpus = torch.cuda.device_count()
    tallies = [[Tally() for _ in steps] for _ in lines]
    total, done = args.rounds * len(steps) * len(lines), 0
    print(f"{'':20} {'clients':>7} {'req/s':>8} {'ceiling':>7} {'mean ms':>8} {'p50':>8} {'p95':>8} {'p99':>8} "
          f"{'forward':>8} {'busy':>5}  requests by wave size")  # fmt: skip
    with Clients(max(int(load["clients"]) for load in steps)) as clients:
        for turn in range(args.rounds):
            for s, load in enumerate(steps):
                for n, line in list(enumerate(lines))[:: 1 if turn % 2 == 0 else -1]:
                    name = f"{line.setup.letter} {line.protocol} {line.encoding}"
                    progress(done, total, f"{name}, {load}")
                    todo = [{**what, **when} for what, when in zip(line.orders, schedules(load, args, turn),
                                                                   strict=False)]  # fmt: skip
                    tallies[n][s].add(*clients.run(todo), line.solo)
                    done += 1
                    if turn == args.rounds - 1:
                        line.steps.append(figures(load, tallies[n][s], line.setup.in_force, report["ceiling"], gpus))
                        show(name, line.steps[-1])
                        if args.json:
                            write_report(report, args.json)
    clear()


def progress(done: int, total: int, text: str) -> None:
    """A bar on a terminal, nothing in a log."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K[{'#' * (30 * done // total):30}] {100 * done // total:3} %  {text}", end="", file=sys.stderr,
              flush=True)  # fmt: skip


def clear() -> None:
    """Takes the bar away, so that a line can be printed."""
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def show(name: str, step: dict[str, Any]) -> None:
    """A row of the table."""

    def cell(value: float | None, width: int, form: str) -> str:
        return f"{'-' if value is None else format(value, form):>{width}}"

    load = f"{step['rate']:g}/s" if "rate" in step else str(step["clients"])
    times = " ".join(cell(step[key], 8, ".2f") for key in ("mean_ms", "p50_ms", "p95_ms", "p99_ms", "inference_p50_ms"))
    refused = f"  REFUSED {step['refused']}" if step["refused"] else ""
    clear()
    print(f"{name:20} {load:>7} {step['requests_per_s']:8.2f} {cell(step.get('share_of_ceiling'), 7, '.0%')} {times} "
          f"{cell(step['forward_share'], 5, '.0%')}  "
          f"{' '.join(f'{size}:{n}' for size, n in step['requests_by_wave_size'].items())}{refused}", flush=True)


def verdict(report: dict[str, Any]) -> list[str]:
    """What is wrong with the answers, in words; nothing is the good case."""
    steps = [(line, step) for line in report["lines"] for step in line["steps"]]
    complaints = [
        f"{line['setup']}, {line['protocol']}, {step['clients']} clients: refused {step['refused']}"
        for line, step in steps if step["refused"] and "rate" not in step  # an open loop may flood the queue
    ]  # fmt: skip
    worst = max((step["largest_difference_from_solo"] or 0.0 for _, step in steps), default=0.0)
    print(f"largest difference between an answer in company and alone: {worst:.2g}")
    if not worst <= report["tolerance"]:
        complaints.append(f"an answer in company differs by {worst:.2g}; {report['tolerance']} is allowed")
    return complaints


def plot(report: dict[str, Any], file: Path) -> None:
    """Throughput and latency against clients, and latency against the arrival rate: what was measured of these."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = report["lines"]
    counts = sorted({step["clients"] for line in lines for step in line["steps"] if "rate" not in step})
    opened = any("rate" in step for line in lines for step in line["steps"])
    width = 2 * bool(counts) + opened
    figure, axes = plt.subplots(1, width, figsize=(max(7, 5.5 * width), 5.5), squeeze=False)
    throughput, latency, arrivals = axes[0][0], axes[0][min(1, width - 1)], axes[0][-1]
    setups = list(dict.fromkeys(line["setup"] for line in lines))
    kinds = list(dict.fromkeys((line["protocol"], line["encoding"]) for line in lines))
    for line in lines:
        kind = kinds.index((line["protocol"], line["encoding"]))
        style: dict[str, Any] = {"color": f"C{setups.index(line['setup'])}", "marker": "os^DvP"[kind]}
        label = line["setup"] + (f" ({line['protocol']}, {line['encoding']})" if len(kinds) > 1 else "")
        closed = [step for step in line["steps"] if "rate" not in step and step["requests"]]
        if closed:
            x = [step["clients"] for step in closed]
            throughput.plot(x, [step["requests_per_s"] for step in closed], label=label, **style)
            latency.plot(x, [step["p50_ms"] for step in closed], **style)
            latency.plot(x, [step["p95_ms"] for step in closed], ":", **style)
            if "share_of_ceiling" in closed[0] and kind == 0:
                throughput.plot(x, [step["ceiling_requests_per_s"] for step in closed], "--", color=style["color"],
                                alpha=0.6, label=f"{line['setup']}: ceiling, the policy alone")  # fmt: skip
        steps = [step for step in line["steps"] if "rate" in step and step["requests"]]
        if steps:
            x = [step["rate"] for step in steps]
            arrivals.plot(x, [step["p50_ms"] for step in steps], label=None if closed else label, **style)
            arrivals.plot(x, [step["p99_ms"] for step in steps], ":", **style)
    if counts:
        for axis in (throughput, latency):
            axis.set_xscale("log", base=2)
            axis.set_xticks(counts, [str(n) for n in counts])
            axis.set(xlabel="robots in a closed loop", ylim=(0, None))
        throughput.set(title="Throughput", ylabel="requests per second")
        latency.set(title="Latency: median, dotted 95th percentile", ylabel="milliseconds")
    if opened:
        arrivals.set(title="Poisson arrivals: median, dotted 99th percentile", xlabel="arrivals per second",
                     yscale="log", ylabel="milliseconds from the intended arrival")  # fmt: skip
    for axis in axes[0]:
        axis.grid(alpha=0.3)
    where = report["machine"]
    think = f", {report['think_ms']:g} ms between an answer and the next request" if report["think_ms"] else ""
    chips = ", ".join(where[kind] for kind in ("gpu", "cpu") if where[kind] != "none")
    figure.text(0.5, 0.01, f"{chips}, PyTorch {where['torch']}; checkpoint {report['checkpoint']} in "
                f"{report['dtype']}, {report['embodiment']}{think}", ha="center", fontsize=8)  # fmt: skip
    handles = sum(len(axis.get_legend_handles_labels()[0]) for axis in axes[0])
    figure.legend(loc="lower center", bbox_to_anchor=(0.5, 0.04), ncols=2, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.06 + 0.04 * ((handles + 1) // 2), 1, 1))
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpoint", type=Path, help="folder; default: the embedded small checkpoint")
    add("--overlay", type=Path, action="append", default=[], metavar="FILE", help="of every setup, over gr00t.yaml")
    add("--compare", nargs="+", metavar="SETUP",
        help="setups side by side: overlay files, KEY=VALUE, handler.KEY=VALUE and torchserve.KEY=VALUE (for "
        "config.properties) joined by commas, with workers=N scaled as by ./scripts/scale, or `none`; default: "
        "--overlay alone, or none and config/batched.yaml")
    add("--clients", type=int, nargs="*", default=[1, 2, 4, 8], help="closed-loop steps; none: open loop only")
    add("--open-loop", type=float, nargs="+", default=[], metavar="RATE", help="Poisson steps, arrivals/s")
    add("--open-clients", type=int, default=32, help="processes that share the arrivals")
    add("--think-ms", type=float, default=0.0, help="closed loop: from an answer to the next request")
    add("--requests", type=int, help="closed loop: timed requests a client (30, or as many as fit in --seconds)")
    add("--seconds", type=float, help="of a step at most; of an open-loop step (10)")
    add("--warmup", type=int, default=5, help="requests a client before each step")
    add("--rounds", type=int, default=1, help="how often to go through all steps; figures are of all rounds together")
    add("--protocols", nargs="+", choices=("rest", "grpc", "gateway", "openpi"), default=["rest"],
        help="gateway, openpi: REST, and OpenPI's protocol, through ./scripts/gateway, started before each server")
    add("--encodings", nargs="+", choices=("msgpack", "jpeg"), default=["msgpack"],
        help="jpeg: multipart, over REST only")
    add("--embodiment-tag", help="default: the checkpoint's first")
    add("--size", type=int, nargs=2, default=[256, 256], metavar=("HEIGHT", "WIDTH"))
    add("--ceiling-rows", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32],
        help="rows of the policy alone, with the first setup's settings; none: it is not loaded in this process")
    add("--golden", type=Path, nargs="?", const=GOLDEN, metavar="FILE", help="first, what check_golden does")
    add("--json", type=Path, help="file for the figures")
    add("--plot", type=Path, help="PNG of the figures")
    args = parser.parse_args(argv)
    numbers = [*args.clients, *args.open_loop, args.open_clients, args.rounds, *args.ceiling_rows]
    numbers += [number for number in (args.requests, args.seconds) if number is not None]
    if min(numbers) <= 0 or args.warmup < 0 or args.think_ms < 0:
        parser.error("numbers must be positive; --warmup and --think-ms may be 0")
    if not (args.clients or args.open_loop):
        parser.error("nothing to measure: give --clients or --open-loop")
    if "msgpack" not in args.encodings and {"grpc", "openpi"} & set(args.protocols):
        parser.error("jpeg goes over REST only: add `--encodings msgpack`, or leave out the other protocols")
    if args.golden and not args.ceiling_rows:
        parser.error("--golden needs the policy in this process: give --ceiling-rows")
    if args.compare is None:
        args.compare = ["none"] if args.overlay else ["none", str(ROOT / "config" / "batched.yaml")]
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    with tempfile.TemporaryDirectory(prefix="gr00t-bench-") as temp:
        try:
            report = sweep(args, Path(temp))
        except (BenchError, ConfigError, StartError, ManageError, CheckpointError, Problem) as error:
            clear()
            print(f"error: {error}", file=sys.stderr)
            return 1
    complaints = verdict(report)
    if args.plot:
        plot(report, args.plot)
    for complaint in complaints:
        print(f"error: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
