"""Empties a server before it is stopped: what it has taken in is answered. TorchServe alone resets it all.

TorchServe has no switch that keeps new work out, and shows what waits but not what its workers have in hand. So:

1. `/ready` is 503, and a file tells the gateway, which then keeps its robots' requests to itself. A pause lets
   balancers see it.
2. The inference key is renewed, and nobody gets the new one. From then on TorchServe refuses what arrives
   (400 InvalidKeyException), and what is in its queue stays there. Not without authorization, and not where others
   reach the server: a balancer sends elsewhere what is reset in the last moment, but not a 400.
3. Each worker is given a job that it keeps (`scripts.scale.retire`). The queue is first come, first served, so a worker
   that holds it has answered all that came before.
"""

from __future__ import annotations

import contextlib
import json
import time

import requests

from scripts.ready import ReadyServer
from scripts.scale import ManageError, Management, Progress, retire
from scripts.serve import DRAINING, LOOPBACK, Server, local_session

TOLD_SECONDS = 1.0  # for the gateway, which looks every 0.2 s (gateway_upstream.TOLD)
BALANCER_SECONDS = 5.0  # for whoever asks /ready: twice in a row at 2 s, as config/kubernetes does
LEAVE_SECONDS = 0.5  # for the last answers to leave Java


def drain(server: Server, ready: ReadyServer | None, seconds: float) -> str:
    """Returns when all that the server had taken in is answered, or when the time is over; says which.

    ready: the server's /ready, if it has one. The server can only be stopped afterwards.
    """
    deadline = time.monotonic() + seconds
    if ready is not None:
        ready.stopping = True
    with contextlib.suppress(OSError):  # a full disk: the gateway then learns by a refusal, and robots by a reset
        (server.run_dir / DRAINING).touch()
    time.sleep(min(TOLD_SECONDS if ready is None else BALANCER_SECONDS, seconds / 4))
    why, show = "TorchServe has ended", Progress("serve")
    while server.running():
        try:
            if server.auth and server.host == LOOPBACK and server.key_file.exists():
                keep_out(server)
            retire_all(server, deadline, show)
            show.end()
            time.sleep(LEAVE_SECONDS)
            return "all is answered"
        except ManageError as error:  # also where a worker died meanwhile: another comes
            why = str(error)
        if time.monotonic() > deadline:
            why = f"not all was answered within {seconds:g} s (--drain-seconds); what is left is cut off"
            break
        time.sleep(0.2)
    show.end()
    return why


def keep_out(server: Server) -> None:
    """Ends the inference key, and removes the file from which its successor could be read. Raises ManageError."""
    try:
        api_key = json.loads(server.key_file.read_text(encoding="utf-8"))["API"]["key"]
        with local_session() as session:
            reply = session.get(f"{server.management_url}/token", params={"type": "inference"}, timeout=10,
                                headers={"Authorization": f"Bearer {api_key}"})  # fmt: skip
            reply.raise_for_status()
    except (requests.RequestException, OSError, ValueError, KeyError) as error:
        raise ManageError(f"the inference key could not be ended: {type(error).__name__}") from None
    server.key_file.unlink(missing_ok=True)


def retire_all(server: Server, deadline: float, show: Progress) -> None:
    """Returns when every worker of every model holds a job of ours. Raises ManageError; at `deadline`, too."""
    api = Management(server.management_url, server.management_key)
    for name in {model["modelName"] for model in api.call("GET", "/models", limit=1000)["models"]}:
        for version in api.call("GET", f"/models/{name}/all"):
            pids = [worker["pid"] for worker in version["workers"] if worker["status"] == "READY"]
            waiting = version["jobQueueStatus"]["pendingRequests"]
            if waiting and not pids:
                raise ManageError(f"no worker is READY, and {waiting} wait")
            retire(api, name, version["modelVersion"], pids, deadline, show)
