"""What is wrong, why, and the cure."""

import dataclasses

import pytest
from msgspec.structs import replace

from perilune_gateway.model import Endpoint, Load
from perilune_gateway.model.kv_events import EventStats, IngestStats, Lost
from perilune_gateway.model.shared import SharedStats
from perilune_gateway.observe.health import ProblemKind, Status, diagnose, report
from perilune_gateway.observe.stats import EndpointStats, LogStats
from perilune_gateway.request.paths import Api
from perilune_gateway.request.tokens.media_names import WORDS, Named
from perilune_gateway.request.tokens.media_spans import MediaRow
from perilune_gateway.request.tokens.proof import KindParity, Part, Proof, Thinking
from perilune_gateway.routing.new_sessions import SessionAdmissionStats
from perilune_gateway.state.calibration import EndpointCalibration, RatioStats
from perilune_gateway.state.ejection import EjectionStats
from perilune_gateway.state.in_flight import Cause
from perilune_gateway.state.parity import Parity


def stats(address: str = "a", *, ready: bool = True, age_s: float = 1.0, **changes: object) -> EndpointStats:
    return EndpointStats(
        endpoint=Endpoint(address=address, ready=ready), load=Load(metrics_age_s=age_s), **changes
    )


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        pytest.param(stats(), [], id="all well"),
        pytest.param(stats(ready=False), [ProblemKind.NOT_READY], id="not ready"),
        pytest.param(
            stats(ready=False, ejection=EjectionStats(Cause.LATE, 3.0, 4, 4)),
            [ProblemKind.EJECTED],
            id="ejected",
        ),
        pytest.param(stats(age_s=15.1), [ProblemKind.STALE_METRICS], id="metrics old"),
        pytest.param(stats(age_s=15.0), [], id="metrics just fresh"),
        pytest.param(stats(age_s=float("inf")), [ProblemKind.STALE_METRICS], id="metrics never read"),
        pytest.param(stats(events=EventStats()), [], id="no events, nothing served yet"),
        pytest.param(
            stats(events=EventStats(), prefix_queries_tokens=9.0), [ProblemKind.NO_EVENTS], id="no events"
        ),
        pytest.param(
            stats(ready=False, age_s=99.0, block_size=32),
            [ProblemKind.NOT_READY],
            id="down explains the rest",
        ),
        pytest.param(stats(events=EventStats(connected=True, lag_s=0.1)), [], id="events flow"),
        pytest.param(
            stats(events=EventStats(failure="too many files"), prefix_queries_tokens=9.0),
            [ProblemKind.FEED_FAILED],
            id="the feed has failed",
        ),
        pytest.param(stats(events=EventStats(connected=True)), [], id="connected, no batch yet"),
        pytest.param(
            stats(events=EventStats(connected=True, lag_s=2.5)), [ProblemKind.LATE_EVENTS], id="events late"
        ),
        pytest.param(stats(events=EventStats(connected=True, lag_s=0.1, gaps=2)), [], id="gaps replayed"),
        pytest.param(
            stats(
                events=EventStats(
                    connected=True, lag_s=0.1, lost_s=9.0, lost=Lost.NO_REPLAY, gaps=2, rebuilds=1
                )
            ),
            [ProblemKind.LOST_EVENTS],
            id="lost just now",
        ),
        pytest.param(
            stats(
                events=EventStats(
                    connected=True, lag_s=0.1, lost_s=3600.0, lost=Lost.NO_REPLAY, gaps=2, rebuilds=1
                )
            ),
            [],
            id="learned again since",
        ),
        pytest.param(
            stats(
                events=EventStats(connected=True, lag_s=0.1, lost_s=99.0, lost=Lost.TOO_OLD, rebuilds=1),
                waiting_blocks=7,
            ),
            [ProblemKind.LOST_EVENTS, ProblemKind.LEARNING],
            id="still learning",
        ),
        pytest.param(
            stats(events=EventStats(connected=True, lag_s=9.0, heard_s=3600.0)), [], id="late, long ago"
        ),
        pytest.param(stats(parity="ok"), [], id="hashes equal"),
        pytest.param(
            stats(parity="seed", parity_cause="seed", parity_cure="set it"),
            [ProblemKind.PARITY],
            id="hashes differ",
        ),
        pytest.param(stats(block_size=16), [], id="block size equal"),
        pytest.param(stats(block_size=32), [], id="a multiple of the block size"),
        pytest.param(stats(block_size=24), [ProblemKind.BLOCK_SIZE], id="block size differs"),
        pytest.param(stats(waiting_blocks=7), [ProblemKind.LEARNING], id="blocks of unknown parents"),
        pytest.param(stats(strange_group="cross_attention"), [ProblemKind.KV_GROUP], id="strange layers"),
    ],
)
def test_a_problem_of_one_endpoint_is_named_with_cause_and_cure(row, expected):
    found = diagnose([row, stats("healthy")], 16)
    assert [p.kind for p in found] == expected
    assert all(p.endpoint == "a" and p.message and p.effect and p.cause and p.cure for p in found)


