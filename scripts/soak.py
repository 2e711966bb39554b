"""Serves for a long time under poison and worker kills, and verifies every single reply.

Each client sends its next request when it has the answer to the last one. Good requests must get the bits that the same
checkpoint gives in this process (`reproducible: true`), hostile ones the very answer that `tests/adversary` says. A
worker is killed now and then; who is answered that it died asks again. At the end: right, wrong, lost without an
answer, late, restarts and memory. Exit status 1 when anything was wrong or lost.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import requests

from handler.policy import Actions, Gr00tPolicy
from scripts.bench_engine import WORDS, random_observation
from scripts.make_checkpoint import write_checkpoint
from scripts.package import MODEL_NAME, ROOT, build
from scripts.report import command, machine, write_report
from scripts.serve import Server, StartError, local_session
from tests.adversary.catalogue import KINDS, Kind, complaint
from tests.client import Body, as_json, as_msgpack, as_multipart, differences, gr00t, read

TEMPLATES = 48  # good requests, with their right answers
AFTERMATH = 30.0  # s after a kill in which a request may be answered that the worker died
EXAMPLES = 20  # failures that the report shows


@dataclass
class Tally:
    """What came back, under one lock."""

    right: Counter[str] = field(default_factory=Counter)  # "good", "hostile"
    died: Counter[str] = field(default_factory=Counter)  # answered that a worker died: "status message"
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    late: int = 0
    latencies: list[float] = field(default_factory=list)  # s, of good requests outside of an aftermath
    hostile: dict[str, list[float]] = field(default_factory=dict)  # s, likewise, by kind
    last_kill: float = float("-inf")
    lock: threading.Lock = field(default_factory=threading.Lock)


def templates(policy: Gr00tPolicy) -> list[tuple[Body, Actions]]:
    """Good requests of every embodiment and encoding, with their actions."""
    encodings = (as_msgpack, as_json, as_multipart, lambda fields: as_msgpack(fields, gr00t))
    rng = np.random.default_rng(0)
    out = []
    for n in range(TEMPLATES):
        tag = list(policy.embodiments)[n % len(policy.embodiments)]
        prompt = " ".join(rng.choice(WORDS, 1 + n % 8))
        fields = random_observation(policy, tag, (64, 64), prompt, n)
        out.append((encodings[n // 2 % 4](fields), policy.get_action(fields)))
    return out


def is_right(reply: requests.Response, kind: Kind | None, want: Actions) -> bool:
    """Whether a hostile kind got its very answer, or a good request (None) the very bits of `want`."""
    try:
        return not (complaint(kind, reply) if kind else differences(read(reply)[0], want))
    except Exception:  # whatever a broken reply makes of the decoders, it is wrong
        return False


def robot(server: Server, good: list[tuple[Body, Actions]], small: dict[str, Any], args: argparse.Namespace, seed: int,
          tally: Tally, stop: threading.Event) -> None:  # fmt: skip
    """A client: one request at a time until `stop`."""
    rng = np.random.default_rng(seed)
    with local_session() as session:
        while not stop.is_set():
            kind = KINDS[int(rng.integers(len(KINDS)))] if rng.random() < args.poison else None
            body, want = good[int(rng.integers(len(good)))]
            if kind is not None:
                body = kind.make(copy.deepcopy(small))
            for _ in range(100):  # until it is answered by a worker that lives
                sent = time.monotonic()
                headers = {"Authorization": f"Bearer {server.inference_key}", **body[0]}
                try:
                    reply = session.post(server.predict_url, data=body[1], headers=headers, timeout=120)
                except requests.RequestException as error:
                    with tally.lock:
                        tally.lost.append(f"{kind.name if kind else 'good'}: {type(error).__name__}: {error}"[:300])
                    break
                now = time.monotonic()
                right = is_right(reply, kind, want)
                with tally.lock:
                    calm = sent - tally.last_kill > AFTERMATH
                    if right:
                        tally.right["hostile" if kind else "good"] += 1
                        if calm:
                            (tally.hostile.setdefault(kind.name, []) if kind else tally.latencies).append(now - sent)
                            tally.late += now - sent > args.late
                        break
                    if reply.status_code in (500, 507) and "Worker died." in reply.text and not calm:
                        tally.died[f"{reply.status_code} {reply.text[:80]}"] += 1
                        continue
                    tally.wrong.append(f"{kind.name if kind else 'good'}: {reply.status_code} {reply.text[:300]}")
                    break
            else:
                with tally.lock:
                    tally.lost.append("a worker died at every attempt")


def resident(server: Server) -> dict[str, float]:
    """Resident megabytes of Java and of the workers together."""
    found = {"java": 0.0, "workers": 0.0}
    assert server._process is not None
    for process in psutil.Process(server._process.pid).children(recursive=True):
        try:
            name, command = process.name(), process.cmdline()
            kind = "java" if name == "java" else "workers" if "model_service_worker.py" in " ".join(command) else ""
            if kind:
                found[kind] += process.memory_info().rss / 1e6
        except psutil.Error:  # it ended meanwhile
            continue
    return found


def replace_worker(server: Server, tally: Tally) -> float:
    """Kills the worker; seconds until another is READY."""
    pids = server.worker_pids()
    began = time.monotonic()
    with tally.lock:
        tally.last_kill = began
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    server.wait_for_other_workers(pids, 120)
    return time.monotonic() - began


def run(server: Server, policy: Gr00tPolicy, args: argparse.Namespace) -> dict[str, Any]:
    """The whole soak: its report."""
    tally, stop = Tally(), threading.Event()
    good, small = templates(policy), random_observation(policy, "libero_sim", (64, 64), "pick up the bowl", 7)
    robots = [
        threading.Thread(target=robot, args=(server, good, small, args, seed, tally, stop))
        for seed in range(args.clients)
    ]
    began = time.monotonic()
    end, next_kill = began + args.minutes * 60, began + args.kill_every
    memory: list[tuple[float, float, float]] = []  # s, MB of Java, MB of the worker, the latter before each kill
    recoveries: list[float] = []
    for thread in robots:
        thread.start()
    try:
        while (now := time.monotonic()) < end:
            if args.kill_every and now > next_kill and end - now > AFTERMATH:
                held = resident(server)
                memory.append((now - began, held["java"], held["workers"]))
                recoveries.append(replace_worker(server, tally))
                next_kill = time.monotonic() + args.kill_every
            progress(now - began, args.minutes * 60, tally, len(recoveries))
            time.sleep(1)
        held = resident(server)
        memory.append((time.monotonic() - began, held["java"], held["workers"]))
    finally:
        stop.set()
        for thread in robots:
            thread.join()
    print(file=sys.stderr)
    half = len(memory) // 2
    slowest = sorted(tally.hostile.items(), key=lambda item: -statistics.median(item[1]))[:5]
    return {
        "command": command("soak"),
        "machine": machine(),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "clients": args.clients,
        "right": dict(tally.right),
        "wrong": len(tally.wrong),
        "lost": len(tally.lost),
        "late": tally.late,
        "late_means_s": args.late,
        "answered_that_the_worker_died": dict(tally.died),
        "good_ms": percentiles(tally.latencies),
        "hostile_ms": percentiles([seconds for kind in tally.hostile.values() for seconds in kind]),
        "slowest_hostile_kinds_ms": {name: percentiles(seconds) for name, seconds in slowest},
        "worker_kills": len(recoveries),
        "ready_again_after_s": {
            "median": round(statistics.median(recoveries), 1) if recoveries else None,
            "worst": round(max(recoveries), 1) if recoveries else None,
        },
        "memory_mb": [{"s": round(s), "java": round(java), "worker": round(worker)} for s, java, worker in memory],
        "java_mb_median_of_halves": [
            round(statistics.median(java for _, java, _ in part)) for part in (memory[:half], memory[half:]) if part
        ],
        "examples": {"wrong": tally.wrong[:EXAMPLES], "lost": tally.lost[:EXAMPLES]},
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    """In milliseconds."""
    if not seconds:
        return {}
    return {name: round(float(np.percentile(seconds, q)) * 1e3, 1) for name, q in (("p50", 50), ("p99", 99),
                                                                                    ("worst", 100))}  # fmt: skip


def progress(elapsed: float, total: float, tally: Tally, kills: int) -> None:
    share = min(1.0, elapsed / total)
    with tally.lock:
        text = (f"{tally.right['good']} good, {tally.right['hostile']} hostile right; {len(tally.wrong)} wrong, "
                f"{len(tally.lost)} lost, {tally.late} late, {kills} kills")  # fmt: skip
    end = "\r" if sys.stderr.isatty() else "\n"
    if end == "\r" or elapsed % 60 < 1:  # a line a minute in a log
        print(f"[{'#' * int(30 * share):30}] {100 * share:3.0f} %  {text}", end=end, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--poison", type=float, default=0.2, help="share of hostile requests")
    parser.add_argument("--kill-every", type=float, default=60, metavar="S", help="kill the worker so often; 0: never")
    parser.add_argument("--late", type=float, default=2, metavar="S", help="a reply that takes longer is late")
    parser.add_argument("--json", type=Path, help="file for the report")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gr00t-soak-") as temp:
        own = Path(temp) / "soak.yaml"
        own.write_text("handler:\n  reproducible: true\n", encoding="utf-8")
        archive = build(None, [ROOT / "config" / "batched.yaml", own], Path(temp) / "store" / f"{MODEL_NAME}.mar")
        policy = Gr00tPolicy(write_checkpoint(Path(temp) / "tiny"), reproducible=True)
        try:
            with Server(archive, run_dir=Path(temp) / "run") as server:
                report = run(server, policy, args)
        except StartError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    if args.json:
        write_report(report, args.json)
    print(json.dumps({key: value for key, value in report.items() if key != "memory_mb"}, indent=2))
    return 1 if report["wrong"] or report["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
