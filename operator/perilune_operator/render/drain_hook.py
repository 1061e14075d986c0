"""An engine's preStop hook: it waits until the engine's requests have ended, so that a rollout or a
scale-down fails no request. An engine that hands KV over gives its sessions' KV away meanwhile, on request of
the gateways (feeds/leaving.py of the gateway).
"""

from perilune_api import names

NOTICE_SECONDS = 5
"""Time after which every Envoy and gateway knows that an endpoint is leaving."""
LOOKS_PER_SECOND = 2
"""At most; a look takes a moment too."""

DRAIN = """\
import re, socket, sys, time, urllib.request
from http.client import HTTPException
until = time.monotonic() + float(sys.argv[1])
direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
time.sleep(min(float(sys.argv[2]), float(sys.argv[1])))
idle, ended = 0, None
while time.monotonic() < until and idle < int(sys.argv[3]):
    try:
        text = direct.open(sys.argv[4], timeout=2).read().decode()
        found = re.findall(r"^vllm:num_requests_(?:running|waiting)(?:{.*})? (\\S+)", text, re.M)
        busy = sum(map(float, found)) if found else 1
        before, ended = ended, re.findall(r"^vllm:request_success_total(?:{.*})? (\\S+)", text, re.M)
        busy = busy or before not in (None, ended)
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ConnectionRefusedError):
            break
        busy = not isinstance(reason, socket.gaierror)
    idle = 0 if busy else idle + 1
    time.sleep(0.5)
"""
"""The hook: it waits for NOTICE_SECONDS, then until several looks in a row have found no request that runs or
has ended since the look before, for at most drainSeconds. It connects to the engine directly, ignoring
proxies that the environment names. An engine that reports no number counts as busy. An engine that refuses
the connection, or whose name no longer resolves (a leader), counts as gone."""
WORKER_DRAIN = 'exec python3 -c "$0" "$@" "http://$LWS_LEADER_ADDRESS:{port}/metrics"'
"""The hook of a worker, which is a further pod of an endpoint that spans nodes: it waits while its leader has
requests."""


def command(
    drain_seconds: int, *, serve: bool, gives: bool = False, port: int = names.ENGINE_PORT
) -> list[str]:
    """Return the preStop hook's command. `drain_seconds`: the longest wait. `serve`: whether the pod serves,
    or is a worker. `gives`: whether it hands KV over, so that its sessions may come until they have
    switched. `port`: where the engine serves metrics in plain text."""
    looks = names.QUIET_SECONDS * LOOKS_PER_SECOND if gives else 2
    times = [str(drain_seconds), str(NOTICE_SECONDS), str(looks)]
    if serve:
        return ["python3", "-c", DRAIN, *times, f"http://127.0.0.1:{port}/metrics"]
    return ["/bin/sh", "-c", WORKER_DRAIN.format(port=port), DRAIN, *times]


def grace_seconds(drain_seconds: int) -> int:
    """Time after which a pod that is being stopped is killed."""
    return drain_seconds + names.STOP_SECONDS
