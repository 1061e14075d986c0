"""Which endpoints are ejected, by what their requests gave as evidence. Expected: a first sign after 1 s."""

from collections.abc import Collection

import pytest
from request_records import answered, decided, ended, in_flight

from perilune_api.pool import Ejection as Rules
from perilune_gateway.model import SessionKey
from perilune_gateway.model.applied import Applied
from perilune_gateway.state.ejection import TABLE, Ejection, Event, Standing
from perilune_gateway.state.facts import BlocksChanged, EndpointLeft, Fact, Judged
from perilune_gateway.state.in_flight import Cause, InFlight, Requests
from perilune_gateway.state.request_facts import Prefilled, Rerouted
from perilune_gateway.state.session import Session

PAUSE_S = 2.0


class Pool:
    """Endpoints that answer as told."""

    def __init__(
        self,
        size: int = 4,
        rules: Rules = Rules(pause_seconds=PAUSE_S),  # noqa: B008
        *,
        keyed: bool = False,
    ) -> None:
        self.now = 100.0
        self.addresses = [f"e{i}" for i in range(size)]
        self.out: dict[str, str] = {}
        self.requests = Requests()
        self.full: set[str] = set()
        self.ejection = Ejection(
            rules,
            self.requests,
            self.judged,
            keyed=keyed,
            is_full=lambda address: address in self.full,
        )
        self.alone_s = 1.0
        self._tickets = iter(range(1_000_000))

    def judged(self, fact: Fact) -> None:
        assert isinstance(fact, Judged)
        if fact.cause:
            self.out[fact.address] = fact.cause
        else:
            del self.out[fact.address]

    def usable(self) -> Collection[str]:
        return set(self.addresses) - set(self.out)

    def send(
        self, address: str, source: object = None, *, by_event: bool = False, tenant: str = ""
    ) -> InFlight:
        ticket = next(self._tickets)
        session = None if source is None else Session(key=SessionKey(tenant, str(source)))
        request = in_flight(
            ticket,
            address,
            at=self.now,
            tenant=tenant,
            session=session,
            patience_s=self.alone_s,
            awaited=1 if by_event else 0,
        )
        self.requests.add(request)
        self.ejection.on_decided(decided(request))
        return request

    def head(self, request: InFlight, status: int = 200) -> None:
        self.ejection.on_answered(answered(request, status, self.now))

    def end(self, request: InFlight, *, well: bool = True) -> Cause | None:
        """Return what was wrong."""
        self.requests.pop(request.ticket)
        wrong = self.ejection.verdict(request, self.now, answered=well)
        self.ejection.on_ended(ended(request, self.now, well=well, wrong=wrong))
        return wrong

    def ask(
        self,
        address: str,
        status: int = 200,
        after_s: float = 0.0,
        source: object = None,
        tenant: str = "",
    ) -> None:
        request = self.send(address, source, tenant=tenant)
        self.now += after_s
        self.head(request, status)
        self.end(request, well=status < 400)

    def judge(self) -> dict[str, str]:
        self.now += 0.11
        self.ejection.judge(self.now, self.usable, len(self.addresses))
        return self.out

    def serves(self, seconds: int = 20, ttft_s: float = 1.0) -> None:
        """Let every endpoint answer one request after the other."""
        for _ in range(seconds):
            requests = [self.send(address) for address in self.addresses]
            self.now += ttft_s
            for request in requests:
                self.head(request)
                self.end(request)


def test_every_step_of_a_standing_is_in_the_table() -> None:
    assert {standing for standing, _ in TABLE} == set(Standing) == set(TABLE.values())
    assert {event for _, event in TABLE} == set(Event)