@pytest.mark.parametrize(("tls", "url"), [(False, "curl http://a/"), (True, "curl -k https://a/")])
@pytest.mark.parametrize(
    "row",
    [
        stats(ready=False),
        stats(ready=False, asleep=True),
        stats(ready=False, ejection=EjectionStats(Cause.LATE, 3.0, 4, 4)),
        stats(age_s=15.1),
    ],
    ids=["not ready", "asleep", "ejected", "metrics old"],
)
def test_a_cure_asks_the_engine_as_it_wants_to_be_asked(row, tls, url):
    rank = dataclasses.replace(row, tls=tls, endpoint=dataclasses.replace(row.endpoint, address="a#1"))
    for asked in (dataclasses.replace(row, tls=tls), rank):
        assert url in diagnose([asked, stats("healthy")], 16)[0].cure


def test_a_decision_log_that_cannot_be_written_is_a_problem_of_the_gateways_own():
    about = {"block_size": 16, "pool": "d/p", "policy": "ear", "version": "1", "uptime_s": 2.0}
    fine = report([stats()], **about, decision_log=LogStats("/var/log/d", written=9))
    assert fine.status is Status.OK
    ill = report([stats()], **about, decision_log=LogStats("/var/log/d", dropped=3, error="disk full"))
    (problem,) = ill.problems
    assert (ill.status, problem.kind, problem.endpoint) == (Status.DEGRADED, ProblemKind.DECISION_LOG, "")
    assert problem.message == "/var/log/d cannot be written (disk full); 3 entries are lost"


def test_an_endpoint_whose_port_for_peers_is_silent_is_named():
    about = {"block_size": 16, "pool": "ns/p", "policy": "ear", "version": "1", "uptime_s": 5.0}
    rows = [
        EndpointStats(endpoint=Endpoint(address=a, peer=f"{a}:5710"), load=Load(metrics_age_s=1.0))
        for a in ("a", "b")
    ]
    assert report(rows, **about, peers={"a", "b"}).status is Status.OK
    (problem,) = report(rows, **about, peers={"a"}).problems
    assert (problem.kind, problem.endpoint) == (ProblemKind.PEER, "b")
    assert "b:5710" in problem.message


def test_a_server_of_shared_state_that_is_away_is_a_problem_of_the_gateways_own():
    about = {"block_size": 16, "pool": "ns/p", "policy": "ear", "version": "1", "uptime_s": 5.0}
    fine = SharedStats(server="redis://state:6379", connected=True)
    assert report([stats()], **about, shared=fine).status is Status.OK
    away = SharedStats(server="redis://state:6379", error="Connection refused", alone_s=7.0)
    ill = report([stats()], **about, shared=away)
    assert (ill.status, [p.kind for p in ill.problems]) == (Status.DEGRADED, [ProblemKind.SHARED_STATE])
    for words in ("redis://state:6379", "7 s", "Connection refused"):
        assert words in ill.problems[0].message


def test_new_sessions_that_wait_are_a_problem_that_says_why():
    about = {"block_size": 16, "pool": "ns/p", "policy": "ear", "version": "1", "uptime_s": 5.0}
    fine = SessionAdmissionStats(enabled=True, begun=7, active_tokens=700.0, capacity_tokens=1_000)
    assert report([stats()], **about, new_sessions=fine).status is Status.OK
    full = report([stats()], **about, new_sessions=replace(fine, waiting=3, longest_s=8.4))
    (problem,) = full.problems
    assert (full.status, problem.kind) == (Status.DEGRADED, ProblemKind.SESSIONS_WAIT)
    for words in ("3 new sessions", "for 8 s", "700 tokens", "of 750"):
        assert words in problem.message


def test_health_says_where_the_cost_model_comes_from_and_how_wrong_it_is_now():
    about = {"block_size": 16, "pool": "d/p", "policy": "ear", "version": "1", "uptime_s": 2.0}
    new = report([stats(), stats("b")], **about, prefill_scale=0.4).cost_model
    assert "prefillScale" in new.source
    assert "0.4" in new.source
    assert (new.error, new.observations) == (None, 0)
    measured = [
        stats(address, calibration=EndpointCalibration(prefill=RatioStats(ratio, 5)))
        for address, ratio in (("a", 1.5), ("b", 1.3), ("c", 9.0))
    ]
    seen = report([*measured, stats("silent")], **about).cost_model
    assert (seen.error, seen.observations) == (0.5, 15)


@pytest.mark.parametrize(
    ("ingest", "said"),
    [
        pytest.param(IngestStats(0.5, 2.0), "", id="at the limit"),
        pytest.param(IngestStats(0.83, 0.5), "KV events take 83% of", id="too little is left for requests"),
        pytest.param(IngestStats(0.1, 2.5), "are 2.5 s behind", id="late"),
        pytest.param(IngestStats(0.9, 0.0, catching_up=3), "3 feeds are catching up", id="just started"),
    ],
)
def test_a_gateway_that_does_not_keep_up_with_events_says_so(ingest, said):
    about = {"block_size": 16, "pool": "d/p", "policy": "ear", "version": "1", "uptime_s": 2.0}
    problems = report([stats()], **about, ingest=ingest).problems
    assert [p.kind for p in problems] == ([ProblemKind.INGEST_BEHIND] if said else [])
    assert all(said in p.message for p in problems)


