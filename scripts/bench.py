"""Measures a served checkpoint: closed-loop robots in processes of their own, more of them in every step.

Each client sends its own observation, waits for the actions and sends again. Every client's answer in company
is compared with the one that it got alone, before the sweep. Prints a table; `--json FILE` keeps the figures.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import psutil
import requests
import torch

from scripts.package import MODEL_NAME, ROOT, build
from scripts.serve import Server, StartError, local_session


def pack(value: Any) -> Any:
    """Arrays in the OpenPI msgpack form."""
    if isinstance(value, np.ndarray):
        return {"__ndarray__": True, "data": value.tobytes(), "dtype": value.dtype.str, "shape": list(value.shape)}
    return {key: pack(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def observation(contract: dict[str, Any], tag: str, size: tuple[int, int], seed: int) -> dict[str, Any]:
    """An observation of one robot: random frames of (height, width), the example's state and instruction."""
    rng = np.random.default_rng(seed)
    video, state = contract["embodiments"][tag]["video"], contract["embodiments"][tag]["state"]
    fields: dict[str, Any] = {
        "video": {key: rng.integers(0, 256, (1, video["frames"], *size, 3), dtype=np.uint8) for key in video["keys"]},
        "state": {key: rng.uniform(-0.3, 0.3, (1, s["steps"], s["width"])).astype(np.float32)
                  for key, s in state.items()},
        "prompt": "pick up the red object and put it into the drawer",
        "options": {"embodiment_tag": tag, "seed": seed},
    }  # fmt: skip
    for key, action in contract["embodiments"][tag]["action"].items():
        if action.get("relative_to") and action["width"] == 9:  # a pose: its last six numbers are a rotation
            fields["state"][action.get("relative_to", key)][..., 3:] = (1, 0, 0, 0, 1, 0)
    return fields


def ask(session: requests.Session, url: str, key: str | None, body: bytes) -> dict[str, Any]:
    """One request; the reply's document, arrays still packed."""
    headers = {"Content-Type": "application/msgpack", **({"Authorization": f"Bearer {key}"} if key else {})}
    reply = session.post(url, data=body, headers=headers, timeout=120)
    if reply.status_code != 200:
        raise RuntimeError(f"{reply.status_code}: {reply.text[:300]}")
    document: dict[str, Any] = msgpack.unpackb(reply.content, strict_map_key=False)
    return document


def arrays(document: dict[str, Any]) -> dict[str, np.ndarray]:
    return {
        key: np.frombuffer(value[b"data"], value[b"dtype"]).reshape(value[b"shape"])
        for key, value in document["actions"].items()
    }


def client(
    url: str, key: str | None, body: bytes, warmup: int, count: int, start: Barrier, index: int,
    out: multiprocessing.Queue[Any],
) -> None:  # fmt: skip
    """A robot in a process of its own: `warmup` requests, then `count` timed ones, all at once with the others."""
    session, records, last = local_session(), [], {}
    for _ in range(warmup):
        ask(session, url, key, body)
    start.wait()
    begin = time.perf_counter()
    for _ in range(count):
        sent = time.perf_counter()
        last = ask(session, url, key, body)
        info = last["info"]
        records.append((time.perf_counter() - sent, info["wave_requests"], info["group_rows"], info["inference_ms"]))
    out.put((index, begin, time.perf_counter(), records, arrays(last)))