@pytest.mark.parametrize("status", [401, 403, 500, 502, 503])
def test_failures_of_several_sessions_eject(status: int) -> None:
    pool = Pool(keyed=True)
    pool.serves()
    for _ in range(6):
        pool.ask("e0", status)
    assert pool.judge() == {"e0": Cause.FAILURES}
    found = pool.ejection.of("e0", pool.now)
    assert found is not None
    assert (found.cause, found.bad, found.of) == (Cause.FAILURES, 4, 4)


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(
            lambda p: [p.ask("e0", 400) for _ in range(20)], id="requests that were wrong themselves"
        ),
        pytest.param(lambda p: [p.ask("e0", 500, source="s") for _ in range(20)], id="one session's"),
        pytest.param(lambda p: [p.ask(f"e{i % 4}", 500) for i in range(40)], id="the whole pool fails alike"),
        pytest.param(
            lambda p: [p.ask("e0", 500 if i % 3 == 0 else 200) for i in range(40)], id="a third fails"
        ),
        pytest.param(lambda p: p.serves(20, 40.0), id="the whole pool is late alike"),
    ],
)
def test_nobody_is_ejected_for(ask) -> None:
    pool = Pool()
    pool.serves()
    ask(pool)
    assert pool.judge() == {}


@pytest.mark.parametrize("status", [401, 403, 404, 422, 429, 501])
def test_what_clients_cause_is_no_evidence(status: int) -> None:
    """Without a key of its own the gateway passes the clients' on, and engines answer 401 to wrong ones."""
    pool = Pool()
    pool.serves()
    for i in range(40):
        pool.ask("e0", status, tenant=f"t{i}")
    assert pool.judge() == {}


@pytest.mark.parametrize(
    ("bad", "good", "ejected"),
    [
        pytest.param(["a"], ["b", "c", "d"], False, id="one tenant, many sessions"),
        pytest.param(["a", "b"], ["c", "d"], False, id="two of four"),
        pytest.param(["a", "b", "c"], ["d"], True, id="three of four"),
        pytest.param(["a"], ["b"], False, id="one of two"),
        pytest.param(["a", "b"], [], True, id="all of two"),
        pytest.param(["a"], [], True, id="the only one"),
        pytest.param(["a", "b", "c"], ["d", "e", "f", "g"], False, id="three of seven"),
    ],
)
def test_tenants_have_to_agree(bad: list[str], good: list[str], ejected: bool) -> None:
    pool = Pool()
    for i in range(20):
        for tenant in good:
            pool.ask(f"e{i % 4}", tenant=tenant)
    for _ in range(10):
        for tenant in bad:
            pool.ask("e0", 500, tenant=tenant)
    assert bool(pool.judge()) is ejected


def test_one_tenants_late_answers_eject_nobody_whom_others_find_well() -> None:
    pool = Pool()
    pool.serves()
    for i in range(20):
        pool.ask(f"e{i % 4}", tenant=f"t{i % 5}")
    hanging = [pool.send("e0", tenant="a") for _ in range(10)]
    pool.now += 14.0
    for i in range(20):
        pool.ask(f"e{i % 4}", tenant=f"t{i % 5}")
    assert pool.judge() == {}
    assert pool.end(hanging[0], well=False) is Cause.LATE


def test_at_least_half_of_the_pool_stays() -> None:
    pool = Pool(5)
    for address in ("e0", "e1", "e2"):
        for _ in range(20):
            pool.ask("e3")
            pool.ask("e4")
        for _ in range(4):
            pool.ask(address, 500)
        pool.judge()
    assert set(pool.out) == {"e0", "e1"}


def test_a_single_endpoint_is_never_ejected() -> None:
    pool = Pool(1)
    for _ in range(20):
        pool.ask("e0", 500)
    assert pool.judge() == {}


def test_hanging_ejects_soon() -> None:
    pool = Pool()
    pool.serves()
    turned_bad = pool.now
    hanging = []
    while not pool.judge() and pool.now - turned_bad < 5.0:
        hanging += [pool.send("e0"), pool.send("e0")]
    assert pool.out == {"e0": Cause.LATE}
    assert pool.now - turned_bad <= 2.4, "1 s is usual"
    assert pool.end(hanging[0], well=False) is Cause.LATE


