"""The console in a real browser: content, errors, keyboard, colours, staleness, a thousand engines.

A real gateway, Envoy and simulated engines stand behind it, except for the thousand. Needs `make browser`.
`PICTURES=write` writes the pictures of docs/observability.md.
"""

import asyncio
import json
import os
import re
import shutil
import signal
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Literal

import aiohttp
import pytest
import pytest_asyncio
from msgspec import structs
from playwright.async_api import Browser, ConsoleMessage, Error, Locator, Page, async_playwright, expect
from prometheus_client import CollectorRegistry
from routing_objects import candidate, request, session
from stack_user import StackUser
from waiting import until_true

from perilune_api import pool as spec
from perilune_api.findings import ADVICE, Finding
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
HIT = re.compile(r"^([1-9]|[1-9]\d|100) % of ")
BUSY = re.compile(r" [1-9]\d* in flight.*KV [1-9]")
ENGINES = 4
OPTIONS = EngineOptions(
    time_scale=4.0, kv_tokens=60_000, handoff=True, arguments=("--send-bytes-per-s", "60e6")
)
"""Engines that hand KV over slowly, so that it is seen on its way."""
ROUTING = spec.Routing(limits=spec.Limits(decision_seconds=30.0))


IN_WINDOW = """found => found.filter(e => {
  const at = e.getBoundingClientRect();
  const box = e.closest('#fabric, #decisions, dialog')?.getBoundingClientRect();
  const inside = (top, bottom) => at.top >= top - 1 && at.bottom <= bottom + 1;
  return at.width > 0 && at.left >= 0 && at.right <= innerWidth && inside(0, innerHeight)
    && (!box || inside(box.top, box.bottom));
}).length"""
CHARTS_DRAWN = """[...document.querySelectorAll('#charts figure')].every((chart) => {
  const line = chart.querySelector('path:not(.area)').getTotalLength() >= 1;
  return line || chart.querySelector('.none')?.textContent === 'no prompts yet';
})"""
ONE_SAMPLE = """(() => {
  const told = (all, name, value) => new Map([...document.querySelectorAll(all)].map(
    (e) => [e.querySelector(name).textContent, e.querySelector(value).textContent]));
  const head = told('#numbers div', 'dt', 'dd'), charts = told('#charts figure', 'span', 'b');
  const same = [...head].filter(([name]) => charts.has(name));
  const words = [...document.querySelectorAll('.engine')].map((e) => e.textContent.match(/(\\d+) in flight/));
  const sum = words.reduce((all, found) => all + Number(found?.[1]), 0);
  return same.length === 4 && same.every(([name, value]) => charts.get(name) === value)
    && (words.includes(null) || head.get('in flight') === String(sum));
})()"""
FILLED = """(() => {
  const end = (e) => e.getBoundingClientRect(), get = (id) => document.getElementById(id);
  const last = (column) => [...column.children].filter((panel) => !panel.hidden).at(-1);
  const columns = [...document.querySelectorAll('.column')];
  const engines = Math.max(...[...document.querySelectorAll('.engine')].map((e) => end(e).right));
  return columns.every((column) => Math.abs(end(last(column)).bottom - end(column).bottom) < 2)
    && end(document.querySelector('main')).bottom >= innerHeight - 1
    && end(document.querySelector('main')).bottom - end(columns.at(-1)).bottom < 20
    && end(get('decisions')).bottom - end(get('decisions').lastElementChild).bottom < 100
    && end(get('fabric')).right - engines < 40;
})()"""
CUT_OFF = """[...document.body.querySelectorAll('*')].filter((e) =>
  getComputedStyle(e).overflowX !== 'visible' && e.scrollWidth > e.clientWidth + 1
  || getComputedStyle(e).overflowY !== 'visible' && e.scrollHeight > e.clientHeight + 1
  || e.offsetParent && e.getBoundingClientRect().right > innerWidth
).map((e) => e.id || e.className || e.tagName)
 .filter((name) => !['decisions', 'fabric', 'skip'].includes(name))"""
"""What does not fit where it stands, but for the lists that are scrolled."""