def cpu_seconds(server: Server) -> float:
    """CPU time of TorchServe, its workers and what reads their output, so far."""
    assert server._process is not None
    processes = [psutil.Process(), *psutil.Process(server._process.pid).children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def step(server: Server, bodies: list[bytes], warmup: int, count: int) -> tuple[dict[str, Any], list[Any]]:
    """One step of the sweep, a client per body: its figures, and every client's last actions, in order."""
    context = multiprocessing.get_context("spawn")
    start, out = context.Barrier(len(bodies) + 1), context.Queue()
    processes = [
        context.Process(
            target=client,
            args=(server.predict_url, server.inference_key, body, warmup, count, start, index, out),
        )
        for index, body in enumerate(bodies)
    ]
    for process in processes:
        process.start()
    start.wait()
    cpu = cpu_seconds(server)
    results = sorted((out.get(timeout=600) for _ in processes), key=lambda result: result[0])
    cpu = cpu_seconds(server) - cpu
    for process in processes:
        process.join()
    records = [record for result in results for record in result[3]]
    latencies = sorted(record[0] * 1e3 for record in records)
    elapsed = max(result[2] for result in results) - min(result[1] for result in results)
    waves = Counter(record[1] for record in records)
    return {
        "clients": len(bodies),
        "requests": len(records),
        "requests_per_s": round(len(records) / elapsed, 2),
        "mean_ms": round(statistics.mean(latencies), 2),
        "p50_ms": round(statistics.median(latencies), 2),
        "p95_ms": round(latencies[int(0.95 * (len(latencies) - 1))], 2),
        "server_cpu_ms_per_request": round(cpu * 1e3 / len(records), 2),
        "inference_p50_ms": round(statistics.median(record[3] for record in records), 2),
        "requests_by_wave_size": {str(size): waves[size] for size in sorted(waves)},
    }, [result[4] for result in results]


def machine() -> dict[str, str]:
    """What this ran on, by the names its makers gave it."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        cpu = f"{names[0]}, {len(names)} threads" if names else cpu
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"gpu": gpu, "cpu": cpu, "python": platform.python_version(), "torch": torch.__version__}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="folder; default: the embedded small checkpoint")
    parser.add_argument("--overlay", type=Path, action="append", default=[], help="YAML merged over config/gr00t.yaml")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--requests", type=int, default=30, help="timed requests a client")
    parser.add_argument("--warmup", type=int, default=5, help="requests a client before that")
    parser.add_argument("--embodiment-tag", help="default: the checkpoint's first")
    parser.add_argument("--size", type=int, nargs=2, default=[256, 256], metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gr00t-bench-") as temp:
        archive = build(args.checkpoint, args.overlay, Path(temp) / "store" / f"{MODEL_NAME}.mar")
        began = time.perf_counter()
        try:
            with Server(archive, run_dir=Path(temp) / "run") as server:
                report = sweep(server, args, time.perf_counter() - began)
        except StartError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    if args.json:
        write_report(report, args.json)
    return 0


def sweep(server: Server, args: argparse.Namespace, started_s: float) -> dict[str, Any]:
    """Solo answers first, then every number of clients; prints as it goes."""
    model = server.describe(customized=True)
    contract = model["customizedMetadata"]
    tag = args.embodiment_tag or next(iter(contract["embodiments"]))
    bodies = [
        msgpack.packb(pack(observation(contract, tag, tuple(args.size), seed))) for seed in range(max(args.clients))
    ]
    with local_session() as session:
        solo = [arrays(ask(session, server.predict_url, server.inference_key, body)) for body in bodies]
    report = {
        "command": command("bench"),
        "machine": machine(),
        "checkpoint": contract["checkpoint"],
        "dtype": contract["dtype"],
        "embodiment": tag,
        "frame_size": list(args.size),
        "request_bytes": len(bodies[0]),
        "in_force": {key: model[key] for key in ("batchSize", "maxBatchDelay", "minWorkers")},
        "ready_after_s": round(started_s, 1),
        "steps": [],
    }
    print(f"{report['machine']['gpu']} / {report['machine']['cpu']}; checkpoint {contract['checkpoint']} in "
          f"{contract['dtype']}; batch size {model['batchSize']}; READY after {started_s:.1f} s")
    print(f"{'clients':>7} {'req/s':>8} {'mean ms':>8} {'p50 ms':>8} {'p95 ms':>8} {'forward':>8}  waves")
    for clients in args.clients:
        figures, answers = step(server, bodies[:clients], args.warmup, args.requests)
        figures["largest_difference_from_solo"] = max(map(distance, answers, solo))
        report["steps"].append(figures)
        print(f"{clients:7} {figures['requests_per_s']:8.2f} {figures['mean_ms']:8.2f} {figures['p50_ms']:8.2f} "
              f"{figures['p95_ms']:8.2f} {figures['inference_p50_ms']:8.2f}  "
              f"{' '.join(f'{size}:{n}' for size, n in figures['requests_by_wave_size'].items())}", flush=True)
    worst = max(figures["largest_difference_from_solo"] for figures in report["steps"])
    print(f"largest difference between an answer in company and alone: {worst:.2g}")
    return report


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    return max(float(np.abs(a[key] - b[key]).max()) for key in b)


def write_report(report: dict[str, Any], file: Path) -> None:
    """Figures as JSON, in a folder that may have to be made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def command(name: str) -> str:
    """What was typed to make a report: the script of this name with this process's arguments."""
    return f"./scripts/{name} " + " ".join(relative(word) for word in sys.argv[1:])


def relative(word: str) -> str:
    """A path below the repository as it is typed there; other paths by their last name."""
    path = Path(word)
    if path.is_absolute():
        return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
    return word


if __name__ == "__main__":
    sys.exit(main())