def test_a_gateway_says_how_many_endpoints_it_can_follow():
    """Ranks of one endpoint are not counted apart."""
    about = {"block_size": 16, "pool": "d/p", "policy": "ear", "version": "1", "uptime_s": 2.0}
    pool = [stats(f"10.0.0.{n}:8000#{rank}") for n in range(9) for rank in range(2)]
    (problem,) = report(pool, **about, ingest=IngestStats(0.75, 0.0)).problems
    assert problem.cure.endswith("(50% of its core follow about 6 of 9 endpoints)")
    (problem,) = report(pool, **about, ingest=IngestStats(0.25, 9.0)).problems
    assert problem.cure.endswith("or split the pool")


def test_parity_says_its_own_cause_and_cure():
    (problem,) = diagnose([stats(parity="seed", parity_cause="the seed", parity_cure="set it")], 16)
    assert (problem.cause, problem.cure) == ("the seed", "set it")


@pytest.mark.parametrize(
    ("parity", "said"),
    [
        pytest.param(Parity.SEED, "block hashes computed here differ", id="hashes differ"),
        pytest.param(Parity.TEMPLATE, "hardly any prompt tokenized here matches", id="hashes agree"),
    ],
)
def test_parity_does_not_say_that_hashes_differ_where_they_agree(parity, said):
    (problem,) = diagnose([stats(parity=parity.value, parity_cause="x", parity_cure="y")], 16)
    assert problem.message.startswith(said)


@pytest.mark.parametrize(
    ("endpoints", "pool_error", "status", "first"),
    [
        pytest.param([stats()], "", Status.OK, None, id="ok"),
        pytest.param([stats(age_s=99)], "", Status.DEGRADED, ProblemKind.STALE_METRICS, id="degraded"),
        pytest.param([stats()], "at `$.spec`", Status.DEGRADED, ProblemKind.POOL_FILE, id="bad edit"),
        pytest.param([stats(ready=False)], "", Status.UNREADY, ProblemKind.NO_ENDPOINT, id="all down"),
        pytest.param(
            [stats(ready=False), stats("b", ready=False, silent=True)],
            "",
            Status.DEGRADED,
            ProblemKind.NO_ENDPOINT,
            id="one is merely silent",
        ),
        pytest.param([], "", Status.UNREADY, ProblemKind.NO_ENDPOINT, id="empty pool"),
    ],
)
def test_the_report_says_how_the_pool_is_and_the_worst_problem_first(endpoints, pool_error, status, first):
    health = report(
        endpoints,
        block_size=16,
        pool="default/p",
        policy="ear",
        version="1",
        uptime_s=2.0,
        pool_error=pool_error,
    )
    assert health.status is status
    assert (health.problems[0].kind if health.problems else None) == first
    assert (health.endpoints, health.endpoints_ready) == (
        len(endpoints),
        sum(n.endpoint.ready for n in endpoints),
    )


def test_other_tokens_of_a_kind_of_request_are_a_problem_of_each_such_engine():
    about = {"block_size": 16, "pool": "d/p", "policy": "ear", "version": "1", "uptime_s": 2.0}
    row = KindParity(
        api=Api.CHAT,
        tools=True,
        thinking=Thinking.OFF,
        equal=1,
        different=("b", "c"),
        untold=0,
        proof=Proof.TOKENIZED,
        part=Part.TOOLS,
        at=23,
        ours=7,
        theirs=9,
        asks_engine=True,
    )
    told = report([stats(), stats("b"), stats("c")], **about, renderings=(row,))
    assert [(p.kind, p.endpoint) for p in told.problems] == [
        (ProblemKind.TOKENS, "b"),
        (ProblemKind.TOKENS, "c"),
    ]
    problem = told.problems[0]
    assert problem.message == (
        "its tokens of chat with tools, thinking off differ from token 23 on (7 here, 9 there)"
    )
    assert "tokenized by an engine" in problem.effect
    assert "tools" in problem.cause
    alike = dataclasses.replace(
        row, different=(), equal=3, part=None, at=0, ours=None, theirs=None, asks_engine=False
    )
    fine = report([stats()], **about, renderings=(alike,))
    assert (fine.status, fine.renderings) == (Status.OK, (alike,))


def test_media_without_a_name_are_told_and_no_problem():
    about = {"block_size": 16, "pool": "d/p", "policy": "ear", "version": "1", "uptime_s": 2.0}
    row = MediaRow(kind="audio", named=Named.RATE, parts=4, has_name=False, says=WORDS[Named.RATE])
    told = report([stats()], **about, media=(row,))
    assert (told.status, told.media) == (Status.OK, (row,))
    assert "resample" in row.says