@pytest.mark.parametrize(("out", "seconds"), [(0, 2.0), (1, 2.4), (2, 3.0)])
def test_those_that_have_the_work_of_others_get_more_time(out: int, seconds: float) -> None:
    pool = Pool(6)
    pool.serves(ttft_s=0.02)
    pool.alone_s = 0.02
    pool.out = dict.fromkeys(pool.addresses[-out:] if out else [], "failures")
    began = pool.now
    for _ in range(4):
        pool.send("e0")
    while "e0" not in pool.judge() and pool.now - began < 5.0:
        pass
    assert seconds <= pool.now - began < seconds + 0.4


def test_ten_times_slower_ejects_before_its_first_answer() -> None:
    pool = Pool()
    pool.serves()
    turned_bad = pool.now
    for _ in range(4):
        pool.send("e0")
    while not pool.judge() and pool.now - turned_bad < 10.0:
        pass
    assert pool.out == {"e0": Cause.LATE}
    assert pool.now - turned_bad < 2.2


class Steps:
    """Endpoints that prefill several prompts in one step, which takes as long as they take one by one."""

    def __init__(self, pool: Pool, prompts: tuple[float, ...]) -> None:
        self.pool = pool
        self.prompts = prompts
        for _ in range(20):
            for address in pool.addresses:
                self.step(address)

    def step(self, address: str, slowdown: float = 1.0) -> None:
        pool, waiting = self.pool, []
        for pool.alone_s in self.prompts:
            waiting.append(pool.send(address, by_event=True))
        pool.judge()
        pool.now += slowdown * sum(self.prompts)
        for request in waiting:
            pool.ejection.on_prefilled(Prefilled(request, pool.now, True))
            pool.end(request)


MIXED = pytest.mark.parametrize(
    "prompts",
    [
        pytest.param((0.4, 0.4, 0.4, 0.4), id="alike"),
        pytest.param((0.02, 0.02, 0.02, 4.0), id="short ones beside a long one"),
    ],
)


@MIXED
def test_a_trial_is_measured_by_its_own_prefill_although_others_prefill_several_in_one_step(
    prompts: tuple[float, ...],
) -> None:
    pool = Pool()
    Steps(pool, prompts)
    pool.alone_s = 0.4
    for _ in range(6):
        pool.ask("e0", 500)
    pool.judge()
    pool.now += PAUSE_S
    trial = pool.send("e0", by_event=True)
    for _ in range(36):
        pool.judge()
    assert pool.end(trial) is Cause.LATE, "4 s in place of 0.4 s"
    assert pool.out


@MIXED
def test_an_endpoint_has_time_for_all_that_it_prefills_in_one_step(prompts: tuple[float, ...]) -> None:
    pool = Pool()
    Steps(pool, prompts)
    for pool.alone_s in prompts:
        pool.send("e0", by_event=True)
    began = pool.now
    while pool.now < began + 1.4 * sum(prompts):
        assert pool.judge() == {}
    while pool.now < began + 2.0 * sum(prompts):
        pool.judge()
    assert pool.out == {"e0": Cause.LATE}


def test_what_is_predicted_to_take_long_may_take_long() -> None:
    pool = Pool()
    pool.serves()
    pool.alone_s = 30.0
    for _ in range(10):
        pool.send("e0")
    pool.now += 30.0
    assert pool.judge() == {}


def ejected_pool() -> Pool:
    pool = Pool()
    pool.serves()
    for _ in range(10):
        pool.ask("e0", 500)
    assert pool.judge() == {"e0": Cause.FAILURES}
    return pool


def test_one_request_at_a_time_is_the_trial_and_a_good_one_ends_the_ejection() -> None:
    pool = ejected_pool()
    assert pool.ejection.trial(pool.now, new_session=True) == "", "not before the pause is over"
    pool.now += PAUSE_S
    assert pool.ejection.trial(pool.now, new_session=False) == "", "first a new session"
    assert pool.ejection.trial(pool.now, new_session=True) == "e0"
    request = pool.send("e0")
    assert pool.ejection.trial(pool.now, new_session=True) == "", "one trial at a time"
    assert pool.out, "not yet"
    pool.head(request)
    assert pool.out == {}
    assert pool.judge() == {}, "old evidence does not count again"


