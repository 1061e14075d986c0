"""The console in a real browser: content, errors, keyboard, colours, staleness, a thousand engines.

A real gateway, Envoy and simulated engines stand behind it, except for the thousand. Needs `make browser`.
`PICTURES=write` writes the pictures of docs/observability.md.
"""

import asyncio
import os
import shutil
import signal
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random

import aiohttp
import pytest
import pytest_asyncio
from msgspec import structs
from playwright.async_api import Browser, Page, async_playwright, expect
from prometheus_client import CollectorRegistry
from routing_objects import fleet, request, session
from waiting import until_true

from perilune_api import pool as spec
from perilune_api.findings import Finding
from perilune_api.policies import PolicyParams
from perilune_api.topology import Place
from perilune_gateway.model import (
    Decision,
    DecisionRecord,
    Endpoint,
    Load,
    Move,
    MoveReason,
    Reason,
    SessionKey,
)
from perilune_gateway.model.handoff import Content
from perilune_gateway.moves.handoff import Handoff, Stage
from perilune_gateway.observe import moves
from perilune_gateway.observe.admin import Admin, AdminData, PoolData
from perilune_gateway.observe.decisions import Decisions
from perilune_gateway.observe.findings import Lack
from perilune_gateway.observe.health import report
from perilune_gateway.observe.stats import EndpointStats, SessionStats
from perilune_gateway.policy import POLICIES
from perilune_gateway.request.paths import Api
from perilune_gateway.request.tokens.media_names import WORDS, Named
from perilune_gateway.request.tokens.media_spans import MediaRow
from perilune_gateway.request.tokens.proof import KindParity, Part, Proof, Thinking
from perilune_gateway.routing.new_sessions import SessionAdmissionStats
from perilune_lab.processes.stack import EngineOptions, Stack

PATIENCE_MS = 300_000
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(CHROMIUM is None, reason="a browser is missing: make browser"),
]
expect.set_options(timeout=PATIENCE_MS)
PICTURES = Path(__file__).parents[2] / "docs/pictures" if os.environ.get("PICTURES") == "write" else None
ENGINES = 4
OPTIONS = EngineOptions(time_scale=4.0, kv_tokens=60_000)
ROUTING = spec.Routing(limits=spec.Limits(decision_seconds=30.0))


@dataclass
class Console:
    """One page of the console, and what went wrong in it."""

    page: Page
    errors: list[str] = field(default_factory=list)

    async def picture(self, name: str) -> None:
        if PICTURES:
            await self.page.screenshot(path=PICTURES / f"console-{name}.png")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        started = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        await started.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with Stack(
        engines=ENGINES, options=OPTIONS, routing=ROUTING, vital=("gateway", "envoy")
    ) as running:
        yield running


@asynccontextmanager
async def opened(browser: Browser, url: str, colours: str = "light") -> AsyncIterator[Console]:
    """Yield an open page, and check in the end that it showed no errors."""
    page = await browser.new_page(
        viewport={"width": 1400, "height": 900},
        color_scheme=colours,  # type: ignore[arg-type]
        reduced_motion="reduce",  # without a graphics card each frame costs the machine's time
    )
    page.set_default_timeout(PATIENCE_MS)
    console = Console(page)
    page.on("pageerror", lambda error: console.errors.append(str(error)))
    page.on("console", lambda m: console.errors.append(m.text) if m.type in ("error", "warning") else None)
    await page.goto(url + "/console")
    await page.wait_for_selector(".engine")
    try:
        yield console
        assert console.errors == []
    finally:
        await page.close()


async def talk(stack: Stack, sessions: int, turns: int, name: str = "agent") -> None:
    """Play conversations through Envoy, all at once, each turn extending the one before."""

    async def converse(http: aiohttp.ClientSession, who: str) -> None:
        messages = [{"role": "user", "content": f"{who} asks. " * 120}]
        for _ in range(turns):
            body = {"model": OPTIONS.model, "messages": messages, "max_tokens": 40}
            url = stack.url + "/v1/chat/completions"
            async with http.post(url, json=body, headers={"x-session-id": who}) as answer:
                assert answer.status == 200, await answer.text()
                messages.append((await answer.json())["choices"][0]["message"])
            messages.append({"role": "user", "content": f"{who} goes on. " * 40})

    async with aiohttp.ClientSession() as http:
        await asyncio.gather(*(converse(http, f"{name}-{n}") for n in range(sessions)))


