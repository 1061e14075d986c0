"""An engine's preStop hook: it waits until the engine's requests have ended, so that a rollout or a
scale-down fails no request.
"""

from perilune_api import names

NOTICE_SECONDS = 5
"""Time after which every Envoy and gateway knows that an endpoint is leaving."""
SPARE_SECONDS = 30
"""Time between the end of draining and the kill."""

DRAIN = """\
import re, socket, sys, time, urllib.request
from http.client import HTTPException
until = time.monotonic() + float(sys.argv[1])
direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
time.sleep(min(float(sys.argv[2]), float(sys.argv[1])))
idle = 0
while time.monotonic() < until and idle < 2:
    try:
        text = direct.open(sys.argv[3], timeout=2).read().decode()
        found = re.findall(r"^vllm:num_requests_(?:running|waiting)(?:{.*})? (\\S+)", text, re.M)
        busy = sum(map(float, found)) if found else 1
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ConnectionRefusedError):
            break
        busy = not isinstance(reason, socket.gaierror)
    idle = 0 if busy else idle + 1
    time.sleep(0.5)
"""
"""The hook: it waits for NOTICE_SECONDS, then until no request runs, for at most drainSeconds. It connects to
the engine directly, ignoring proxies that the environment names. An engine that reports no number counts as
busy. An engine that refuses the connection, or whose name no longer resolves (a leader), counts as gone."""
WORKER_DRAIN = f'exec python3 -c "$0" "$@" "http://$LWS_LEADER_ADDRESS:{names.ENGINE_PORT}/metrics"'
"""The hook of a worker, which is a further pod of an endpoint that spans nodes: it waits while its leader has
requests."""


def command(drain_seconds: int, *, serve: bool) -> list[str]:
    """`drain_seconds`: the longest wait. `serve`: whether the pod serves, or is a worker."""
    times = [str(drain_seconds), str(NOTICE_SECONDS)]
    if serve:
        return ["python3", "-c", DRAIN, *times, f"http://127.0.0.1:{names.ENGINE_PORT}/metrics"]
    return ["/bin/sh", "-c", WORKER_DRAIN, DRAIN, *times]


def grace_seconds(drain_seconds: int) -> int:
    """Time after which a pod that is being stopped is killed."""
    return drain_seconds + SPARE_SECONDS
