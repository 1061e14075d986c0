"""`perilune explain` against a real admin server."""

import asyncio
import json
import re
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from aiohttp import web
from msgspec import structs
from prometheus_client import CollectorRegistry
from routing_objects import fleet, request, session

from perilune_api.policies import PolicyParams
from perilune_api.topology import Place
from perilune_gateway.model import (
    Cost,
    Decision,
    DecisionRecord,
    Ending,
    Outcome,
    Reason,
    Refusal,
    RefuseReason,
)
from perilune_gateway.observe.admin import Admin, AdminData, PoolData
from perilune_gateway.observe.decisions import Decisions
from perilune_gateway.observe.health import report
from perilune_gateway.policy import POLICIES
from perilune_gateway.routing.new_sessions import SessionAdmissionStats
from perilune_lab.explain import main


def decided(ordinal: int, of: str = "s", tokens: int = 1_000) -> DecisionRecord:
    candidates = tuple(
        structs.replace(row, endpoint=replace(row.endpoint, place=Place("n1"))) for row in fleet(a=40, b=10)
    )
    view = request(ordinal=ordinal, tokens=tokens, of=session("a", id=of))
    verdict = POLICIES["ear"](view, candidates, PolicyParams(), None)  # the host: draws nothing
    return DecisionRecord(
        view=view,
        verdict=verdict,
        policy="ear",
        candidates=candidates,
        excluded={"[::1]:8000": "draining"},
        destinations=("a", "b"),
        cached_tokens=768,
        timings_us={"policy": 12.4, "total": 140.0},
        time=1_700_000_000.5,
    )


@asynccontextmanager
async def gateway(*records: DecisionRecord):
    """Its URL."""
    decisions = Decisions()
    for record in records:
        number = decisions.add(record)
        if record.request_id == "r1":
            decisions.finish(
                number,
                Ending(outcome=Outcome.COMPLETED, duration_s=1.5, served="a", status=200, cached_tokens=752),
            )
    data = PoolData(
        registry=CollectorRegistry(),
        decisions=decisions,
        policies=POLICIES,
        params=PolicyParams,
        endpoints=tuple,
        sessions=lambda id: (),
        index_stats=dict,
        moves=dict,
        health=lambda: report((), block_size=16, pool="p", policy="ear", version="1", uptime_s=0.0),
        ready=lambda: True,
        about=dict,
        new_sessions=SessionAdmissionStats,
        handoffs=list,
        wall=lambda: 0.0,
    )
    admin = Admin(AdminData(CollectorRegistry(), {"p": data}))
    port = await admin.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await admin.stop()


async def explain(*argv: str) -> int:
    """Run the command while the server runs."""
    return await asyncio.to_thread(main, argv)


async def test_a_decision_is_told_in_words_and_numbers(capsys):
    async with gateway(decided(1)) as url:
        assert await explain("r1", "--gateway", url) == 0
    out = capsys.readouterr().out
    lines = [" ".join(line.replace("│", " ").replace("┃", " ").split()) for line in out.splitlines()]
    assert lines[0].startswith("a because it is the session's host (hot: no): 768 of 1,000 prompt tokens")
    assert "request r1 at 2023-11-14T22:13:20.500+00:00" in lines
    assert "session s, host a, turn 1" in lines
    assert "policy ear, from the body" in lines
    assert "cached 768 predicted, 76.8% of the prompt" in lines
    assert "migration no" in lines
    assert "destinations a, b" in lines
    assert "scheduling policy 12 µs, total 140 µs" in lines
    assert "outcome completed, after 1.500 s, status 200, served by a, 752 tokens really cached" in lines
    assert any(line.startswith("▶ a 40 ") for line in lines)
    assert any(line.startswith("b 10 ") for line in lines)
    assert "left out [::1]:8000 (draining)" in lines
    assert any(line.startswith("least_loaded b least_loaded ") for line in lines)
    assert any(line.startswith("sticky a (same) host ") for line in lines)


async def test_where_a_prompt_can_be_prefilled_is_explained(capsys):
    costs = (
        Cost("a", 2.0, {"queue_s": 0.5, "prefill_s": 1.5}),
        Cost("p", 0.75, {"queue_s": 0.0, "transfer_s": 0.75}),
    )
    made = decided(3)
    split = structs.replace(made, verdict=structs.replace(made.verdict, prefill="p", prefill_costs=costs))
    async with gateway(split, decided(5)) as url:
        assert await explain("r3", "--gateway", url) == 0
        out = capsys.readouterr().out
        assert await explain("r5", "--gateway", url) == 0
    assert "prefill costs 2.00 s here, 0.75 s at p" in " ".join(out.split())
    table = out[out.index("Where the prompt can be prefilled (seconds)") :].splitlines()
    rows = [re.findall(r"[▶\w.]+", line) for line in table]
    assert ["▶", "p", "0.750", "0", "0.750"] in rows
    assert ["a", "2", "0.500", "1.500"] in rows
    assert "can be prefilled" not in capsys.readouterr().out


