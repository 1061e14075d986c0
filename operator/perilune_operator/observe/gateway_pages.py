"""What a pool's gateways report on their metrics pages: sessions and hit ratio, for the pool's status, and
the draining engines that they no longer use.

They are read outside the rounds, so that no round waits for a gateway. A page that does not come in time, or
that is not one of a gateway, is missing as a whole, and GatewayStats says why.
"""

import asyncio
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from typing import TypeVar

import aiohttp
import msgspec

from perilune_api import names, pages
from perilune_api.foreign_bytes import UNREADABLE
from perilune_api.trial import Sums
from perilune_operator.observe import readers
from perilune_operator.observe.facts import Behind, Drained, FirstTokens, GatewayStats, Missing, Object

log = logging.getLogger(__name__)

Count = TypeVar("Count")

READ_S, FIRST_READ_S, DRAIN_READ_S = 30.0, 5.0, 1.0
"""Time between two readings: usually, until a gateway has answered or where the load sets the number of
endpoints, and while an engine drains."""
TIMEOUT_S = 1.0
MOST_BYTES = 32 * pages.MIB
"""A page of 1,000 endpoints has 6 MB."""

_SESSIONS = re.compile(r"^perilune_sessions_bound (\S+)", re.MULTILINE)
_OTHERS_SESSIONS = re.compile(r"^perilune_shared_state_sessions (\S+)", re.MULTILINE)
_HIT_RATIO = re.compile(r"^perilune_cache_hit_ratio (\S+)", re.MULTILINE)
_PEERS = re.compile(r"^perilune_shared_state_peers (\S+)", re.MULTILINE)
_INGEST = [
    re.compile(rf"^perilune_ingest_{name} (\S+)", re.MULTILINE)
    for name in ("busy_ratio", "behind_seconds", "catching_up")
]
_FIRST_TOKENS = re.compile(rf'^{names.FIRST_TOKENS}_bucket{{le="([^"]+)"}} (\S+)', re.MULTILINE)
_ROUTED = re.compile(r'^perilune_decisions_total{(?![^}]*reason="pass_through")[^}]*} (\S+)', re.MULTILINE)
_UNSERVED = re.compile(r'^perilune_refusals_total{reason="starting"} (\S+)', re.MULTILINE)
_WAITING = re.compile(r"^perilune_new_sessions_waiting (\S+)", re.MULTILINE)
_FINDINGS = re.compile(rf'^{names.FINDINGS}{{finding="([a-z_]+)"}} (\S+)', re.MULTILINE)
_DRAINED = re.compile(rf'^{names.DRAINED}{{mark="([^"]*)",pod="([^"]*)"}} 1', re.MULTILINE)


_POOL = re.compile(r',?perilune_dev_pool="([^"]*)"')