async def go_on_talking(stack: Stack) -> None:
    """Play one crowd of sessions after the other."""
    for crowd in count():
        await talk(stack, sessions=20, turns=3, name=f"agent-{crowd}")


def drain(stack: Stack, *addresses: str) -> None:
    pool = stack.pool
    endpoints = tuple(structs.replace(e, draining=e.address in addresses) for e in pool.spec.endpoints)
    changed = structs.replace(pool, spec=structs.replace(pool.spec, endpoints=endpoints))
    stack.pool_file.write_bytes(spec.dump(changed))


async def test_an_idle_pool_shows_its_engines_where_they_stand(browser: Browser, stack: Stack) -> None:
    async with opened(browser, stack.admin_url) as console:
        page = console.page
        await expect(page.locator(".engine[data-condition=ready]")).to_have_count(ENGINES)
        await expect(page.locator(".spine")).to_have_count(2)
        await expect(page.locator(".rack")).to_have_count(4)
        await expect(page.locator("#decisions")).to_contain_text("No decision yet.")
        await expect(page.locator("#health")).to_have_text("ok")
        await expect(page.locator("#about")).to_contain_text("policy perilune")
        await console.picture("idle")


async def test_decisions_come_as_they_are_taken_and_say_why(browser: Browser, stack: Stack) -> None:
    async with opened(browser, stack.admin_url) as console:
        page = console.page
        talking = asyncio.create_task(go_on_talking(stack))
        await expect(page.locator("#decisions button")).to_have_count(100)
        await console.picture("busy")
        talking.cancel()
        await asyncio.wait({talking})
        await expect(page.locator("#decisions .why").first).to_contain_text("because")
        await expect(page.locator("#charts figure").first).to_contain_text("requests/s")
        # A click by the mouse waits until the button stands still, and on a busy machine new ones push it on.
        await page.locator("#decisions button").first.dispatch_event("click")
        await expect(page.locator("#details h3")).to_have_text(
            ["Candidates", "What other policies would have done"]
        )
        await expect(page.locator("#details table").nth(1).locator("tbody tr")).to_have_count(ENGINES)
        await expect(page.locator("#details")).to_contain_text("lmetric_plus_one")
        await console.picture("decision")
        await page.locator("#details button[data-session]").click()
        await expect(page.locator("#details-title")).to_contain_text("Session agent-")
        await expect(page.locator("#details")).to_contain_text("turns")


async def test_everything_can_be_reached_by_keyboard(browser: Browser, stack: Stack) -> None:
    await talk(stack, sessions=1, turns=1)
    async with opened(browser, stack.admin_url) as console:
        page = console.page
        await talk(stack, sessions=2, turns=1, name="typed")
        await expect(page.locator("#decisions button").first).to_be_visible()
        await page.keyboard.press("/")
        await page.keyboard.type("typed-1")
        await expect(page.locator("#decisions button")).to_have_count(1)
        await page.locator(".engine").first.focus()
        await page.keyboard.press("ArrowRight")
        await expect(page.locator(".engine").nth(1)).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(page.locator("#details-title")).to_contain_text(f"Engine {stack.endpoints[1]}")
        await page.keyboard.press("Escape")
        await expect(page.locator("#details")).not_to_be_visible()


async def test_what_clients_send_stays_text(browser: Browser, stack: Stack) -> None:
    async with opened(browser, stack.admin_url) as console:
        name = "<img src=x onerror=alert(1)>"
        await talk(stack, sessions=1, turns=1, name=name)
        await expect(console.page.locator("#decisions")).to_contain_text(name)
        assert await console.page.locator("img").count() == 0


async def test_it_is_dark_where_the_reader_wants_it(browser: Browser, stack: Stack) -> None:
    async with opened(browser, stack.admin_url, "dark") as console:
        ground = await console.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == "rgb(18, 22, 27)"
        await console.picture("dark")


