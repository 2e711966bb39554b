"""Breaks a served worker in known ways, and measures how long its clients do without.

For each fault: one wave of good requests and one whose forward fails, then good requests until they are answered again.
The faults are in `tests/faulty_handler.py`; those of a GPU need one. Prints a table; `--json FILE` keeps the figures.
Exit status 1 when an answer is not the same afterwards as before, or a request gets no answer at all.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import requests
import torch

from handler.policy import Actions
from scripts.bench import observation
from scripts.gateway_translate import pack
from scripts.package import ROOT
from scripts.report import command, machine, write_report
from scripts.serve import Server, StartError
from tests.client import Body, differences, patient_archive, post, read, wave

USUAL, NEW = (256, 256), (256, 352)
FAULTS = (  # what happens, the culprit's instruction and frame size
    ("the forward raises once", "fault once", USUAL),
    ("the worker is killed", "fault SIGKILL", USUAL),
)
GPU_FAULTS = (
    ("GPU memory is full, row of a usual shape", "fault full", USUAL),
    ("GPU memory is full, row of a new shape", "fault full", NEW),
    ("GPU memory is full, the new shape once more", "fault full", NEW),  # the engine wants to capture it now
    ("a device-side assert", "fault assert", USUAL),
)
GIVE_UP = 300.0  # s for good requests to be answered again


def body(contract: dict[str, Any], tag: str, size: tuple[int, int], seed: int, prompt: str) -> Body:
    fields = {**observation(contract, tag, size, seed), "prompt": prompt}
    return {"Content-Type": "application/msgpack"}, pack(fields)


def told(reply: requests.Response) -> str:
    """A reply as a client sees it, in a few words."""
    wait = reply.headers.get("Retry-After")
    return f"{reply.status_code}" + (f", Retry-After {wait}" if wait else "")


def suffer(server: Server, fault: str, good: Body, bad: Body, want: Actions, tolerance: float) -> dict[str, Any]:
    """One fault: what each of its wave was told, the seconds until then, and from then until a request is served.

    tolerance: how far an answer in the company of others, or of a forward run again, may be from the one before.
    """
    pids = server.worker_pids()
    began = time.monotonic()
    replies = wave(server, [good, bad, good], good)
    answered = time.monotonic()
    broken = [n for n in (0, 2) if replies[n].status_code == 200 and far(read(replies[n])[0], want, tolerance)]
    while True:
        reply = post(server, good)
        if reply.status_code == 200 or time.monotonic() - began > GIVE_UP:
            break
        time.sleep(0.05)
    served = time.monotonic()
    if reply.status_code != 200 or differences(read(reply)[0], want):  # alone, and so to the bit
        broken.append(-1)
    after = server.worker_pids()
    return {
        "fault": fault,
        "culprit_was_told": told(replies[1]),
        "neighbours_were_told": sorted(Counter(told(replies[n]) for n in (0, 2))),
        "wave_answered_after_s": round(answered - began, 2),
        "next_request_served_after_s": round(served - answered, 2),
        "another_worker": not set(pids) & set(after),
        "answers_as_before": not broken,
    }


def far(got: Actions, want: Actions, tolerance: float) -> bool:
    return any(float(abs(got[key] - want[key]).max()) > tolerance for key in want)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="folder; default: the embedded small checkpoint")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory(prefix="gr00t-faults-") as temp:
        faulty = ROOT / "tests" / "faulty_handler.py"
        archive = patient_archive(Path(temp), checkpoint=args.checkpoint, handler_file=faulty)
        began = time.perf_counter()
        try:
            with Server(archive, run_dir=Path(temp) / "run") as server:
                ready = time.perf_counter() - began
                found = run(server, cuda)
        except StartError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    report = {"command": command("bench_faults"), "machine": machine(), "ready_after_s": round(ready, 1),
              "faults": found}  # fmt: skip
    if args.json:
        write_report(report, args.json)
    return 0 if all(each["answers_as_before"] for each in found) else 1


def run(server: Server, cuda: bool) -> list[dict[str, Any]]:
    contract = server.describe(customized=True)["customizedMetadata"]
    tag = next(iter(contract["embodiments"]))
    good = body(contract, tag, (256, 256), 1, "pick up the bowl")
    want, _ = read(post(server, good))
    out = []
    for fault, prompt, size in FAULTS + (GPU_FAULTS if cuda else ()):
        found = suffer(server, fault, good, body(contract, tag, size, 2, prompt), want, 0.1 if cuda else 1e-5)
        print(f"{fault}: told {found['culprit_was_told']}; neighbours {found['neighbours_were_told']}; answered after "
              f"{found['wave_answered_after_s']} s, served again {found['next_request_served_after_s']} s later; "
              f"as before: {found['answers_as_before']}", flush=True)  # fmt: skip
        out.append(found)
    return out


if __name__ == "__main__":
    sys.exit(main())
