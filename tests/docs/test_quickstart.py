"""The quickstart without a cluster, as it is written, on ports of its own."""

import json
import re

import pytest
from page_shell import shell
from pages import ROOT, blocks, commands

pytestmark = pytest.mark.processes

PORTS = ("8001", "8002", "5557", "5558", "5567", "5568", "9002", "9003", "10000")
POOL = "examples/local/pool.yaml"


def test_the_commands_lead_to_routed_and_explained_requests(tmp_path):
    page = (ROOT / "docs" / "quickstart.md").read_text()
    answers, request_id = [], ""
    with shell(tmp_path, PORTS) as user:
        (tmp_path / "pool.yaml").write_text(user.elsewhere((ROOT / POOL).read_text()))
        for words in (words for block in blocks(page) if block.run for words in commands(block)):
            said = user.run(words, {POOL: "pool.yaml", "REQUEST_ID": request_id})
            if said:
                answers.append(said)
            if told := re.search(r"request=([0-9a-f-]+)", said):
                request_id = told[1]
    first, second, listed, explained, health = answers
    assert "200 OK" in first
    assert re.search(r"x-perilune-decision: 127\.0\.0\.1:\d+; cold; request=", first)
    assert re.search(r"x-perilune-decision: 127\.0\.0\.1:\d+; host; request=", second)
    assert "2 of the last 2 decisions" in listed
    assert "because it is the session's host" in explained
    assert json.loads(health)["endpoints_ready"] == 2
