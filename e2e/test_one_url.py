"""Two models on one URL, one of them served by two pools: one gateway, one route, three pools."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

from perilune_api.names import REFUSE_REASON_HEADER
from testbed.http import Client, eventually, under_load
from testbed.pool import LivePool, address

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

EDGE = {"name": "edge", "namespace": "edge"}
HOST = "models.test"
CODER, CHAT, CHAT_NEXT, RENAMED = "coder", "chat", "chat-next", "chat-renamed"
MODELS = {CODER: "coder-30b", CHAT: "chat-8b", CHAT_NEXT: "chat-8b"}
SESSIONS = 60
CANARY_SHARE = 0.25


@pytest.fixture(scope="module")
def pools(kube, edge, operator):
    """Yield the three pools, by name. `coder` has the gateway and the route. The others serve the chat model,
    and `chat-next` gets a quarter of its sessions."""
    pools = {name: LivePool(kube, edge, name) for name in MODELS}
    weights = {CHAT: {"weight": 75}, CHAT_NEXT: {"weight": 25}}
    for name, pool in pools.items():
        mine = {"hostnames": [HOST], "serves": [CHAT, CHAT_NEXT], "failOpen": False}
        gateway = {"parent": EDGE, **(mine if name == CODER else {"servedBy": CODER})}
        routing = {"decisionHeader": "address", **weights.get(name, {})}
        pool.apply(replicas=1, model={"name": MODELS[name]}, gateway=gateway, routing=routing)
    for pool in pools.values():
        pool.becomes(1, timeout_s=180)
    eventually(lambda: answers(edge), timeout_s=60)
    yield pools
    for pool in pools.values():
        pool.delete()


def client(edge, model):
    return Client(edge, HOST, model)


def answers(edge):
    for model in MODELS.values():
        answer = client(edge, model).complete()
        assert answer.status == 200, answer.body


def owners(pools):
    """Address of each engine → its pool."""
    return {address(pod): name for name, pool in pools.items() for pod in pool.pods()}


def test_the_models_share_one_gateway_and_one_route(pools):
    assert {name: len(pool.pods("gateway")) for name, pool in pools.items()} == {
        CODER: 1,
        CHAT: 0,
        CHAT_NEXT: 0,
    }
    made = [o for pool in pools.values() for o in pool.objects() if o["kind"] == "HTTPRoute"]
    assert {route["metadata"]["name"] for route in made} == {CODER, f"{CODER}-refused"}


@pytest.mark.parametrize("path", ["/v1/audio/speech", "/inference/v1/generate", "/metrics"])
def test_envoy_itself_refuses_other_paths_also_in_a_pool_that_does_not_fail_open(pools, edge, path):
    answer = client(edge, MODELS[CODER]).request("POST", path)
    assert (answer.status, answer.json["error"]["code"]) == (404, "not_found"), answer.body
    assert REFUSE_REASON_HEADER not in answer.headers, "no gateway was asked"


@pytest.mark.parametrize("session", ["", "named"])
def test_the_bodys_model_chooses_the_pool(pools, edge, session):
    for model in (MODELS[CODER], MODELS[CHAT]):
        named = session and f"{session}-{model}"
        answer = client(edge, model).complete("some words " * 30, session=named)
        assert (answer.status, answer.json["model"]) == (200, model), answer.body
        assert MODELS[owners(pools)[answer.decided]] == model


def test_the_list_of_models_has_those_of_all_pools(pools, edge):
    listed = client(edge, "").request("GET", "/v1/models").json["data"]
    assert [model["id"] for model in listed] == [MODELS[CODER], MODELS[CHAT]]


def test_an_unknown_model_is_refused_with_the_names_of_the_known_ones(pools, edge):
    answer = client(edge, "none-1b").complete()
    assert (answer.status, answer.json["error"]["code"]) == (404, "unknown_model"), answer.body
    assert "chat-8b, coder-30b" in answer.json["error"]["message"]


def test_a_canary_gets_its_share_of_new_sessions_and_keeps_them(pools, edge):
    chat, owner = client(edge, MODELS[CHAT]), owners(pools)

    def pool_of(number):
        prompts = ("w " * 20 * turn for turn in (1, 2, 3))
        turns = [chat.complete(prompt, session=f"canary-{number}") for prompt in prompts]
        assert {answer.status for answer in turns} == {200}
        (only,) = {owner[answer.decided] for answer in turns}
        return only

    with ThreadPoolExecutor(4) as clients:
        played = list(clients.map(pool_of, range(SESSIONS)))
    share = played.count(CHAT_NEXT) / SESSIONS
    assert set(played) == {CHAT, CHAT_NEXT}
    assert CANARY_SHARE - 0.15 <= share <= CANARY_SHARE + 0.15, share


def test_a_pool_without_weight_gets_no_new_session_and_no_request_fails(pools, edge):
    """The canary is taken back under load, without a restart of the gateway."""
    owner = owners(pools)
    with under_load(client(edge, MODELS[CHAT]), sessions=4) as load:
        load.goes_on()
        pools[CHAT_NEXT].patch(routing={"weight": 0})

        def none_is_new():
            fresh = [
                client(edge, MODELS[CHAT]).complete(session=f"after-{n}-{load.succeeded}") for n in range(12)
            ]
            assert {owner[answer.decided] for answer in fresh} == {CHAT}

        eventually(none_is_new, timeout_s=60)
        load.goes_on()
    assert load.failures == []
    assert pools[CODER].pods("gateway")[0]["status"]["containerStatuses"][0]["restartCount"] == 0


def test_a_second_engine_of_a_served_pool_gets_requests(pools, edge):
    """It has the fewest sessions, so it gets the next ones."""
    chat, before = pools[CHAT], set(pools[CHAT].engines())
    chat.scale(2)
    chat.becomes(2, timeout_s=120)
    (new,) = set(chat.engines()) - before
    names = itertools.count()

    def serves():
        assert client(edge, MODELS[CHAT]).complete(session=f"wide-{next(names)}").decided == new

    eventually(serves)


def test_a_pool_without_engines_takes_no_request_of_another(pools, edge):
    """Scaled to none, and then deleted."""
    coder = client(edge, MODELS[CODER])
    for pool in (CHAT, CHAT_NEXT):
        pools[pool].scale(0)
    eventually(
        lambda: _is([pod for name in (CHAT, CHAT_NEXT) for pod in pools[name].pods()], []), timeout_s=120
    )
    chat = client(edge, MODELS[CHAT])
    eventually(lambda: _is(chat.complete().status, 503), timeout_s=60)
    assert [coder.complete(session=f"alone-{n}").status for n in range(40)] == [200] * 40
    pools[CHAT_NEXT].delete()
    assert [coder.complete(session=f"left-{n}").status for n in range(40)] == [200] * 40
    routes = {o["metadata"]["name"]: o for o in pools[CODER].objects() if o["kind"] == "HTTPRoute"}
    route = routes[CODER]
    assert len(route["spec"]["rules"][0]["backendRefs"]) == 1
    pools[CHAT].scale(1)
    pools[CHAT].becomes(1, timeout_s=120)
    eventually(lambda: _is(chat.complete().status, 200), timeout_s=60)


def test_a_pool_that_is_emptied_deleted_applied_again_and_renamed_costs_the_other_nothing(pools, kube, edge):
    """All the time the coder's requests succeed, and its sessions stay on their engines. Each status says
    what is: of the pool that goes, and of the one whose gateway serves it."""
    coder, chat = pools[CODER], pools[CHAT]
    coder.scale(2)
    coder.becomes(2, timeout_s=120)
    with under_load(client(edge, MODELS[CODER]), sessions=4) as load:
        load.goes_on()
        stay = sessions(edge)
        assert len(set(stay.values())) == 2
        coder.patch(gateway={"serves": [CHAT]})
        eventually(lambda: served_pools(coder, "True", "Available"), timeout_s=60)
        for is_gone, reason in ((lambda: chat.scale(0), "PoolNotReady"), (chat.delete, "NoSuchPool")):
            is_gone()
            eventually(lambda: served_pools(coder, "False", reason), timeout_s=120)  # noqa: B023
            eventually(lambda: is_gone_or_says_so(chat))
            eventually(lambda: _is(client(edge, MODELS[CHAT]).complete().status in (404, 503), True))
            goes_on(load, coder, edge, stay)
        chat.apply(replicas=1, **of_chat())
        chat.becomes(1, timeout_s=180)
        eventually(lambda: served_pools(coder, "True", "Available"), timeout_s=60)
        eventually(lambda: _is(client(edge, MODELS[CHAT]).complete().status, 200), timeout_s=60)
        goes_on(load, coder, edge, stay)
        renamed = pools[RENAMED] = LivePool(kube, edge, RENAMED)
        renamed.apply(replicas=1, **of_chat())
        eventually(lambda: _is(renamed.conditions().get("GatewayReady"), ("False", "NotNamed")), timeout_s=60)
        coder.patch(gateway={"serves": [RENAMED]})
        renamed.becomes(1, timeout_s=180)
        eventually(lambda: _is(chat.conditions().get("GatewayReady"), ("False", "NotNamed")), timeout_s=60)
        chat.delete()
        eventually(lambda: served_pools(coder, "True", "Available"), timeout_s=60)
        eventually(
            lambda: _is(owners(pools)[client(edge, MODELS[CHAT]).complete().decided], RENAMED), timeout_s=60
        )
        goes_on(load, coder, edge, stay)
    assert load.failures == []
    assert coder.pods("gateway")[0]["status"]["containerStatuses"][0]["restartCount"] == 0


def of_chat():
    return {"model": {"name": MODELS[CHAT]}, "gateway": {"parent": EDGE, "servedBy": CODER}}


def sessions(edge):
    """Return the engine of each of some sessions of the coder. They come at once, so that no engine is idle
    enough for all of them."""
    coder = client(edge, MODELS[CODER])

    def engine(number):
        return coder.complete(f"{number} " + "some words " * 30, session=f"stays-{number}").decided

    with ThreadPoolExecutor(12) as clients:
        return dict(enumerate(clients.map(engine, range(12))))


def goes_on(load, coder, edge, stay):
    """Assert that the coder lacks nothing: its load, its sessions, its own status."""
    load.goes_on()
    assert sessions(edge) == stay
    assert {kind: coder.conditions()[kind][0] for kind in ("Ready", "EnginesReady", "RouteProgrammed")} == {
        "Ready": "True",
        "EnginesReady": "True",
        "RouteProgrammed": "True",
    }


def is_gone_or_says_so(pool):
    assert not pool.exists() or pool.conditions()["Ready"] == ("False", "NoEnginesWanted")


def served_pools(pool, status, reason):
    assert pool.conditions().get("ServedPoolsReady") == (status, reason)


def _is(found, wanted):
    assert found == wanted
