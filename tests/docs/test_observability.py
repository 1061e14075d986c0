"""docs/observability.md names every metric and page that a gateway and the operator really have."""

import json
from typing import NamedTuple

import pytest
from document_tables import page, rows, section
from msgspec import structs
from prometheus_client import CollectorRegistry, Metric
from routing_objects import candidate, request, session
from token_requests import CHATML
from tokenizers import Tokenizer, models, pre_tokenizers

from perilune_api import names
from perilune_api.policies import PolicyChoice
from perilune_api.pool import (
    Canary,
    EndpointSpec,
    Engine,
    Metadata,
    Model,
    Pool,
    Routing,
    Selector,
    Shadow,
    Spec,
)
from perilune_gateway import main
from perilune_gateway.feeds.kubernetes import KubernetesPool
from perilune_gateway.feeds.shared_state import Server
from perilune_gateway.model import Decision, DecisionRecord, Outcome, Reason
from perilune_gateway.observe.admin import PAGES
from perilune_gateway.observe.decision_log import RotatedFile
from perilune_gateway.policy import FaultKind
from perilune_gateway.served_pool import ServedPool
from perilune_operator.metrics import Metrics as OperatorMetrics
from perilune_operator.metrics import Outcome as RoundOutcome

ADDRESS = "127.0.0.1:9"
DOCUMENT = page("observability.md")
OF_GATEWAY = section(DOCUMENT, "## Metrics of the gateway")
OF_OPERATOR = section(DOCUMENT, "## Metrics of the operator")


class Described(NamedTuple):
    kind: str
    labels: frozenset[str]


def documented(markdown: str) -> dict[str, Described]:
    return {
        name: Described(kind, frozenset(filter(None, labels.split(", "))))
        for name, kind, unit, labels, meaning in rows(markdown, "metric")
        if unit and meaning
    }


def exposed(*registries: CollectorRegistry) -> dict[str, Described]:
    families = (family for registry in registries for family in registry.collect())
    return {name(family): Described(kind(family), labels(family)) for family in families}


def name(family: Metric) -> str:
    """As a scrape shows it."""
    return family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")


def kind(family: Metric) -> str:
    return "gauge" if family.type == "info" else family.type


def labels(family: Metric) -> frozenset[str]:
    return frozenset(label for sample in family.samples for label in sample.labels) - {"le"}


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a tokenizer, so that the metrics of a local one are there too."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    return tmp_path


@pytest.fixture
async def gateway(folder):
    events = EndpointSpec(address=ADDRESS, events=("tcp://127.0.0.1:9",))
    engine = Engine(selector=Selector(labels={"app": "vllm"}))  # so that what others' engines lack is there
    routing = Routing(shadow=Shadow(policies=("ear",)), canary=Canary(policy=PolicyChoice(name="ear")))
    model = Model(name="m", tokenizer=str(folder))
    pool = Pool(Metadata("p"), Spec(model, engine, routing, endpoints=(events,)))
    source = KubernetesPool(None, "default", "p")
    source.pods = [{"metadata": {"name": "leaving", "annotations": {names.DRAINING: "now"}}}]
    made = ServedPool(
        pool,
        source,
        log_file=RotatedFile(folder / "log", 2**20, 1),
        state_server=Server("redis://127.0.0.1:9"),
        traces="http://127.0.0.1:9",
    )
    made.on_pool(pool)
    decision = Decision(ADDRESS, Reason.HOST)
    record = DecisionRecord(
        view=request(tokens=100, of=session(ADDRESS)),
        verdict=decision,
        policy="ear",
        candidates=(candidate(ADDRESS),),
        cached_tokens=0,
    )
    made.metrics.decided(structs.replace(record, timings_us={"total": 1.0}))
    made.metrics.ended(ADDRESS, Outcome.COMPLETED)
    made.metrics.scrape_failed(ADDRESS)
    made.metrics.policy_failed("mine", FaultKind.SLOW)
    for tallies in made.router.trial.sums.arms.values():
        for tally in tallies:
            tally.ended(failed=False)
            tally.first_token(1.0)
            tally.output(0.1)
            tally.prompt(16, 0)
    yield made
    made.collector.close()
    await made.tokenizer.close()
    await made.events.close()


async def test_every_metric_of_a_gateway_is_documented_as_it_is(gateway):
    assert documented(OF_GATEWAY) == exposed(main.Gateway([gateway]).registry, gateway.metrics.registry)


def test_every_metric_of_the_operator_is_documented_as_it_is():
    registry = CollectorRegistry()
    metrics = OperatorMetrics(registry, lambda: 1.0)
    metrics.round(RoundOutcome.DONE, 0.1, 0.1, changed=True)
    metrics.wrote("PATCH", "Deployment")
    assert documented(OF_OPERATOR) == exposed(registry)


def test_every_page_of_the_admin_server_is_documented():
    assert {row[0] for row in rows(section(DOCUMENT, "## Pages"), "page")} == set(PAGES)


@pytest.mark.parametrize("path", [path for path in PAGES if path.startswith("/api/")])
def test_every_page_of_values_has_an_example(path: str):
    start = path.partition("{")[0]
    assert f"**`{start}" in section(DOCUMENT, "## Pages")