@dataclass
class Console:
    """The console in the page, and what went wrong in it."""

    page: Page
    errors: list[str] = field(default_factory=list)

    async def picture(self, name: str, *shown: Locator) -> None:
        """Take a picture while all of these stand in the window, before and after, no chart is empty, head,
        charts and map show the same moment, and the whole page is used."""

        async def seen() -> bool:
            page = [await self.page.evaluate(each) for each in (CHARTS_DRAWN, ONE_SAMPLE, FILLED)]
            return all(page) and all([await at.evaluate_all(IN_WINDOW) for at in shown])

        async def taken() -> bool:
            if not await seen():
                return False
            if PICTURES:
                await self.page.screenshot(path=PICTURES / f"console-{name}.png")
            return await seen()

        await until_true(taken, PATIENCE_MS / 1000)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def page() -> AsyncIterator[Page]:
    """Yield the only page, since another one takes a second of CPU time."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await new_page(browser)
        yield page
        await browser.close()


async def new_page(browser: Browser) -> Page:
    page = await browser.new_page(
        reduced_motion="reduce",  # without a graphics card each frame costs the machine's time
    )
    page.set_default_timeout(PATIENCE_MS)
    return page


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with Stack(
        engines=ENGINES, options=OPTIONS, routing=ROUTING, vital=("gateway", "envoy")
    ) as running:
        yield running


@asynccontextmanager
async def opened(
    page: Page,
    url: str,
    colours: Literal["light", "dark"] = "light",
    size: tuple[int, int] = (1400, 900),
    ready: str = ".engine",
) -> AsyncIterator[Console]:
    """Yield the page with a console in it, and check in the end that it showed no errors."""
    console = Console(page)

    def fails(error: Error) -> None:
        console.errors.append(str(error))

    def complains(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            console.errors.append(message.text)

    await page.emulate_media(color_scheme=colours)
    await page.set_viewport_size({"width": size[0], "height": size[1]})
    page.on("pageerror", fails)
    page.on("console", complains)
    await page.goto(url + "/console")
    await page.wait_for_selector(ready)
    try:
        yield console
        assert console.errors == []
    finally:
        page.remove_listener("pageerror", fails)
        page.remove_listener("console", complains)
        await page.goto("about:blank")


async def converse(stack: Stack, who: str, turns: int, asks: str = "", answer_tokens: int = 40) -> None:
    """Play a conversation through Envoy, each turn extending the one before; all begin alike."""
    messages = [
        {"role": "system", "content": "You are an agent that mends a repository. " * 80},
        {"role": "user", "content": asks or f"{who} asks. " * 120},
    ]
    async with aiohttp.ClientSession() as http:
        for _ in range(turns):
            body = {"model": OPTIONS.model, "messages": messages, "max_tokens": answer_tokens}
            url = stack.url + "/v1/chat/completions"
            async with http.post(url, json=body, headers={"x-session-id": who}) as answer:
                assert answer.status == 200, await answer.text()
                messages.append((await answer.json())["choices"][0]["message"])
            messages.append({"role": "user", "content": f"{who} goes on. " * 40})


async def talk(stack: Stack, sessions: int, turns: int, name: str) -> None:
    """Play conversations all at once."""
    await asyncio.gather(*(converse(stack, f"{name}-{n}", turns) for n in range(sessions)))


@asynccontextmanager
async def load(stack: Stack, sessions: int = 20 if PICTURES else 8) -> AsyncIterator[None]:
    """Keep so many requests in flight, of sessions with long answers."""

    async def go_on(number: int) -> None:
        for again in count():
            with suppress(AssertionError):  # an engine that breaks fails some
                who, turns = f"agent-{number}.{again}", 6 + (number + again) % 5
                await converse(stack, who, turns, answer_tokens=160)

    talking = [asyncio.create_task(go_on(number)) for number in range(sessions)]
    try:
        yield
    finally:
        for one in talking:
            one.cancel()
        await asyncio.wait(talking)


def drain(stack: Stack, *addresses: str) -> None:
    pool = stack.pool
    endpoints = tuple(structs.replace(e, draining=e.address in addresses) for e in pool.spec.endpoints)
    changed = structs.replace(pool, spec=structs.replace(pool.spec, endpoints=endpoints))
    stack.pool_file.write_bytes(spec.dump(changed))


async def test_an_idle_pool_shows_its_engines_where_they_stand(page: Page, stack: Stack) -> None:
    async with opened(page, stack.admin_url, size=(1400, 700)) as console:
        await expect(page.locator(".engine[data-condition=ready]")).to_have_count(ENGINES)
        await expect(page.locator(".spine")).to_have_count(2)
        await expect(page.locator(".rack")).to_have_count(4)
        await expect(page.locator("#decisions")).to_contain_text("No decision yet.")
        await expect(page.locator("#health")).to_have_text("ok")
        await expect(page.locator("#problems-box")).not_to_be_visible()
        await expect(page.locator("#about")).to_contain_text("policy perilune")
        await console.picture("idle", page.locator(".engine[data-condition=ready]"))


async def test_decisions_come_as_they_are_taken_and_say_why(page: Page, stack: Stack) -> None:
    async with opened(page, stack.admin_url) as console, load(stack):
        await expect(page.locator("#decisions button").nth(29)).to_be_attached()
        if PICTURES:
            await expect(page.locator("#history-title")).to_have_text(re.compile(r"[4-9]\d s|minutes"))
        await console.picture(
            "busy",
            page.locator("#numbers div", has_text=re.compile(r"in flight[1-9]")),
            page.locator("#charts figure", has_text=re.compile(r"in flight[1-9]")),
            page.locator(".engine", has_text=BUSY).nth(ENGINES - 1 if PICTURES else 0),
            page.locator("#decisions li:first-child span", has_text=HIT),
            page.locator("#decisions li:first-child .why", has_text="because it is the session's host"),
        )


async def test_a_decision_says_what_each_engine_would_have_cost_and_other_policies_would_have_done(
    page: Page, stack: Stack
) -> None:
    question = "How is the build to be mended? " * 200  # its KV is where it was asked first
    async with opened(page, stack.admin_url, size=(1400, 1040)) as console:
        async with load(stack):
            await expect(page.locator("#decisions button").nth(29)).to_be_attached()
        await converse(stack, "asks-first", turns=2, asks=question)
        await converse(stack, "asks-next", turns=1, asks=question)
        await expect(page.locator("#decisions button").first).to_contain_text("asks-next")
        details = page.locator("#details")

        async def answered() -> bool:  # the gateway may hear of the answer's end after the client
            await page.locator("#decisions button").first.dispatch_event("click")
            await expect(details.locator("h3")).to_have_count(2)
            return "status 200" in await details.inner_text()

        await until_true(answered)
        await expect(details.locator("h3")).to_have_text(
            ["Candidates", "What other policies would have done"]
        )
        engines, policies = (details.locator("table").nth(n).locator("tbody tr") for n in (1, 2))
        await expect(engines).to_have_count(ENGINES)
        await expect(policies).to_have_count(len(POLICIES) - 1)
        await console.picture("decision", policies.first, policies.last)
        assert await policies.evaluate_all(IN_WINDOW) == len(POLICIES) - 1
        await details.locator("button[data-session]").click()
        await expect(page.locator("#details-title")).to_contain_text("Session asks-next")
        await expect(details).to_contain_text("turns")


async def test_a_decision_says_what_its_prompts_prefill_would_have_cost_at_each_engine(page: Page) -> None:
    stack = Stack(engines=3, options=replace(OPTIONS, prefill=1), routing=ROUTING)
    async with stack, aiohttp.ClientSession() as http:
        await StackUser(stack, http).all_hand_over()
        async with opened(page, stack.admin_url, size=(1400, 1040)):
            await converse(stack, "asks", turns=1, asks="How is the build to be mended? " * 400)
            await page.locator("#decisions button").first.dispatch_event("click")
            details = page.locator("#details")
            await expect(details.locator("h3").nth(1)).to_have_text("Where the prompt can be prefilled")
            rows = details.locator("table").nth(2).locator("tbody tr")
            await expect(rows).to_have_count(2)
            await expect(rows.first).to_contain_text("interference_s")
            await expect(rows.last).to_contain_text("transfer_s")


async def test_everything_can_be_reached_by_keyboard(page: Page, stack: Stack) -> None:
    await talk(stack, sessions=1, turns=1, name="agent")
    async with opened(page, stack.admin_url):
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


async def test_what_clients_send_stays_text(page: Page, stack: Stack) -> None:
    async with opened(page, stack.admin_url):
        name = "<img src=x onerror=alert(1)>"
        await talk(stack, sessions=1, turns=1, name=name)
        await expect(page.locator("#decisions")).to_contain_text(name)
        assert await page.locator("img").count() == 0


async def test_it_is_dark_where_the_reader_wants_it(page: Page, stack: Stack) -> None:
    async with opened(page, stack.admin_url, "dark"):
        ground = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == "rgb(18, 22, 27)"


async def test_a_draining_engine_is_marked_and_its_sessions_leave(page: Page, stack: Stack) -> None:
    leaving = stack.endpoints[2]
    # many, so that some are handed over while it is looked at
    async with opened(page, stack.admin_url) as console, load(stack, sessions=20):
        tile = page.locator(f'.engine[data-address="{leaving}"]')
        await expect(tile.locator("span").first).to_have_text(re.compile("^[1-9]"))
        drain(stack, leaving)
        await expect(tile).to_have_attribute("data-condition", "draining")
        await expect(page.locator("#numbers")).to_contain_text(f"{ENGINES - 1} of {ENGINES}")
        await console.picture(
            "draining",
            page.locator(".engine[data-condition=draining]", has_text="draining"),
            page.locator(".engine[data-condition=ready]", has_text=BUSY).nth(ENGINES - 2 if PICTURES else 0),
            page.locator("#handoffs-drawn path.copied"),
            page.locator("#handoffs tbody tr", has_text=re.compile(r"drain.*copying, [1-9]\d? %")),
            page.locator("#numbers div", has_text=re.compile(r"requests/s[1-9]")),
        )
        drain(stack)
        await expect(tile).to_have_attribute("data-condition", "ready")


async def test_a_gateway_that_stops_talking_is_seen_within_seconds(page: Page, stack: Stack) -> None:
    gateway = stack.children["gateway"].pid
    async with opened(page, stack.admin_url):
        os.kill(gateway, signal.SIGSTOP)
        try:
            await expect(page.locator("#stale")).to_contain_text("what you see is old")
        finally:
            os.kill(gateway, signal.SIGCONT)
        await expect(page.locator("#stale")).not_to_be_visible()


async def test_a_broken_engine_is_named_with_cause_and_cure(page: Page, stack: Stack) -> None:
    """The last test with the stack: the engine does not come back. Nothing of the tests before is shown."""
    await stack.restart_gateway()
    async with opened(page, stack.admin_url) as console, load(stack):
        broken = f'[data-address="{stack.endpoints[3]}"]'
        if PICTURES:
            await expect(page.locator("#history-title")).to_have_text(re.compile(r"[2-9]\d s|minutes"))
        os.kill(stack.children["engine-3"].pid, signal.SIGKILL)
        await expect(page.locator("#health")).to_have_text("degraded")
        await expect(page.locator(f".engine{broken}")).not_to_have_attribute("data-condition", "ready")
        told = page.locator("#problems li", has=page.locator(broken))
        await expect(page.locator("#handoffs-drawn g")).to_have_count(0)
        await console.picture(
            "broken",
            page.locator(f".engine{broken}[data-problem]", has_text=", 0 in flight"),
            page.locator("#problems-title", has_text="(1)" if PICTURES else ""),
            told.locator("tr", has_text="Cause"),
            told.locator("tr", has_text="Cure"),
        )
        await expect(page).to_have_title(re.compile("degraded"))
        await told.locator("button").first.dispatch_event("click")
        await expect(page.locator("#details .wrong")).to_contain_text("Cure")


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
    down: frozenset[int] = frozenset()
    draining: frozenset[int] = frozenset()
    name: str = "p"
    session: str = "s"
    address: str = "10.0.{}.{}:8000"
    numbers: Iterator[int] = field(default_factory=count)

    def endpoints(self) -> tuple[EndpointStats, ...]:
        return tuple(
            EndpointStats(
                endpoint=Endpoint(
                    address=self.address.format(n >> 8, n & 255),
                    place=Place(f"n{n // 8}", f"r{n // 64}", f"s{n // 256}"),
                    ready=n not in self.down,
                    draining=n in self.draining,
                ),
                load=Load(
                    in_flight=self.rng.randrange(9),
                    kv_usage=self.rng.random(),
                    sessions=n % 30,
                    pending_prefill_s=2 * self.rng.random(),
                    metrics_age_s=0.1,
                ),
            )
            for n in range(self.engines)
        )

    def decide(self, decisions: int = 50) -> None:
        serving = [self.address.format(n >> 8, n & 255) for n in range(self.engines) if n not in self.down]
        for n in islice(self.numbers, decisions):
            host = self.rng.choice(serving)
            tokens, hit_ratio = self.rng.randrange(2_000, 40_000), self.rng.uniform(0.6, 1.0)
            cached = int(tokens * hit_ratio)
            self.decisions.add(
                DecisionRecord(
                    view=request(ordinal=n, tokens=tokens, of=session(host, id=f"{self.session}{n}")),
                    verdict=Decision(host, Reason.HOST),
                    policy="ear",
                    candidates=(candidate(host, pending=5, cached=cached),),
                    cached_tokens=cached,
                )
            )

    def data(self) -> PoolData:
        def health() -> object:
            return report(
                self.endpoints(),
                block_size=16,
                pool=f"default/{self.name}",
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
            about=lambda: {"pool": f"default/{self.name}", "model": "m", "policy": "ear", "version": "0.1.0"},
            new_sessions=lambda: SessionAdmissionStats(enabled=True, waiting=2, begun=7, refused=1),
            handoffs=lambda: self.handoffs,
            wall=asyncio.get_running_loop().time,
        )


@asynccontextmanager
async def deciding(many: Many) -> AsyncIterator[None]:
    """Let it go on deciding."""

    async def go_on() -> None:
        while True:
            many.decide(5)
            await asyncio.sleep(0.1)

    task = asyncio.create_task(go_on())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


@asynccontextmanager
async def serving(many: Many) -> AsyncIterator[str]:
    """Yield the URL of the pages of such a pool."""
    admin = Admin(AdminData(CollectorRegistry(), {"p": many.data()}))
    try:
        yield f"http://127.0.0.1:{await admin.start()}"
    finally:
        await admin.stop()


def on_its_way(session_id: str, source: str, target: str, stage: Stage, content_tokens: int, missing: int):
    key = SessionKey("", session_id)
    handoff = Handoff(
        move=Move(subject=key, reason=MoveReason.DRAIN, source=source, target=target), stage=stage
    )
    handoff.content = Content(array("L", range(content_tokens)), ())
    return moves.on_its_way(handoff, missing)


@pytest.mark.parametrize("colours", ["light", pytest.param("dark", marks=pytest.mark.heavy)])
async def test_the_kv_of_a_session_that_moves_is_on_the_map_until_it_is_there(
    page: Page, colours: str
) -> None:
    many = Many(engines=6)
    source, target, third = (stats.endpoint.address for stats in many.endpoints()[:3])
    async with serving(many) as url, opened(page, url, colours):
        drawn = page.locator("#handoffs-drawn g")
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
            ways.append((box["x"] + box["width"] / 2, box["y"]))
        for share, (x, y) in zip((0, 1), ways, strict=True):
            end = await copied.nth(0).evaluate(
                "(e, share) => { const base = e.ownerSVGElement.getBoundingClientRect();"
                " const p = e.getPointAtLength(share * e.getTotalLength());"
                " return [p.x + base.x, p.y + base.y] }",
                share,
            )
            assert end == pytest.approx((x, y), abs=1.5), "it begins and ends on top of its engines"
        stroke = await copied.nth(0).evaluate("e => getComputedStyle(e).stroke")
        assert stroke == {"light": "rgb(124, 58, 237)", "dark": "rgb(196, 181, 253)"}[colours]
        await page.locator("#handoffs button").first.focus()
        many.handoffs = [on_its_way("wanderer", source, target, Stage.COPYING, 800, 80)]
        await expect(rows.nth(0)).to_contain_text("copying, 90 % of 800 tokens")
        await expect(page.locator("#handoffs button").first).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(page.locator("#details-title")).to_have_text("Session wanderer")
        many.handoffs = []
        await page.keyboard.press("Escape")
        await expect(drawn).to_have_count(0)
        await expect(rows).to_have_count(0)


async def test_what_selected_engines_lack_is_told_with_its_cure(page: Page) -> None:
    many = Many(engines=6)
    engines = [stats.endpoint.address for stats in many.endpoints()]
    many.lacks = (Lack(Finding.NO_EVENTS, engines, "it is estimated", "start it with --kv-events-config"),)
    async with serving(many) as url, opened(page, url):
        told = page.locator("#problems li")
        await expect(told.locator("button")).to_have_text(engines[:4])
        await expect(told.locator(".what")).to_contain_text("and 2 more")
        await expect(told.locator(".what code")).to_have_text("no_events")
        await expect(told.locator("tr")).to_have_text(
            ["Costsit is estimated", "Curestart it with --kv-events-config"]
        )
        await expect(page.locator("#problems-title")).to_have_text("What is wrong (1)")
        await expect(page.locator("#health")).to_have_text("not exact")
        many.lacks = (Lack(Finding.NO_REPLAY, engines, "it learns again", "a replay", exact=True),)
        await expect(page.locator("#problems-title")).to_have_text("What could be better (1)")
        await expect(page.locator("#health")).to_have_text("ok")


async def test_what_tokens_engines_make_of_each_kind_of_request_is_a_table(page: Page) -> None:
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
    async with serving(many) as url, opened(page, url):
        rows = page.locator("#tokens tbody tr")
        await expect(rows.first).to_have_text("chatnooff1 of 1tokenizedhere")
        await expect(rows.last).to_have_text("messagesyeson1 of 2tools, from token 23 ontokenizedan engine")
        await expect(page.locator("#problems")).to_contain_text("messages with tools")


@pytest.mark.heavy  # tests/gateway/observe/test_console.py shows what each browser is sent
async def test_a_second_browser_sees_each_decision_once(page: Page) -> None:
    many = Many(engines=6)
    async with serving(many) as url, opened(page, url):
        many.decide(25)  # with those below not more than a second shows
        assert page.context.browser
        second = await new_page(page.context.browser)
        async with opened(second, url):
            many.decide(25)
            for each in (page, second):
                await expect(each.locator('#decisions [data-request="r49"]')).to_be_attached()
                told = await each.locator("#decisions [data-request]").evaluate_all(
                    "all => all.map(e => e.dataset.request)"
                )
                assert sorted(told) == sorted(f"r{n}" for n in range(50))
        await second.close()


async def test_an_empty_pool_says_what_is_wrong(page: Page) -> None:
    async with serving(Many(engines=0)) as url, opened(page, url, ready="#problems li") as console:
        await expect(page.locator("#health")).to_have_text("unready")
        await expect(page.locator("#fabric")).to_have_text("The pool has no engines.")
        await expect(page.locator("#problems tr", has_text="Cure")).to_be_in_viewport()
        console.errors = [error for error in console.errors if "503" not in error]  # what /api/health answers


async def test_in_a_narrow_window_nothing_is_cut_off_by_long_names(page: Page) -> None:
    many = Many(
        engines=6,
        name="llama-3-3-70b-instruct-long-context-agents-eu-central-1",
        session="repository-assistant/5b0f8f4e-5a0c-4a57-9c32-1f2f6f0f9f3e/",
        address="llama-3-3-70b-instruct-{}-{}.vllm-workers.inference-production.svc.cluster.local:8000",
    )
    source, target = (stats.endpoint.address for stats in many.endpoints()[:2])
    many.handoffs = [on_its_way(many.session, source, target, Stage.COPYING, 800, 600)]
    advice = ADVICE[Finding.NO_EVENTS]
    many.lacks = (Lack(Finding.NO_EVENTS, [source], advice.costs, advice.listed),)
    async with serving(many) as url, opened(page, url, size=(390, 1300)) as console, deciding(many):
        for has in ("#decisions button", "#problems li", "#handoffs button"):
            await expect(page.locator(has).first).to_be_attached()
        await expect(page.locator("#health")).to_have_text("not exact")
        assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        assert await page.evaluate(CUT_OFF) == []
        await console.picture(
            "narrow",
            page.locator("#health", has_text="not exact"),
            page.locator("#problems tr", has_text="Cure"),
            page.locator(".engine").last,
        )


async def test_engines_with_the_same_trouble_are_told_together_and_each_has_a_name_of_its_own(
    page: Page,
) -> None:
    many = Many(engines=16, down=frozenset(range(8)))
    async with serving(many) as url, opened(page, url):
        await expect(page.locator("#problems li")).to_have_count(1)
        await expect(page.locator("#problems .what")).to_contain_text("and 4 more")
        await expect(page.locator(".engine[data-condition=down][data-problem]")).to_have_count(8)
        names = await page.locator(".engine b").all_text_contents()
        assert len(set(names)) == 16
        await page.locator("#problems button").nth(1).focus()
        await page.keyboard.press("Enter")
        await expect(page.locator("#details-title")).to_have_text("Engine 10.0.0.1:8000")
        await expect(page.locator("#details .wrong")).to_contain_text("Cure")


LONGEST_TASK_S = 0.2


async def longest_task_s(page: Page, work: Callable[[], Awaitable[None]]) -> float:
    """Return the CPU seconds of the longest task of a page's main thread while it works, without what the
    test asks the page."""
    browser = page.context.browser
    assert browser
    await browser.start_tracing(page=page, categories=["toplevel", "disabled-by-default-devtools.timeline"])
    await work()
    events = json.loads(await browser.stop_tracing())["traceEvents"]
    mains = {
        (e["pid"], e["tid"])
        for e in events
        if e["name"] == "thread_name" and e["args"]["name"] == "CrRendererMain"
    }
    ours = [e for e in events if (e["pid"], e["tid"]) in mains and "dur" in e]
    tests = [e["ts"] for e in ours if "DevToolsSession" in str(e.get("args"))]
    tasks = [
        e.get("tdur", e["dur"])
        for e in ours
        if "RunTask" in e["name"] and not any(e["ts"] <= at <= e["ts"] + e["dur"] for at in tests)
    ]
    assert tasks, "the trace has the page's tasks"
    return max(tasks) * 1e-6


async def test_media_without_a_name_are_shown_with_the_reason(page: Page) -> None:
    many = Many(engines=2)
    many.media = tuple(
        MediaRow(kind=kind, named=named, parts=parts, has_name=named is Named.BYTES, says=WORDS[named])
        for kind, named, parts in (("image", Named.BYTES, 31), ("video", Named.VIDEO, 2))
    )
    async with serving(many) as url, opened(page, url):
        rows = page.locator("#media tbody tr")
        await expect(rows.first).to_have_text(f"image31yes{WORDS[Named.BYTES]}")
        await expect(rows.last).to_have_text(f"video2no{WORDS[Named.VIDEO]}")
        await expect(page.locator("#health")).to_have_text("ok")


@pytest.mark.heavy
async def test_a_thousand_engines_and_fifty_decisions_a_second_keep_no_reader_waiting(
    page: Page, record_property: Callable[[str, object], None]
) -> None:
    """CPU time is measured, so that a busy machine does not matter; each state has 1,000 changed engines."""
    leaving = (90, 353, 607, 911)
    many = Many(down=frozenset(range(0, 1000, 50)), draining=frozenset(leaving), session="agent-")
    engines = [stats.endpoint.address for stats in many.endpoints()]
    async with serving(many) as url, opened(page, url, size=(1400, 1260)) as console:

        async def work() -> None:
            await page.reload()
            await expect(page.locator(".engine")).to_have_count(1000)
            await expect(page.locator("#numbers")).to_contain_text("2 waiting, 7 begun, 1 refused")
            for second in range(6):
                many.handoffs = [
                    on_its_way(
                        f"agent-{n}",
                        engines[leaving[n % 4]],
                        engines[leaving[n % 4] + 9 * (n // 4 - 4) + 4],
                        Stage.COPYING,
                        800,
                        700 - 100 * second + n,
                    )
                    for n in range(40)
                ]
                many.decide()
                newest = f'#decisions [data-request="r{50 * second + 49}"]'
                await expect(page.locator(newest)).to_be_attached()

        longest_s = await longest_task_s(page, work)
        record_property("longest_task_cpu_s", longest_s)
        print(f"longest task in the page: {1000 * longest_s:.0f} ms of CPU")
        assert longest_s < LONGEST_TASK_S
        async with deciding(many):
            if PICTURES:
                await expect(page.locator("#history-title")).to_have_text(re.compile(r"[2-9]\d s|minutes"))
            await console.picture(
                "thousand",
                page.locator("#problems tr", has_text="Cure"),
                page.locator("#numbers div", has_text=re.compile(r"requests/s[1-9]")),
                page.locator("#numbers div", has_text=re.compile(r"hits[1-9]")),
                page.locator("#decisions span", has_text=HIT),
                page.locator("#charts figure").last,
            )
        assert await page.locator(".engine").evaluate_all(IN_WINDOW) == 1000