async def test_a_draining_engine_is_marked_and_its_sessions_leave(browser: Browser, stack: Stack) -> None:
    leaving = stack.endpoints[2]
    async with opened(browser, stack.admin_url) as console:
        drain(stack, leaving)
        tile = console.page.locator(f'.engine[data-address="{leaving}"]')
        await expect(tile).to_have_attribute("data-condition", "draining")
        await talk(stack, sessions=12, turns=2)
        await expect(console.page.locator("#numbers")).to_contain_text(f"{ENGINES - 1} of {ENGINES}")
        await console.picture("draining")
        drain(stack)
        await expect(tile).to_have_attribute("data-condition", "ready")


async def test_a_gateway_that_stops_talking_is_seen_within_seconds(browser: Browser, stack: Stack) -> None:
    gateway = stack.children["gateway"].pid
    async with opened(browser, stack.admin_url) as console:
        os.kill(gateway, signal.SIGSTOP)
        try:
            await expect(console.page.locator("#stale")).to_contain_text("what you see is old")
        finally:
            os.kill(gateway, signal.SIGCONT)
        await expect(console.page.locator("#stale")).not_to_be_visible()


async def test_a_broken_engine_is_named_with_cause_and_cure(browser: Browser, stack: Stack) -> None:
    """The last test with the stack: the engine does not come back."""
    async with opened(browser, stack.admin_url) as console:
        os.kill(stack.children["engine-3"].pid, signal.SIGKILL)
        await expect(console.page.locator("#health")).to_have_text("degraded")
        tile = console.page.locator(f'.engine[data-address="{stack.endpoints[3]}"]')
        await expect(tile).not_to_have_attribute("data-condition", "ready")
        await expect(console.page.locator("#problems")).to_contain_text(stack.endpoints[3])
        await expect(console.page.locator("#problems")).to_contain_text("Cure:")
        await console.picture("broken")


# -- a thousand engines --------------------------------------------------------------------------------------


@dataclass
class Many:
    """A pool of `engines` whose loads change, and fifty decisions a second."""

    rng: Random = field(default_factory=lambda: Random(1))
    decisions: Decisions = field(default_factory=Decisions)
    handoffs: list[dict[str, object]] = field(default_factory=list)
    engines: int = 1000
    lacks: tuple[Lack, ...] = ()
    renderings: tuple[KindParity, ...] = ()
    media: tuple[MediaRow, ...] = ()

    def endpoints(self) -> tuple[EndpointStats, ...]:
        return tuple(
            EndpointStats(
                endpoint=Endpoint(
                    address=f"10.0.{n >> 8}.{n & 255}:8000",
                    place=Place(f"n{n // 8}", f"r{n // 64}", f"s{n // 256}"),
                ),
                load=Load(in_flight=self.rng.randrange(9), kv_usage=self.rng.random(), sessions=n % 30),
            )
            for n in range(self.engines)
        )

    def decide(self) -> None:
        for n in range(50):
            verdict = Decision("a", Reason.HOST)
            self.decisions.add(
                DecisionRecord(
                    view=request(ordinal=n, of=session("a", id=f"s{n}")),
                    verdict=verdict,
                    policy="ear",
                    candidates=tuple(fleet(a=5)),
                )
            )

    def data(self) -> PoolData:
        def health() -> object:
            return report(
                self.endpoints(),
                block_size=16,
                pool="default/p",
                policy="ear",
                version="0.1.0",
                uptime_s=1.0,
                lacks=self.lacks,
                renderings=self.renderings,
                media=self.media,
            )

        return PoolData(
            registry=CollectorRegistry(),
            decisions=self.decisions,
            policies=POLICIES,
            params=PolicyParams,
            endpoints=self.endpoints,
            sessions=lambda id: [
                SessionStats(
                    session_id=id,
                    tenant="",
                    host="",
                    turns=3,
                    context_tokens=800,
                    moves=0,
                    seconds_since_move=0.0,
                    idle_s=1.0,
                )
            ],
            index_stats=dict,
            moves=lambda: {"offers": [], "ended": [], "budget": {"in_flight": [], "moves_left": 50}},
            health=health,  # type: ignore[arg-type]
            ready=lambda: True,
            about=lambda: {"pool": "default/p", "model": "m", "policy": "ear", "version": "0.1.0"},
            new_sessions=lambda: SessionAdmissionStats(enabled=True, waiting=2, begun=7, refused=1),
            handoffs=lambda: self.handoffs,
            wall=asyncio.get_running_loop().time,
        )