def test_a_failed_trial_doubles_the_pause_up_to_three_times_the_first() -> None:
    pool = ejected_pool()
    pauses = []
    for _ in range(4):
        began = pool.now
        while not pool.ejection.trial(pool.now, new_session=True):
            pool.now += 0.1
        pauses.append(round(pool.now - began, 1))
        pool.ask("e0", 500)
    assert pauses == pytest.approx([2.0, 4.0, 6.0, 6.0], abs=0.2)
    assert sum(pool.ejection.ejections.values()) == 1


def test_without_new_sessions_a_known_one_is_the_trial() -> None:
    pool = ejected_pool()
    pool.now += PAUSE_S + 2.0
    assert pool.ejection.trial(pool.now, new_session=False) == "e0"


def test_a_trial_whose_client_leaves_is_repeated() -> None:
    pool = ejected_pool()
    pool.now += PAUSE_S
    pool.end(pool.send("e0"), well=False)
    assert pool.out
    assert pool.ejection.trial(pool.now, new_session=True) == "e0"


def test_a_streams_head_is_no_sign_where_a_kv_event_is_expected() -> None:
    pool = Pool()
    pool.serves()
    for _ in range(6):
        pool.head(pool.send("e0", by_event=True))
    pool.now += 20.0
    assert pool.judge() == {"e0": Cause.LATE}


def test_a_queue_is_not_late_while_it_moves() -> None:
    pool = Pool()
    waiting = [pool.send("e0", by_event=True) for _ in range(40)]
    for request in waiting:
        pool.now += 1.0
        pool.ejection.on_prefilled(Prefilled(request, pool.now, True))
        assert pool.judge() == {}


@pytest.mark.parametrize("hangs", [False, True])
def test_prompts_may_wait_where_contexts_fill_the_pool_as_long_as_blocks_are_stored(hangs: bool) -> None:
    pool = Pool()
    pool.alone_s = 0.02
    pool.full.add("e0")
    for _ in range(6):
        pool.send("e0", by_event=True)
    for _ in range(100):
        if not hangs:
            applied = Applied(endpoint="e0", stored=(1,))
            pool.ejection.on_blocks_changed(BlocksChanged(applied, pool.now))
        pool.judge()
    assert pool.out == ({"e0": Cause.LATE} if hangs else {})
    pool.full.clear()
    for _ in range(200):
        pool.judge()
    assert pool.out == {"e0": Cause.LATE}, "there is room now"


@pytest.mark.parametrize(
    ("stored", "is_fine"),
    [
        pytest.param((8, 9), True, id="of an unpredicted prompt"),
        pytest.param((1, 2), False, id="of a waiting prompt"),
        pytest.param((9,), False, id="of an answer"),
        pytest.param((), False, id="none"),
    ],
)
def test_an_unpredicted_prompt_takes_time_while_its_parts_are_stored(
    stored: tuple[int, ...], is_fine: bool
) -> None:
    """Such as a prompt whose KV was lost while it waited, or one that another gateway has sent."""
    pool = Pool()
    pool.alone_s = 0.02
    for _ in range(6):
        pool.send("e0", by_event=True).blocks = (1, 2)
    for _ in range(100):
        if stored:
            applied = Applied(endpoint="e0", stored=stored)
            pool.ejection.on_blocks_changed(BlocksChanged(applied, pool.now))
        pool.judge()
    assert pool.out == ({} if is_fine else {"e0": Cause.LATE})
    for _ in range(200):
        pool.judge()
    assert pool.out == {"e0": Cause.LATE}, "it has stopped"


def test_no_prompt_is_late_while_events_are() -> None:
    pool = Pool()
    pool.alone_s = 0.02
    unheard = {"e0"}
    pool.ejection.hears = lambda address: address not in unheard
    for _ in range(6):
        pool.send("e0", by_event=True)
    for _ in range(100):
        assert pool.judge() == {}
    unheard.clear()
    for _ in range(100):
        pool.judge()
    assert pool.out == {"e0": Cause.LATE}


