"""A page of `coming-from` as it is written, on ports of its own, with simulated engines."""

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


def test_from_a_load_balancer_and_its_access_log_to_a_comparison(tmp_path):
    page = (ROOT / "docs" / "coming-from" / "envoy-or-nginx.md").read_text()
    (document,) = [block.text for block in blocks(page) if block.language == "yaml"]
    (tmp_path / "access.json").write_text(ACCESS_LOG)
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