def on_its_way(session_id: str, source: str, target: str, stage: Stage, content_tokens: int, missing: int):
    key = SessionKey("", session_id)
    handoff = Handoff(
        move=Move(subject=key, reason=MoveReason.DRAIN, source=source, target=target), stage=stage
    )
    handoff.content = Content(array("L", range(content_tokens)), ())
    return moves.on_its_way(handoff, missing)


@pytest.mark.parametrize("colours", ["light", pytest.param("dark", marks=pytest.mark.heavy)])
async def test_the_kv_of_a_session_that_moves_is_on_the_map_until_it_is_there(
    browser: Browser, colours: str
) -> None:
    many = Many(engines=6)
    source, target, third = (stats.endpoint.address for stats in many.endpoints()[:3])
    admin = Admin(AdminData(CollectorRegistry(), {"p": many.data()}))
    port = await admin.start()
    try:
        async with opened(browser, f"http://127.0.0.1:{port}", colours) as console:
            page, drawn = console.page, console.page.locator("#handoffs-drawn g")
            await expect(drawn).to_have_count(0)
            many.handoffs = [
                on_its_way("wanderer", source, target, Stage.COPYING, 800, 600),
                on_its_way("<b>waits</b>", third, target, Stage.OFFERED, 400, 400),
            ]
            await expect(drawn).to_have_count(2)
            rows = page.locator("#handoffs tbody tr")
            await expect(rows.nth(0)).to_contain_text("copying, 25 % of 800 tokens")
            await expect(rows.nth(0)).to_contain_text("drain")
            await expect(rows.nth(1)).to_contain_text("offered")
            await expect(rows.nth(1)).to_contain_text("<b>waits</b>")
            copied, ways = page.locator("#handoffs-drawn path.copied"), []
            assert await copied.nth(0).evaluate("e => parseFloat(e.style.strokeDasharray)") == 0.25
            for tile in (source, target):
                box = await page.locator(f'.engine[data-address="{tile}"]').bounding_box()
                assert box
                ways.append((box["x"] + box["width"] / 2, box["y"] + box["height"] / 2))
            for share, (x, y) in zip((0, 1), ways, strict=True):
                end = await copied.nth(0).evaluate(
                    "(e, share) => { const base = e.ownerSVGElement.getBoundingClientRect();"
                    " const p = e.getPointAtLength(share * e.getTotalLength());"
                    " return [p.x + base.x, p.y + base.y] }",
                    share,
                )
                assert end == pytest.approx((x, y), abs=1.5), "it begins and ends at its engines"
            stroke = await copied.nth(0).evaluate("e => getComputedStyle(e).stroke")
            assert stroke == {"light": "rgb(124, 58, 237)", "dark": "rgb(196, 181, 253)"}[colours]
            await page.locator("#handoffs button").first.focus()
            many.handoffs = [on_its_way("wanderer", source, target, Stage.COPYING, 800, 80)]
            await expect(rows.nth(0)).to_contain_text("copying, 90 % of 800 tokens")
            await expect(page.locator("#handoffs button").first).to_be_focused()
            await console.picture("handoff")
            await page.keyboard.press("Enter")
            await expect(page.locator("#details-title")).to_have_text("Session wanderer")
            many.handoffs = []
            await page.keyboard.press("Escape")
            await expect(drawn).to_have_count(0)
            await expect(rows).to_have_count(0)
    finally:
        await admin.stop()


