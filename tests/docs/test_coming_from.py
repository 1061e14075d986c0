"""The pages of `coming-from` that need no cluster, as they are written, on ports of their own, with simulated
engines. Those that need one: tests/operator/test_coming_from_pages.py."""

import json

import pytest
from page_shell import shell
from pages import ROOT, blocks, commands

pytestmark = pytest.mark.processes

PORTS = ("8001", "8002", "5557", "5558", "9002", "9003", "10000")
EVENTS = ["--events", "tcp://127.0.0.1:5557", "--replay", "tcp://127.0.0.1:5558"]
ENGINE = ["perilune", "engine", "--model", "qwen3-coder-30b", "--time-scale", "50", "--listen"]
ACCESS_LOG = """\
{"session":"a","at":1000.5,"in":4000,"out":2000}
{"session":"","at":1000.9,"in":800,"out":900}
{"session":"a","at":1001.5,"in":8000,"out":2000}
"""


def span(conversation, at_s, **usage):
    """Return a span as OTLP writes it in JSON, where integers of 64 bits are strings."""
    named = [
        {"key": f"gen_ai.usage.{name}_tokens", "value": {"intValue": str(n)}} for name, n in usage.items()
    ]
    if conversation:
        named.append({"key": "gen_ai.conversation.id", "value": {"stringValue": conversation}})
    return {"traceId": f"trace-{at_s}", "startTimeUnixNano": str(at_s * 10**9), "attributes": named}


SPANS = [span("a", 102, input=300, output=20), span("", 100, input=7), span("b", 101)]


def test_from_a_load_balancer_and_its_access_log_to_a_comparison(tmp_path):
    page = (ROOT / "docs" / "coming-from" / "envoy-or-nginx.md").read_text()
    (document,) = [block.text for block in blocks(page) if block.language == "yaml"]
    (tmp_path / "access.json").write_text(ACCESS_LOG)
    batch = {"resourceSpans": [{"scopeSpans": [{"spans": SPANS}]}]}
    (tmp_path / "spans.json").write_text(json.dumps(batch))
    with shell(tmp_path, PORTS) as user:
        (tmp_path / "trial.yaml").write_text(user.elsewhere(document))
        user.run([*ENGINE, "127.0.0.1:8001", *EVENTS])
        user.run([*ENGINE, "127.0.0.1:8002", "--events", "none"])
        for words in (words for block in blocks(page) if block.run for words in commands(block)):
            user.run(words, status=1 if words[1] == "doctor" else 0)
    doctor = json.loads((tmp_path / "doctor.json").read_text())
    found = {finding["finding"]: len(finding["engines"]) for finding in doctor["findings"]}
    assert found["no_events"] == 1
    trace = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert [(t["session"], t["input_tokens"], t["output_tokens"]) for t in trace] == [
        ("a", 1000, 10),
        ("at-1000.9", 200, 4),
        ("a", 2000, 10),
    ]
    report = json.loads((tmp_path / "perilune.json").read_text())
    assert [run["succeeded"] for run in report["runs"]] == [3]
    assert [json.loads(line) for line in (tmp_path / "spans.jsonl").read_text().splitlines()] == [
        {"session": "trace-100", "timestamp_s": 0, "input_tokens": 7, "output_tokens": 1},
        {"session": "a", "timestamp_s": 2, "input_tokens": 300, "output_tokens": 20},
    ]


@pytest.mark.heavy  # most of its commands are those of the other page
def test_from_a_router_with_a_list_of_urls_to_the_same_load_on_both(tmp_path):
    """The first engine stands for the router itself."""
    page = (ROOT / "docs" / "coming-from" / "vllm-or-sglang-router.md").read_text()
    for number in (1, 2):
        page = page.replace(f"10.0.0.{number}:8000", f"127.0.0.1:800{number}")
        page = page.replace(f"10.0.0.{number}:", "127.0.0.1:")
    page = page.replace("127.0.0.1:30000", "127.0.0.1:8001").replace("0.0.0.0:10000", "127.0.0.1:10000")
    page = page.replace("--limit 400", "--limit 4 --sessions 2 --time-scale 50")
    (document,) = [block.text for block in blocks(page) if block.language == "yaml"]
    with shell(tmp_path, PORTS) as user:
        (tmp_path / "trial.yaml").write_text(user.elsewhere(document))
        user.run([*ENGINE, "127.0.0.1:8001", *EVENTS])
        user.run([*ENGINE, "127.0.0.1:8002", "--events", "none"])
        for words in (words for block in blocks(page) if block.run for words in commands(block)):
            user.run(words, status=1 if words[1] == "doctor" else 0)
    for report in ("router", "perilune"):
        (run,) = json.loads((tmp_path / f"{report}.json").read_text())["runs"]
        assert run["succeeded"] == run["requests"] > 0