@pytest.mark.parametrize(("others", "seconds"), [(0, 2.1), (1, 2.1), (2, 3.6)])
def test_an_endpoint_may_stand_still_for_as_long_as_others_have(others: int, seconds: float) -> None:
    """They did so for 3 s while requests waited, as engines do whose machine has too much to do."""
    pool = Pool()
    pool.alone_s = 0.02

    def asked(address: str, after_s: float) -> None:
        waiting = [pool.send(address, by_event=True) for _ in range(5)]
        pool.now += after_s
        for request in waiting:
            pool.ejection.on_prefilled(Prefilled(request, pool.now, True))
            pool.end(request)
        assert pool.judge() == {}

    for _ in range(30):
        for address in pool.addresses:
            asked(address, 0.02)
    for address in pool.addresses[:others]:
        asked(address, 3.0)
    for address in pool.addresses[1:]:
        asked(address, 0.02)
    began = pool.now
    hanging = [pool.send("e0", by_event=True) for _ in range(5)]
    while not pool.judge() and pool.now - began < 10.0:
        pool.ask("e3", after_s=0.02)
    assert pool.out == {"e0": Cause.LATE}
    assert seconds - 0.2 < pool.now - began < seconds + 0.2
    assert len(hanging) == 5


def test_those_that_were_ejected_meanwhile_excuse_nobody() -> None:
    """They stood still because they were bad, not because all have too much to do."""
    pool = Pool()
    pool.alone_s = 0.02

    def asked(address: str) -> None:
        request = pool.send(address, by_event=True)
        pool.now += 0.02
        pool.ejection.on_prefilled(Prefilled(request, pool.now, True))
        pool.end(request)

    for _ in range(200):
        for address in pool.addresses:
            asked(address)
        pool.judge()
    for bad in ("e0", "e1"):
        hanging = [pool.send(bad, by_event=True) for _ in range(5)]
        for _ in range(100):
            pool.judge()
            pool.ask("e3", after_s=0.0)
        for request in hanging:
            pool.ejection.on_prefilled(Prefilled(request, pool.now, True))
            pool.end(request)
        assert pool.out == {bad: Cause.LATE}
        trial = pool.send(bad, by_event=True)
        pool.ejection.on_prefilled(Prefilled(trial, pool.now, True))
        pool.end(trial)
        assert pool.out == {}
    began = pool.now
    hanging = [pool.send("e2", by_event=True) for _ in range(5)]
    while not pool.judge() and pool.now - began < 20.0:
        pool.ask("e3", after_s=0.0)
    assert pool.now - began < 2.4
    assert len(hanging) == 5


def test_missing_events_are_not_taken_for_missing_tokens() -> None:
    pool = Pool()
    pool.serves()
    for _ in range(20):
        request = pool.send("e0", by_event=True)
        pool.now += 1.0
        pool.head(request)
        pool.end(request)
    for _ in range(6):
        pool.head(pool.send("e0", by_event=True))
    pool.now += 60.0
    assert pool.judge() == {}, "its answers ended well all the same"


def test_an_endpoint_that_envoy_could_not_reach_has_failed() -> None:
    pool = Pool()
    pool.serves()
    for _ in range(10):
        request = pool.send("e0")
        request.target = "e1"
        pool.ejection.on_rerouted(Rerouted(request, pool.now, "e0", True))
        pool.head(request)
        pool.end(request)
    assert pool.judge() == {"e0": Cause.FAILURES}


def test_nobody_is_ejected_where_it_is_switched_off() -> None:
    pool = Pool(rules=Rules(enabled=False))
    for _ in range(20):
        pool.ask("e0", 500)
    assert pool.judge() == {}


def test_an_endpoint_that_left_leaves_nothing() -> None:
    pool = ejected_pool()
    pool.ejection.on_endpoint_left(EndpointLeft("e0"))
    assert pool.ejection.of("e0", pool.now) is None
    assert not pool.ejection.ejections