async def test_a_refusal_is_explained(capsys):
    refused = structs.replace(
        decided(2),
        verdict=Refusal(RefuseReason.OVERLOADED, "every endpoint has 9 s queued"),
        destinations=(),
        cached_tokens=0,
    )
    async with gateway(refused) as url:
        assert await explain("r2", "--gateway", url) == 0
    out = capsys.readouterr().out
    assert out.startswith("refused with 429 overloaded: every endpoint has 9 s queued")
    assert "▶" not in out
    assert "outcome        refused" in out


async def test_a_refusal_before_any_policy(capsys):
    refused = DecisionRecord(
        view=request(ordinal=4, tokens=0), verdict=Refusal(RefuseReason.BAD_JSON, "truncated"), policy=""
    )
    async with gateway(refused) as url:
        assert await explain("r4", "--gateway", url) == 0
        out = capsys.readouterr().out
        assert await explain("--last", "1", "--gateway", url) == 0
    assert "policy         none was asked" in out
    assert "Candidates" not in out
    assert "running" not in out + capsys.readouterr().out


async def test_a_pass_through_has_no_candidates(capsys):
    passed = DecisionRecord(
        view=request(ordinal=3, tokens=0), verdict=Decision("a", Reason.PASS_THROUGH), policy=""
    )
    async with gateway(passed) as url:
        assert await explain("r3", "--gateway", url) == 0
    assert "any ready endpoint may take it" in capsys.readouterr().out


async def test_json_is_what_the_gateway_says(capsys):
    async with gateway(decided(1)) as url:
        assert await explain("r1", "--gateway", url, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["request_id"], answer["target"]) == ("r1", "a")
    assert answer["counterfactual"]["least_loaded"]["target"] == "b"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param(["--last", "2"], ["r3", "r2"], id="newest"),
        pytest.param(["--session", "t"], ["r2"], id="of a session"),
        pytest.param(["--session", "s", "--last", "1"], ["r3"], id="newest of a session"),
    ],
)
async def test_decisions_are_listed_as_asked_for(capsys, options, expected):
    records = [decided(1), decided(2, of="t"), decided(3)]
    async with gateway(*records) as url:
        assert await explain(*options, "--gateway", url) == 0
        table = capsys.readouterr().out
        assert await explain(*options, "--gateway", url, "--json") == 0
    listed = json.loads(capsys.readouterr().out)["decisions"]
    assert [row["request_id"] for row in listed] == expected
    rows = [line for line in table.splitlines() if "host" in line]
    assert [expected[i] in row for i, row in enumerate(rows)] == [True] * len(expected)


async def test_an_empty_list_says_so(capsys):
    async with gateway(decided(1)) as url:
        assert await explain("--session", "nobody", "--gateway", url) == 0
    assert capsys.readouterr().out == "no such decision among the last 1 kept\n"


async def test_an_unknown_request_is_1_with_a_hint(capsys):
    async with gateway(decided(1)) as url:
        assert await explain("gone", "--gateway", url) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        "perilune explain: no decision 'gone' among the last 1 kept; older ones are gone,"
        " `perilune explain --last 20` lists the newest\n"
    )


async def test_a_proxy_is_not_asked(capsys, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with gateway(decided(1)) as url:
        assert await explain("r1", "--gateway", url) == 0


async def test_what_clients_send_is_printed_as_it_is(capsys):
    async with gateway(decided(1, of="[bold]s[/] :smile:")) as url:
        assert await explain("--last", "1", "--gateway", url) == 0
    assert "[bold]s[/] :smile:" in capsys.readouterr().out


async def test_what_clients_send_cannot_steer_the_terminal(capsys):
    async with gateway(decided(1, of="a\x1b[2Jb\nc")) as url:
        assert await explain("r1", "--gateway", url) == 0
        assert await explain("--last", "1", "--gateway", url) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.count(r"a\x1b[2Jb\nc") == 2


async def test_no_gateway_is_1_with_a_clear_line(capsys):
    async with gateway() as url:
        pass
    assert await explain("r1", "--gateway", url) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"perilune explain: no gateway answers at {url} (")
    assert err.count("\n") == 1


@pytest.mark.parametrize("url", ["127.0.0.1:nonsense", "http://[", "ftp://127.0.0.1:1", "http://"])
async def test_a_url_that_is_none(capsys, url):
    assert await explain("r1", "--gateway", url) == 1
    err = capsys.readouterr().err
    assert err.startswith("perilune explain: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("status", "body"),
    [(200, "<html>"), (404, "not here"), (500, '{"error": "text"}'), (200, "[]")],
    ids=["html", "plain 404", "other JSON", "a list"],
)
async def test_something_else_listens_there(capsys, status, body):
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=body, status=status)

    app = web.Application()
    app.add_routes([web.get("/{any:.*}", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"127.0.0.1:{runner.addresses[0][1]}"
        assert await explain("r1", "--gateway", url) == 1
    finally:
        await runner.cleanup()
    err = capsys.readouterr().err
    assert "gateway's admin address" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "argv",
    [[], ["r1", "--last", "3"], ["--last", "0"], ["--last", "1001"], ["--last", "-1"], ["--last", "x"]],
    ids=" ".join,
)
def test_wrong_arguments_are_2(capsys, argv):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: perilune explain" in capsys.readouterr().err