async def test_what_selected_engines_lack_is_told_with_its_cure(browser: Browser) -> None:
    many = Many(engines=6)
    engines = [stats.endpoint.address for stats in many.endpoints()]
    many.lacks = (Lack(Finding.NO_EVENTS, engines, "it is estimated", "start it with --kv-events-config"),)
    admin = Admin(AdminData(CollectorRegistry(), {"p": many.data()}))
    port = await admin.start()
    try:
        async with opened(browser, f"http://127.0.0.1:{port}") as console:
            problems = console.page.locator("#problems")
            await expect(problems).to_contain_text(f"no_events: {', '.join(engines[:4])} and 2 more")
            await expect(problems).to_contain_text("Costs: it is estimated")
            await expect(problems).to_contain_text("Cure: start it with --kv-events-config")
    finally:
        await admin.stop()


async def test_what_tokens_engines_make_of_each_kind_of_request_is_a_table(browser: Browser) -> None:
    many = Many(engines=2)
    facts = {"equal": 1, "untold": 0, "proof": Proof.TOKENIZED}
    many.renderings = (
        KindParity(api=Api.CHAT, tools=False, thinking=Thinking.OFF, different=(), **facts),
        KindParity(
            api=Api.MESSAGES,
            tools=True,
            thinking=Thinking.ON,
            different=("10.0.0.1:8000",),
            part=Part.TOOLS,
            at=23,
            ours=1366,
            theirs=522,
            asks_engine=True,
            **facts,
        ),
    )
    admin = Admin(AdminData(CollectorRegistry(), {"p": many.data()}))
    port = await admin.start()
    try:
        async with opened(browser, f"http://127.0.0.1:{port}") as console:
            rows = console.page.locator("#tokens tbody tr")
            await expect(rows.first).to_have_text("chatnooff1 of 1tokenizedhere")
            await expect(rows.last).to_have_text(
                "messagesyeson1 of 2tools, from token 23 ontokenizedan engine"
            )
            await expect(console.page.locator("#problems")).to_contain_text("messages with tools")
    finally:
        await admin.stop()


async def test_media_without_a_name_are_shown_with_the_reason(browser: Browser) -> None:
    many = Many(engines=2)
    many.media = tuple(
        MediaRow(kind=kind, named=named, parts=parts, has_name=named is Named.BYTES, says=WORDS[named])
        for kind, named, parts in (("image", Named.BYTES, 31), ("video", Named.VIDEO, 2))
    )
    admin = Admin(AdminData(CollectorRegistry(), {"p": many.data()}))
    port = await admin.start()
    try:
        async with opened(browser, f"http://127.0.0.1:{port}") as console:
            rows = console.page.locator("#media tbody tr")
            await expect(rows.first).to_have_text(f"image31yes{WORDS[Named.BYTES]}")
            await expect(rows.last).to_have_text(f"video2no{WORDS[Named.VIDEO]}")
            await expect(console.page.locator("#health")).to_have_text("ok")
    finally:
        await admin.stop()


@pytest.mark.heavy
async def test_a_thousand_engines_and_fifty_decisions_a_second_are_drawn(
    browser: Browser, record_property: Callable[[str, object], None]
) -> None:
    many = Many()
    admin = Admin(AdminData(CollectorRegistry(), {"p": many.data()}))
    port = await admin.start()
    try:
        async with opened(browser, f"http://127.0.0.1:{port}") as console:
            page = console.page
            await expect(page.locator(".engine")).to_have_count(1000)
            await expect(page.locator("#numbers")).to_contain_text("2 waiting, 7 begun, 1 refused")
            await page.evaluate(
                "window.longest = 0; new PerformanceObserver((list) => {"
                " for (const e of list.getEntries()) window.longest = Math.max(window.longest, e.duration)"
                "}).observe({type: 'longtask'})"
            )
            for _ in range(3):
                many.decide()
                shown = many.decisions.totals.recorded

                async def drawn(shown: int = shown) -> bool:
                    return await page.locator("#decisions button").count() == min(100, shown)

                await until_true(drawn, PATIENCE_MS / 1000)
            await console.picture("thousand")
            longest = await page.evaluate("window.longest")
            record_property("longest_task_ms", longest)
            print(f"longest task in the page: {longest:.0f} ms")
    finally:
        await admin.stop()
