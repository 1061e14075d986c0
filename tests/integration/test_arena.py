"""The arena with real Envoys, our gateway and simulated engines, on a tiny load."""

import re

from ports import free_port

from perilune_lab.report import Run
from perilune_research.arena import cli


def test_envoy_alone_and_our_gateway_play_the_same_sessions(tmp_path, capsys, monkeypatch):
    seen: list[tuple[str, Run]] = []
    play = cli.play

    async def noted(cell, *more):
        seen.append((cell.contestant.name, await play(cell, *more)))
        return seen[-1][1]

    monkeypatch.setattr(cli, "play", noted)
    argv = (
        "--routers envoy-round-robin,perilune --loads ease --headers with --seeds 1 --seconds 5 --engines 2"
    )
    assert cli.main(argv.split()) == 0
    (robin, alone), (ours, routed) = seen
    assert (robin, ours) == ("envoy-round-robin", "perilune")
    assert alone.requests == routed.requests == alone.succeeded == routed.succeeded > 0
    out = capsys.readouterr().out
    assert re.search(rf"\| perilune \|.*\| 0 of {routed.requests} \| 1 \|", out)
    assert "| ease, with session header | E2E p90 s |" in out


def test_a_router_by_url_that_does_not_answer_is_left_out(capsys, monkeypatch):
    monkeypatch.setattr("perilune_research.arena.play.RUNS_S", 0.5)
    argv = [
        *("--routers", "envoy-round-robin", "--url", "dead=http://127.0.0.1:9"),
        *("--engine-port", str(free_port()), "--loads", "ease", "--headers", "with"),
        *("--seeds", "1", "--seconds", "2", "--engines", "1"),
    ]
    assert cli.main(argv) == 0
    left_out = "- Left out: dead: from cell 2 on: dead does not serve at http://127.0.0.1:9"
    assert left_out in capsys.readouterr().out


def test_a_router_by_url_is_started_afresh_before_its_cell_and_halfway(tmp_path, capsys):
    """Its command starts nothing here, as the router that is asked is the only engine itself."""
    port, log = free_port(), tmp_path / "restarts"
    argv = [
        *("--routers", "envoy-round-robin", "--url", f"mine=http://127.0.0.1:{port}"),
        *("--restart", f"mine=echo again >> {log}", "--engine-port", str(port)),
        *("--loads", "restart", "--headers", "with", "--seeds", "1", "--seconds", "4", "--engines", "1"),
    ]
    assert cli.main(argv) == 0
    assert log.read_text() == "again\nagain\n"
    assert "| restart, with session header | mine |" in capsys.readouterr().out


def test_a_router_whose_command_fails_is_left_out_with_its_words(capsys):
    argv = [
        *("--routers", "envoy-round-robin", "--url", "mine=http://127.0.0.1:9"),
        *("--restart", "mine=echo no such unit >&2; false", "--engine-port", str(free_port())),
        *("--loads", "ease", "--headers", "with", "--seeds", "1", "--seconds", "2", "--engines", "1"),
    ]
    assert cli.main(argv) == 0
    assert (
        "- Left out: mine: from cell 2 on: mine: `echo no such unit >&2; false` ended with 1: no such unit"
        in (capsys.readouterr().out)
    )