def of_pool(page: str, pool: str) -> str:
    """Return the page of a gateway with several pools as that of one of them: its series without the label of
    the pool. Other pages stay as they are."""
    if "perilune_dev_pool=" not in page:
        return page
    return "\n".join(
        _POOL.sub("", line).replace("{,", "{").replace("{}", "")
        for line in page.splitlines()
        if (named := _POOL.search(line)) is None or named[1] == pool
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    """What one gateway reports."""

    sessions: int
    hit_ratio: float | None
    peers: int
    """How many other gateways it shares its state with."""
    drained: Collection[tuple[str, str]]
    """Draining marks and the pods that carry them."""
    behind: Behind | None
    sessions_at: Mapping[str, float]
    queue_s_at: Mapping[str, float]
    kv_in_use_at: Mapping[str, float]
    recent_hits_tokens_at: Mapping[str, float]
    ready_at: Mapping[str, float]
    findings: Mapping[str, int]
    first_tokens: FirstTokens
    routed: int
    unserved: int
    waiting: int
    under_way: int


def _page(text: str | Missing) -> _Page | Missing:
    """Read a page. An empty one is one that did not come."""
    if isinstance(text, Missing) or not text:
        return text or Missing.NO_ANSWER
    try:
        return _parsed(text)
    except ValueError:
        return Missing.UNREADABLE


def _parsed(text: str) -> _Page:
    """Parse a page. Raises ValueError if a sample is not a number."""
    return _Page(
        sessions=int((_number(_SESSIONS, text) or 0.0) + (_number(_OTHERS_SESSIONS, text) or 0.0)),
        hit_ratio=_number(_HIT_RATIO, text),
        peers=int(_number(_PEERS, text) or 0.0),
        drained=_DRAINED.findall(text),
        behind=_behind(text),
        sessions_at=_summed(text, "sessions"),  # an engine with ranks has several samples
        queue_s_at=_summed(text, "pending_prefill_seconds"),
        kv_in_use_at=_largest([dict([sample]) for sample in _each(text, "kv_usage_ratio")]),
        recent_hits_tokens_at=_summed(text, "recent_hits_tokens"),
        ready_at=_largest([dict([sample]) for sample in _each(text, "ready")]),
        findings={finding: int(_finite(count)) for finding, count in _FINDINGS.findall(text)},
        first_tokens={float(bound): int(_finite(count)) for bound, count in _FIRST_TOKENS.findall(text)},
        routed=int(sum(map(_finite, _ROUTED.findall(text)))),
        # The gateway counts for itself, too, what it refuses before it knows the pool.
        unserved=int(sum(map(_finite, _UNSERVED.findall(text)))),
        waiting=int(_number(_WAITING, text) or 0.0),
        under_way=int(sum(_summed(text, "in_flight_requests").values())),
    )


def canary_sums(text: str | Missing, pool: str) -> Sums | None:
    """Return what a gateway's page says of one pool's canary; None if it says nothing, or nothing sound."""
    if isinstance(text, Missing):
        return None
    try:
        sums = msgspec.json.decode(text, type=dict[str, Sums]).get(pool)
    except UNREADABLE:
        return None
    return sums if sums is not None and sums.is_sound else None


def gateway_stats(texts: Mapping[str, str | Missing]) -> GatewayStats | None:
    """Sum up metrics pages, by the gateway's pod. None when all are missing."""
    return _together({gateway: _page(text) for gateway, text in texts.items()})


def _together(read: Mapping[str, _Page | Missing]) -> GatewayStats | None:
    pages = {gateway: page for gateway, page in read.items() if not isinstance(page, Missing)}
    missing = _missing(read)
    if not pages:
        return None
    ratios = [page.hit_ratio for page in pages.values() if page.hit_ratio is not None]
    every = pages.values()
    sharing = any(page.peers for page in every)
    sessions_at = Counter[str]()
    for page in every:
        sessions_at.update({host: int(number) for host, number in page.sessions_at.items()})
    knowing = [page for page in every if page.peers + 1 >= len(read)]
    return GatewayStats(
        # Gateways that share their state each know all of the sessions; others know only their own.
        sessions=max(page.sessions for page in every) if sharing else sum(page.sessions for page in every),
        hit_ratio=sum(ratios) / len(ratios) if ratios else None,
        drained=frozenset(
            Drained(gateway, pod, mark) for gateway, page in pages.items() for mark, pod in page.drained
        ),
        behind={gateway: page.behind for gateway, page in pages.items() if page.behind},
        missing=missing,
        whole=bool(knowing) or not missing,
        sessions_at=sessions_at,
        queue_s_at=_largest([page.queue_s_at for page in knowing]) if knowing else _queue_s(every),
        kv_in_use_at=_largest([page.kv_in_use_at for page in every]),
        recent_hits_tokens_at=_largest([page.recent_hits_tokens_at for page in every]),
        ready_at=_largest([page.ready_at for page in every]),
        findings={name: int(n) for name, n in _largest([page.findings for page in every]).items() if n},
        first_tokens={gateway: page.first_tokens for gateway, page in pages.items() if page.first_tokens},
        routed={gateway: page.routed for gateway, page in pages.items()},
        unserved={gateway: page.unserved for gateway, page in pages.items()},
        waiting=sum(page.waiting for page in every),
        under_way=sum(page.under_way for page in every),
    )


def _missing(read: Mapping[str, _Page | Missing]) -> Mapping[str, Missing]:
    return {gateway: page for gateway, page in read.items() if isinstance(page, Missing)}


def tells_load(stats: GatewayStats, duty: names.Duty, wanted: int | None) -> bool:
    """Return whether a reading says enough of the endpoints of a duty. Where the pool should have none to
    serve, a single page can say that a prompt finds none. `wanted`: the number that the pool should have."""
    return stats.whole or (duty == "serve" and wanted == 0)


@dataclass(frozen=True, slots=True)
class Counts:
    """What each gateway, by pod, had counted when its page last came."""

    first_tokens: Mapping[str, FirstTokens] = field(default_factory=dict)
    routed: Mapping[str, int] = field(default_factory=dict)
    unserved: Mapping[str, int] = field(default_factory=dict)

    def after(self, stats: GatewayStats, pods: Collection[str]) -> "Counts":
        """Return the counts after a further reading. Those of a gateway whose page is missing stay until its
        pod is gone."""
        return Counts(
            _of(pods, {**self.first_tokens, **stats.first_tokens}),
            _of(pods, {**self.routed, **stats.routed}),
            _of(pods, {**self.unserved, **stats.unserved}),
        )


def _of(pods: Collection[str], counts: Mapping[str, Count]) -> Mapping[str, Count]:
    return {pod: count for pod, count in counts.items() if pod in pods}


def first_tokens_between(
    before: Mapping[str, FirstTokens], after: Mapping[str, FirstTokens], within_s: float
) -> tuple[int, int]:
    """Return (the requests whose first token came between two readings, those of them within so many
    seconds). A gateway without an earlier reading does not count yet; one that has restarted began at 0."""
    counts, in_time = 0, 0
    for gateway, now in after.items():
        if (then := before.get(gateway)) is None:
            continue
        if any(now.get(bound, 0) < count for bound, count in then.items()):
            then = {}
        counts += now.get(inf, 0) - then.get(inf, 0)
        in_time += now.get(within_s, 0) - then.get(within_s, 0)
    return counts, in_time


def counted_between(before: Mapping[str, int], after: Mapping[str, int]) -> int:
    """Return by how much the gateways' counts have grown between two readings. A gateway without an earlier
    reading does not count yet; one that has restarted began at 0."""
    grown = ((now, before[gateway]) for gateway, now in after.items() if gateway in before)
    return sum(now - then if now >= then else now for now, then in grown)


def _behind(page: str) -> Behind | None:
    """Return what the gateway's health says as `ingest_behind`; None if it does not, or if it still catches
    up after its start. Then most feeds do; a pool that is too large loses events, and always has some feeds
    that catch up. Each rank of an endpoint has a feed and a row; the pool's endpoints are servers."""
    busy, behind_s, catching_up = (_number(sample, page) or 0.0 for sample in _INGEST)
    rows = [address for address, _ in _samples(page, "ready")]
    endpoints = len({address.partition("#")[0] for address in rows})
    starts = catching_up and 2 * catching_up >= len(rows)
    if starts or not (busy > names.BUSY_INGEST or behind_s > names.BEHIND_S):
        return None
    return Behind(int(endpoints * min(1.0, names.BUSY_INGEST / max(busy, 1e-9))), endpoints)


def _queue_s(pages: Iterable[_Page]) -> Mapping[str, float]:
    """Return host → the queued prefill of all gateways. Each gateway of those that share state reports that
    of all of them."""
    queued = defaultdict[str, float](float)
    for page in pages:
        for host, seconds in page.queue_s_at.items():
            queued[host] += seconds / (1 + page.peers)
    return queued


def _largest(each: Iterable[Mapping[str, float]]) -> Mapping[str, float]:
    """Return host → the largest of the numbers, where each gateway reports the same and not at the same
    time."""
    made = dict[str, float]()
    for numbers in each:
        for host, number in numbers.items():
            made[host] = max(number, made.get(host, 0.0))
    return made


def _summed(page: str, name: str) -> Mapping[str, float]:
    """Return host → the sum of all of its ranks."""
    made = defaultdict[str, float](float)
    for host, number in _each(page, name):
        made[host] += number
    return made


def _each(page: str, name: str) -> Iterator[tuple[str, float]]:
    """Yield the host and the value of each finite sample of one of the endpoints' metrics. Raises
    ValueError."""
    for address, number in _samples(page, name):
        yield address.rpartition(":")[0].strip("[]"), number


def _samples(page: str, name: str) -> Iterator[tuple[str, float]]:
    """Yield the address and the value of each finite sample: of a server, or of one of its ranks
    (`ADDRESS#RANK`). Raises ValueError."""
    for address, text in re.findall(rf'^perilune_endpoint_{name}{{endpoint="([^"]*)"}} (\S+)', page, re.M):
        number = float(text)
        if isfinite(number):
            yield address, number


def _finite(text: str) -> float:
    """Return a finite number. Raises ValueError."""
    number = float(text)
    if not isfinite(number):
        raise ValueError(text)
    return number


def _number(sample: re.Pattern[str], page: str) -> float | None:
    """Return the number; None if the sample is missing or not a finite number."""
    found = sample.search(page)
    try:
        number = float(found[1]) if found else inf
    except ValueError:
        return None
    return number if isfinite(number) else None


class GatewayPages:
    """Reads the pages. Close it after use."""

    def __init__(self) -> None:
        self._http: aiohttp.ClientSession | None = None
        self._missing: dict[tuple[str, str], Mapping[str, Missing]] = {}
        """The gateways of each pool whose page was missing the last time, by pod."""

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def read(self, pods: Iterable[Object], *, canary: bool = False) -> GatewayStats | None:
        """Ask the gateways among a pool's pods that serve. None when none answered. `canary`: ask for the
        sums of the pool's canary, too."""
        asked = [pod for pod in pods if _is_gateway(pod) and pod["status"].get("podIP")]
        texts = await asyncio.gather(*(self._text(pod["status"]["podIP"]) for pod in asked))
        if not asked:
            return None
        meta = asked[0]["metadata"]
        pool = meta["labels"][names.POOL_LABEL]
        read = {
            pod["metadata"]["name"]: _page(text if isinstance(text, Missing) else of_pool(text, pool))
            for pod, text in zip(asked, texts, strict=True)
        }
        self._tell((meta["namespace"], pool), _missing(read))
        stats = _together(read)
        if stats is None or not canary:
            return stats
        told = await asyncio.gather(*(self._text(pod["status"]["podIP"], names.CANARY_PAGE) for pod in asked))
        return replace(stats, canaries=tuple(sums for text in told if (sums := canary_sums(text, pool))))

    def _tell(self, pool: tuple[str, str], missing: Mapping[str, Missing]) -> None:
        """Log each page that has gone missing, or that is missing for another reason than before."""
        before = self._missing.pop(pool, {})
        for gateway, reason in missing.items():
            if before.get(gateway) is not reason:
                log.warning("page of a gateway missing pod=%s/%s reason=%s", pool[0], gateway, reason)
        if missing:
            self._missing[pool] = missing

    async def _text(self, ip: str, path: str = "/metrics") -> str | Missing:
        """Return a page of one gateway."""
        if self._http is None:  # it needs a running loop
            timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
            self._http = aiohttp.ClientSession(timeout=timeout, headers=pages.PLAIN)
        url = f"http://{f'[{ip}]' if ':' in ip else ip}:{names.ADMIN_PORT}{path}"
        try:
            async with self._http.get(url, **pages.NO_REDIRECTS) as answer:
                if answer.status != 200:
                    return Missing.REFUSED
                return (await pages.read(answer, MOST_BYTES)).decode(errors="replace")
        except pages.TooLongError:
            return Missing.TOO_LONG
        except (OSError, aiohttp.ClientError):  # a timeout is an OSError
            return Missing.NO_ANSWER


def _is_gateway(pod: Object) -> bool:
    facts = readers.pod(pod)
    return facts.component == "gateway" and facts.serves
