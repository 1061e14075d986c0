"""The arena's routers as a table, what it plays, its result as a table, and its command line."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from perilune_api.pool import EndpointSpec, Engine, Metadata, Model, Pool, Spec, SpecError
from perilune_lab.load.result import Result
from perilune_lab.report import Quantiles, Run
from perilune_lab.traces.model import Session, Turn
from perilune_research.arena import aiperf_client, cli, dynamo_workers, install, kept, page, table
from perilune_research.arena.contestants import (
    CONTESTANTS,
    OURS,
    Package,
    Program,
    balanced,
    command,
    frontend,
    workers,
)
from perilune_research.arena.install import NotInstalledError, executable
from perilune_research.arena.kept import Row
from perilune_research.arena.loads import LEVELS, Client, Setting, engine_options, sessions, traffic
from perilune_research.arena.noise import Noise
from perilune_research.arena.play import FAILED_S, with_failures

BY_NAME = {contestant.name: contestant for contestant in CONTESTANTS}
BY_LEVEL = {level.name: level for level in LEVELS}
EASE = BY_LEVEL["ease"]
ENGINES = [
    EndpointSpec(address="127.0.0.1:1", events=("tcp://127.0.0.1:11",), replay=("tcp://127.0.0.1:21",)),
    EndpointSpec(address="127.0.0.1:2", events=("tcp://127.0.0.1:12",), replay=("tcp://127.0.0.1:22",)),
]
PROGRAMS = [contestant for contestant in CONTESTANTS if isinstance(contestant.front, Program)]


@pytest.mark.parametrize("contestant", PROGRAMS, ids=lambda contestant: contestant.name)
def test_a_program_knows_all_engines_and_listens_on_loopback_only(contestant):
    line = command(contestant.front, "router", ENGINES, "sim", 8000, 8001)
    at = line.index("--worker-urls")
    assert line[at + 1 : at + 3] == ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    assert dict(pairwise(line)).items() >= {"--host": "127.0.0.1", "--port": "8000"}.items()
    assert dict(pairwise(line))["--prometheus-port"] == "8001"


def test_the_router_that_reads_kv_events_is_told_where_they_are():
    line = command(BY_NAME["vllm-router-kv"].front, "router", ENGINES, "sim", 8000, 8001)
    assert "--kv-event-source=http://127.0.0.1:2=tcp://127.0.0.1:12" in line
    assert "--kv-event-replay-source=http://127.0.0.1:1=tcp://127.0.0.1:21" in line


def test_dynamo_has_a_worker_for_each_engine_and_waits_for_all_of_them():
    engine = Engine(block_size=32, kv_pool_tokens=6400)
    pool = Pool(Metadata("pool"), Spec(Model(name="sim"), engine=engine, endpoints=tuple(ENGINES)))
    _, script, given = workers("python", pool, "folder")
    assert Path(script).is_file()
    assert msgspec.json.decode(given)["engines"] == [
        {"url": "http://127.0.0.1:1", "events": "tcp://127.0.0.1:11"},
        {"url": "http://127.0.0.1:2", "events": "tcp://127.0.0.1:12"},
    ]
    options = dict(pairwise(frontend("python", pool, 8000)))
    wanted = {"--router-mode": "kv", "--router-min-initial-workers": "2", "--kv-cache-block-size": "32"}
    assert options.items() >= {**wanted, "--http-host": "127.0.0.1", "--http-port": "8000"}.items()


async def test_a_worker_passes_a_request_and_the_ids_of_its_answer_on():
    said = dynamo_workers.asked(
        {"token_ids": [1, 2], "stop_conditions": {"max_tokens": 3, "ignore_eos": True}}, "sim"
    )
    assert (said["prompt"], said["max_tokens"], said["ignore_eos"], said["stream"]) == ([1, 2], 3, True, True)
    lines = [
        b": a comment\n",
        b'data: {"choices": [{"token_ids": [7, 8], "finish_reason": null}]}\n',
        b'data: {"choices": [{"token_ids": [], "finish_reason": "length"}]}\n',
        b'data: {"choices": [], "usage": {"prompt_tokens": 2}}\n',
        b"data: [DONE]\n",
    ]
    assert [part async for part in dynamo_workers.answered(each(lines))] == [
        {"token_ids": [7, 8]},
        {"token_ids": [], "finish_reason": "length", "completion_usage": {"prompt_tokens": 2}},
    ]


def test_aiperf_is_given_what_is_new_in_each_turn_and_when():
    found = (s for s in sessions(Setting(engines=2, seconds=20.0), EASE, 1) if len(s.turns) > 1)
    session = next(found)
    (line,) = aiperf_client.lines([session], lambda key, tokens: f"{key}:{tokens}")
    first, second = line["turns"][:2]
    assert line["timestamp"] == first["timestamp"] == 1 + round(1000 * session.start_s)
    assert first["text"] == " ".join(f"{s.key}:{s.tokens}" for s in session.turns[0].prompt)
    new = session.turns[1].prompt[len(session.turns[0].prompt) + 1 :]
    assert second["text"] == " ".join(f"{s.key}:{s.tokens}" for s in new) != ""
    assert second["delay"] == round(1000 * session.turns[1].gap_s)
    assert second["output_length"] == session.turns[1].output_tokens


def test_aiperfs_records_become_results():
    about = {"conversation_id": "s", "x_request_id": "r"}
    metrics = {
        "time_to_first_token": {"value": 250.0, "unit": "ms"},
        "request_latency": {"value": 1500.0, "unit": "ms"},
        "usage_prompt_tokens": {"value": 40, "unit": "tokens"},
        "usage_prompt_cache_read_tokens": {"value": 32, "unit": "tokens"},
        "usage_completion_tokens": {"value": 7, "unit": "tokens"},
    }
    times = {"request_start_ns": 10**9, "request_end_ns": 3 * 10**9}
    good = {"metadata": about | times | {"turn_index": 0}, "metrics": metrics}
    times = {"request_start_ns": 2 * 10**9, "request_end_ns": 2 * 10**9}
    bad = {
        "metadata": about | times | {"turn_index": 1},
        "metrics": {},
        "error": {"code": 503, "type": "Service Unavailable", "message": "none is ready"},
    }
    records = [*map(msgspec.json.encode, (good, bad)), b""]
    turns = (Turn(session="s", number=number, prompt=(), output_tokens=1) for number in range(3))
    asked = [Session("s", 0.0, tuple(turns))]
    served, refused, unsent = aiperf_client.results(records, asked)
    assert (served.session, served.turn, served.succeeded) == ("s", 0, True)
    assert (served.ttft_s, served.e2e_s, served.finished_at_s) == (0.25, 1.5, 2.0)
    assert (served.prompt_tokens, served.cached_tokens, served.output_tokens) == (40, 32, 7)
    assert (refused.status, refused.error, refused.submitted_at_s) == (503, "none is ready", 1.0)
    assert (unsent.session, unsent.turn, unsent.succeeded) == ("s", 2, False)
    with pytest.raises(ValueError, match=r"no session has the turn \('s', 0\)"):
        aiperf_client.results(records, [])


def test_aiperf_plays_no_load_at_which_something_happens_halfway():
    options = cli.parse(["--client", "aiperf"])
    assert {level.name for level in options.levels} == {"ease", "knee", "beyond"}
    with pytest.raises(SpecError, match="aiperf plays none of these loads - at `--loads`"):
        cli.parse(["--client", "aiperf", "--loads", "restart"])


async def each(lines):
    for line in lines:
        yield line


def test_a_package_whose_dependencies_are_on_no_index_is_installed_with_others_instead(tmp_path, monkeypatch):
    package, calls = Package("router", "1.0", "python", instead=("first==1", "second")), []

    def installs(command, **_):
        calls.append([word for word in command if not word.startswith(("-", "/", ":"))])
        (tmp_path / "router-1.0" / "bin").mkdir(parents=True, exist_ok=True)
        (tmp_path / "router-1.0" / "bin" / "python").touch()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(install.subprocess, "run", installs)
    executable(package, tmp_path)
    assert calls[1:] == [["pip", "install", "router==1.0"], ["pip", "install", "first==1", "second"]]


def test_envoy_alone_balances_by_itself_and_asks_no_gateway():
    config = balanced(["127.0.0.1:1"], "LEAST_REQUEST", 8000)
    clusters = config["static_resources"]["clusters"]
    assert [(c["name"], c["lb_policy"]) for c in clusters] == [("endpoints", "LEAST_REQUEST")]
    assert b"ext_proc" not in msgspec.json.encode(config)


def test_engines_are_unequal_and_none_is_as_the_gateway_believes():
    each = [dict(pairwise(more)) for more in engine_options(Setting(engines=4, first_port=18000)).each]
    assert [more["--listen"] for more in each] == [f"127.0.0.1:{port}" for port in range(18000, 18004)]
    slowdowns = [float(more["--slowdown"]) for more in each]
    assert len(set(slowdowns)) == 4
    assert all(0.5 <= slowdown <= 2.0 and slowdown != 1.0 for slowdown in slowdowns)


def test_a_seed_gives_every_router_the_same_sessions_and_more_load_more_of_them():
    setting = Setting(engines=2, seconds=20.0)
    assert sessions(setting, EASE, 1) == sessions(setting, EASE, 1) != sessions(setting, EASE, 2)
    counts = [sum(len(s.turns) for s in sessions(setting, level, 1)) for level in LEVELS[:3]]
    assert counts == sorted(set(counts))


def test_a_recorded_load_is_another_part_of_the_recording_for_each_seed_with_what_prompts_share(tmp_path):
    lines = [
        {"timestamp": at_s * 1000, "input_length": 1024, "output_length": 9, "hash_ids": [0, at_s + 1]}
        for at_s in range(0, 1200, 10)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_bytes(msgspec.json.Encoder().encode_lines(lines))
    setting = Setting(engines=4, seconds=20.0, trace=path)
    first, second = (traffic(setting, BY_LEVEL["recorded"], seed) for seed in (0, 1))
    assert [s.turns[0].timestamp_s for s in first.sessions] == [0.0, 10.0, 20.0]
    assert [s.start_s for s in second.sessions] == [600.0, 610.0, 620.0]
    prompts = [s.turns[0].prompt for s in first.sessions]
    assert {prompt[0] for prompt in prompts} == {prompts[0][0]}
    assert [segment.tokens for segment in prompts[0]] == [128, 128]


def run(ttft_s: float, *, requests: int = 10, succeeded: int = 10) -> Run:
    times = Quantiles(ttft_s, ttft_s, ttft_s, ttft_s, ttft_s)
    return Run(
        policy="router",
        requests=requests,
        succeeded=succeeded,
        rejected=0,
        success_rate=1.0,
        apc=0.5,
        ttft_s=times,
        e2e_s=times,
    )


def row(router: str, ttft_s: float | None, **more: object) -> Row:
    fields = {
        "router": router,
        "version": "1",
        "load": "ease",
        "session_header": True,
        "seed": 0,
        "requests": 10,
        "succeeded": 10,
        "ttft_p50_s": ttft_s,
        "ttft_p90_s": ttft_s,
        "e2e_p90_s": ttft_s,
        "hit_ratio": None if ttft_s is None else 0.5,
        "engines": 8,
        "seconds": 20.0,
        "client": Client.LAB,
        "at": "2026-11-28 01:00:00",
        "took_s": 30.0,
        "python": "3.11.7",
        "cpus": 2,
        "load_average": 0.5,
        "others": 0.02,
    }
    return Row(**(fields | more))


def played(**ttfts_s: list[float]) -> list[Row]:
    names = {"ours": OURS, "robin": "envoy-round-robin", "smg": "smg"}
    return [
        row(names[router], ttft_s, seed=seed)
        for router, times in ttfts_s.items()
        for seed, ttft_s in enumerate(times)
    ]


def under(load: str, rows: list[Row]) -> list[Row]:
    return [msgspec.structs.replace(row, load=load) for row in rows]


def test_the_table_has_a_row_for_each_router_with_an_interval_over_seeds():
    rows = table.table(played(ours=[1.0, 2.0], robin=[3.0]))
    assert [row.count("|") for row in rows] == [9] * 4
    assert "| ease, with session header | perilune | 1.50 [1.00–2.00] |" in rows[2]
    assert "| envoy-round-robin | 3.00 |" in rows[3]


def test_requests_that_failed_are_counted_over_seeds():
    seeds = [row("smg", 1.0, succeeded=7, session_header=False), row("smg", 1.0, session_header=False)]
    rows = table.table(seeds)
    assert "| ease, without session header | smg |" in rows[2]
    assert rows[2].endswith("| 3 of 20 | 2 |")


def test_the_load_at_which_perilune_is_farthest_behind_comes_first():
    both = [*played(ours=[1.0], robin=[2.0]), *under("knee", played(ours=[2.0], robin=[1.0]))]
    assert [line.split(",")[0] for line in table.table(both)[2:]] == ["| knee", "| knee", "| ease", "| ease"]
    assert [line.split(",")[0] for line in table.compared(both)[2:]] == ["| knee"] * 2 + ["| ease"] * 2
    assert list(table.lost(both)) == [table.Group("knee", True)]


def test_a_request_that_failed_counts_with_the_worst_latency():
    def result(error: str) -> Result:
        times = {"submitted_at_s": 0.0, "finished_at_s": 1.0, "due_at_s": 0.0}
        return Result(session="s", turn=0, request_id="r", error=error, ttft_s=0.5, e2e_s=1.0, **times)

    counted = with_failures(run(0.5), [result("")] * 8 + [result("503")] * 2)
    assert (counted.ttft_s.p50, counted.ttft_s.p99, counted.e2e_s.p99) == (0.5, FAILED_S, FAILED_S)


def test_a_router_without_answers_has_no_times():
    assert "| – | – | – | – | 10 of 10 | 1 |" in table.table([row("smg", None, succeeded=0)])[2]


@pytest.mark.parametrize(
    ("ours", "smg", "said"),
    [
        pytest.param(
            [1.0, 1.1], [2.0, 2.1], "| 1.05 | 2.05 | smg | 0.51 [0.50–0.52] | 2 | ahead |", id="ahead"
        ),
        pytest.param(
            [2.0, 2.1], [1.0, 1.1], "| 2.05 | 1.05 | smg | 1.95 [1.91–2.00] | 2 | **behind** |", id="behind"
        ),
        pytest.param([1.0, 3.0], [2.0, 2.2], "| 2 | the seeds cannot tell |", id="overlap"),
        pytest.param([1.0], [2.0], "| 1.00 | 2.00 | smg | 0.50 | 1 | one seed |", id="one seed"),
        pytest.param([1.0, 9.0], [2.0], "| 1.00 | 2.00 | smg | 0.50 | 1 |", id="a seed that the other lacks"),
    ],
)
def test_perilune_is_compared_with_the_best_other_router_over_the_seeds_of_both(ours, smg, said):
    _, _, ttft, _ = table.compared(played(ours=ours, robin=[9.5, 90.0], smg=smg))
    assert ttft.startswith("| ease, with session header | TTFT p90 s |")
    assert said in ttft


def test_the_legend_names_versions():
    lines = table.legend(CONTESTANTS)
    assert "- sglang-router (sglang-router 0.3.2): cache_aware, its default and recommended policy." in lines


NOTES = page.Notes(
    lost=(page.Reason("ease", True, "It gathers sessions.", "Nothing, because they are few."),),
    by_url={"llm-d": "with three scorers"},
)


def test_the_section_says_why_a_load_is_lost_and_which_are_missing():
    said = page.section([*played(ours=[2.0], robin=[1.0]), row("llm-d", 3.0)], NOTES)
    assert (
        "- Behind: **ease, with session header**, in TTFT p90 and E2E p90 (one seed): It gathers sessions."
        " Changed: Nothing, because they are few."
    ) in said
    assert "Not played yet: knee, with session header; " in said
    assert "- llm-d, by URL: with three scorers." in said
    assert "3 cells of 20 s, 8 engines, client lab, played 2026-11-28 · 2 CPUs, Python 3.11.7" in said
    assert page.NO_REASON in page.section(played(ours=[2.0], robin=[1.0]), page.Notes())
    assert page.section([], NOTES) == "No cell has been played yet."


def test_a_load_is_behind_only_by_more_than_the_seeds_differ():
    tie = played(ours=[1.0, 3.0], smg=[1.9, 2.0])
    (ttft, *_) = table.comparisons(tie)
    assert ttft.ratio.mean > 1
    assert "the seeds cannot tell" in page.section(tie, NOTES)
    assert "Behind" not in page.section(tie, NOTES)
    assert "in TTFT p90 and E2E p90: It" in page.section(played(ours=[2.0, 2.1], smg=[1.0, 1.1]), NOTES)


@pytest.mark.parametrize("newer", [{"version": "2"}, {"rig": "2"}])
def test_cells_of_older_code_are_marked(newer):
    rows = [row(OURS, 1.0), row(OURS, 1.0, seed=1, at="2026-11-29 01:00:00", **newer)]
    said = page.section(rows, NOTES)
    assert f"| ease, with session header | perilune {table.STALE} |" in said
    assert "1 of these cells are by older code" in said
    assert table.STALE not in page.section(rows[1:], NOTES)


def test_cells_of_different_rigs_are_not_compared():
    *both, last = played(ours=[1.0, 1.0], smg=[2.0, 2.0])
    compared = table.comparisons([*both, msgspec.structs.replace(last, rig="2")])
    assert [one.seeds for one in compared] == [1, 1]


def test_the_section_says_what_restarts_where_a_router_was_restarted():
    assert page.RESTARTED in page.section(under("restart", played(ours=[1.0])), NOTES)
    assert page.RESTARTED not in page.section(played(ours=[1.0]), NOTES)


def test_cells_that_aiperf_has_played_have_a_table_of_their_own():
    rows = [msgspec.structs.replace(one, client=Client.AIPERF) for one in played(ours=[1.0], smg=[2.0])]
    said = page.section(played(ours=[3.0], robin=[4.0]), NOTES, rows)
    first, second = said.split("**Sent and measured by NVIDIA's AIPerf 0.13.0.**")
    assert "| 3.00 | 4.00 | envoy-round-robin | 0.75 |" in first
    assert "client aiperf" in second
    assert "| 1.00 | 2.00 | smg | 0.50 |" in second
    assert "Not played yet" not in second
    assert "- smg (smg 1.13.0): " in second
    assert page.section([], NOTES, rows).startswith("**Sent and measured")


def test_the_section_names_routers_whose_noise_cannot_be_told():
    rows = [row("llm-d", 1.0, others=None), row(OURS, 1.0)]
    assert "of the CPUs at most, which cannot be told for llm-d\n" in page.section(rows, NOTES)


def test_the_section_replaces_what_stands_between_its_marks(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("# Page\n\n<!-- arena -->\nold\n<!-- /arena -->\n\nmore\n")
    page.write(path, "new")
    assert path.read_text() == "# Page\n\n<!-- arena -->\nnew\n<!-- /arena -->\n\nmore\n"
    path.write_text("# Page\n")
    with pytest.raises(SpecError, match=r"has no place for the arena, .* - at `--page`"):
        page.write(path, "new")


def test_a_file_has_a_row_a_line_and_is_read_again(tmp_path):
    path, rows = tmp_path / "arena.json", played(ours=[1.0, 2.0], smg=[3.0])
    kept.write(path, rows)
    assert len(path.read_text().splitlines()) == len(rows) + 2
    assert all(len(line) < 500 for line in path.read_text().splitlines())
    assert kept.read(path) == rows
    assert [file.name for file in tmp_path.iterdir()] == ["arena.json"]


def test_rows_of_a_file_that_tells_no_rig_are_read(tmp_path):
    path = tmp_path / "arena.json"
    old = msgspec.to_builtins(row("smg", 1.0))
    del old["rig"]
    path.write_bytes(msgspec.json.encode([old]))
    assert kept.read(path) == [row("smg", 1.0)]


def test_the_rig_is_the_code_of_engines_loads_and_client_and_not_that_of_routers():
    by_lab, by_aiperf = (kept.rig_sources(client) for client in (Client.LAB, Client.AIPERF))
    assert by_lab.keys() >= {
        "perilune_gateway.model.engine_model",
        "perilune_lab.demo.load",
        "perilune_lab.engine.scheduler",
        "perilune_lab.load.client",
        "perilune_research.arena.dynamo_workers",
        "perilune_research.arena.loads",
    }
    assert not by_lab.keys() & {
        "perilune_api.pool",
        "perilune_gateway.model",
        "perilune_lab.simulate.gateway",
    }
    assert "perilune_research.arena.contestants" not in by_lab
    assert by_aiperf.keys() - by_lab.keys() == {"perilune_research.arena.aiperf_client"}
    assert kept.rig(Client.LAB) != kept.rig(Client.AIPERF)


def test_the_fingerprint_of_our_code_does_not_hear_of_words(tmp_path, monkeypatch):
    def fingerprint(text: str) -> str:
        (tmp_path / "module.py").write_text(text)
        kept.ours.cache_clear()
        return kept.ours()

    monkeypatch.setattr(kept.perilune_gateway, "__path__", [str(tmp_path)])
    first = fingerprint('"""Adds."""\n\ndef add(a):\n    return a + 1\n')
    assert (
        fingerprint('"""Adds one."""\n\n\ndef add(a):  # to a\n    """Text."""\n    return (a + 1)\n')
        == first
    )
    assert fingerprint('"""Adds."""\n\ndef add(a):\n    return a + 2\n') != first
    kept.ours.cache_clear()


def test_what_this_process_and_its_ended_children_use_is_no_noise(monkeypatch):
    """Time is told by hand: the machine worked 3 s in 10 s on its CPUs, 2 s of them for us."""
    seconds, machine, own = iter([0.0, 10.0]), iter([100.0, 103.0]), iter([5.0, 7.0])
    monkeypatch.setattr("perilune_research.arena.noise.monotonic", lambda: next(seconds))
    monkeypatch.setattr("perilune_research.arena.noise._all_s", lambda: next(machine))
    monkeypatch.setattr("perilune_research.arena.noise._own_s", lambda: next(own))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    noise = Noise().end()
    assert (noise.others, noise.is_noisy) == (pytest.approx(0.05), False)


def test_a_router_that_the_user_runs_makes_noise_that_cannot_be_told_from_others():
    noise = Noise().end(tells=False)
    assert (noise.others, noise.is_noisy) == (None, False)


def test_a_package_that_pip_cannot_find_is_refused_with_its_words(tmp_path, monkeypatch):
    def refuses(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "looking\nERROR: No matching distribution\n")

    monkeypatch.setattr(install.subprocess, "run", refuses)
    with pytest.raises(NotInstalledError, match=r"^ERROR: No matching distribution$"):
        executable(Package("no-such-router", "1.0", "router"), tmp_path)


def test_an_installed_package_is_found_again_and_an_interrupted_one_is_not_trusted(tmp_path, monkeypatch):
    package, calls = Package("router", "1.0", "router"), []
    program = tmp_path / "router-1.0" / "bin" / "router"

    def installs(command, **_):
        calls.append(command)
        program.parent.mkdir(parents=True, exist_ok=True)
        program.touch()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(install.subprocess, "run", installs)
    (tmp_path / "router-1.0").mkdir()  # of an installation that was interrupted
    assert executable(package, tmp_path) == program
    assert [call[0] for call in calls] == [sys.executable, str(program.with_name("python"))]
    assert executable(package, tmp_path) == program
    assert len(calls) == 2


def test_without_arguments_every_router_plays_every_load_with_and_without_session_headers():
    options = cli.parse([])
    assert options.contestants == CONTESTANTS
    generated = [level for level in LEVELS if not level.recorded]
    assert len(list(options.cells())) == len(CONTESTANTS) * len(generated) * 2 * options.seeds


def test_a_call_without_a_recording_says_how_to_add_the_recorded_load(seeds_played, capsys):
    assert cli.main(["--routers", OURS, "--headers", "with", "--seeds", "1"]) == 0
    said = capsys.readouterr()
    assert "recorded is left out: add --trace FILE" in said.err
    assert "- Left out: recorded: add --trace FILE" in said.out
    cli.main([*ONE_LOAD, "--seeds", "1"])
    assert "recorded" not in capsys.readouterr().err


def test_one_seed_of_every_load_with_headers_comes_first_and_loads_without_headers_last():
    cells = list(cli.parse(["--seeds", "2", "--loads", "ease,knee", "--routers", "smg,perilune"]).cells())
    assert [(cell.named, cell.seed, cell.level.name, cell.contestant.name) for cell in cells[:5]] == [
        (True, 0, "ease", "smg"),
        (True, 0, "ease", OURS),
        (True, 0, "knee", "smg"),
        (True, 0, "knee", OURS),
        (True, 1, "ease", "smg"),
    ]
    assert [cell.named for cell in cells] == [True] * 8 + [False] * 8


def test_a_router_of_the_users_own_plays_every_load_except_its_restart():
    argv = ["--routers", OURS, "--url", "mine=http://127.0.0.1:8080", "--engine-port", "18000"]
    cells = list(cli.parse(argv).cells())
    loads = {name: {c.level.name for c in cells if c.contestant.name == name} for name in (OURS, "mine")}
    assert loads[OURS] - loads["mine"] == {"restart"}
    again = cli.parse([*argv, "--restart", "mine=./again --at 1,2"])
    assert again.contestants[-1].front.restart == "./again --at 1,2"
    assert {c.level.name for c in again.cells() if c.contestant.name == "mine"} == loads[OURS]


@pytest.fixture
def seeds_played(monkeypatch) -> list[int]:
    """Seeds of the cells that were played, each with the same result."""
    seen = []

    async def plays(cell, *_):
        seen.append(cell.seed)
        return run(1.0)

    monkeypatch.setattr(cli, "play", plays)
    return seen


ONE_LOAD = ("--routers", "perilune", "--loads", "ease", "--headers", "with")


def test_cells_that_the_file_has_are_kept_and_the_others_are_played(tmp_path, seeds_played, capsys):
    path = tmp_path / "arena.json"
    argv = [*ONE_LOAD, "--json", str(path), "--seeds"]
    assert [cli.main([*argv, "2"]), cli.main([*argv, "3"])] == [0, 0]
    assert seeds_played == [0, 1, 2]
    assert "| 0 of 30 | 3 |" in capsys.readouterr().out
    with pytest.raises(
        SpecError, match="8 engines, 20 seconds and the client lab: name another file - at `--json`"
    ):
        kept.read(path, cli.parse([*argv, "3", "--seconds", "30"]).setting)
    path.write_text("{}")
    with pytest.raises(SpecError, match="no file of the arena"):
        kept.read(path)


def test_cells_that_another_version_has_played_are_played_again_in_their_place(tmp_path, seeds_played):
    path = tmp_path / "arena.json"
    argv = [*ONE_LOAD, "--json", str(path), "--seeds", "3"]
    cli.main(argv)
    first, second, third = kept.read(path)
    assert (first.version, first.rig) == (kept.ours(), kept.rig(Client.LAB))
    older = [msgspec.structs.replace(first, version="older"), msgspec.structs.replace(second, rig="older")]
    kept.write(path, [*older, third])
    cli.main(argv)
    assert seeds_played == [0, 1, 2, 0, 1]
    again = [(row.seed, row.version, row.rig) for row in kept.read(path)]
    assert again == [(seed, kept.ours(), kept.rig(Client.LAB)) for seed in range(3)]


def test_cells_that_aiperf_plays_are_kept_beside_the_others(tmp_path, seeds_played, monkeypatch, capsys):
    monkeypatch.setattr(cli, "executable", lambda *_: Path("aiperf"))
    path = tmp_path / "arena.json"
    argv = [*ONE_LOAD, "--seeds", "1", "--json", str(path)]
    cli.main(argv)
    cli.main([*argv, "--client", "aiperf"])
    assert seeds_played == [0, 0]
    assert {one.client for one in kept.read(path)} == {Client.LAB}
    assert {one.client for one in kept.read(tmp_path / "arena-aiperf.json")} == {Client.AIPERF}
    out = capsys.readouterr().out
    assert "client lab" in out
    assert "client aiperf" in out


def test_tables_go_into_the_page(tmp_path, seeds_played, capsys):
    path = tmp_path / "page.md"
    path.write_text("<!-- arena -->\n<!-- /arena -->\n")
    assert cli.main([*ONE_LOAD, "--page", str(path), "--seeds", "1"]) == 0
    assert "| ease, with session header | perilune |" in path.read_text()
    assert capsys.readouterr().out == ""


def test_a_quiet_machine_is_waited_for_and_what_another_program_spoilt_is_not_kept(
    tmp_path, seeds_played, monkeypatch, capsys
):
    class Told(Noise):
        def end(self, *, tells: bool = True) -> Noise:
            super().end(tells=tells)
            self.others = next(shares)
            return self

    async def sampled() -> Noise:
        return Told().end()

    shares = iter([0.9, 0.01, 0.5, 0.01, 0.02])  # before the first cell twice, during it, before and during
    monkeypatch.setattr(cli, "Noise", Told)
    monkeypatch.setattr(cli, "sample", sampled)
    monkeypatch.setattr(cli, "_LOOK_EVERY_S", 0.0)
    path = tmp_path / "arena.json"
    assert cli.main([*ONE_LOAD, "--json", str(path), "--quiet", "--seeds", "2"]) == 0
    assert [(row.seed, row.others) for row in kept.read(path)] == [(1, 0.02)]
    said = capsys.readouterr().err
    assert "waiting for a quiet machine: other programs used 90% of the CPUs" in said
    assert "other programs used 50% of the CPUs: not kept" in said
    assert "1 cells were not kept: the same command plays them again" in said


def test_time_ends_before_a_cell_that_would_end_later_and_the_same_command_goes_on(capsys):
    argv = "--routers perilune --loads ease --headers with --seeds 1 --minutes 0.5"
    assert cli.main(argv.split()) == cli.NOTHING_PLAYED
    assert "1 cells remain: the same command plays them" in capsys.readouterr().err


def test_a_router_by_url_takes_part_under_its_name():
    options = cli.parse(
        ["--routers", OURS, "--url", "mine=http://127.0.0.1:8080/v1", "--engine-port", "18000"]
    )
    ours, mine = options.contestants
    assert (ours.name, mine.name, mine.front.url) == (OURS, "mine", "http://127.0.0.1:8080")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--routers", "nginx"], "unknown 'nginx' .*perilune.* - at `--routers`"),
        (["--loads", "recorded"], "add --trace FILE - at `--loads`"),
        (["--loads", "heavy"], "unknown 'heavy' .*knee.* - at `--loads`"),
        (["--headers", "maybe"], "unknown 'maybe' .*without.* - at `--headers`"),
        (["--url", "http://127.0.0.1:80"], "is not NAME=VALUE - at `--url`"),
        (["--url", "mine=127.0.0.1:80"], "must begin with http:// .* - at `--url`"),
        (["--url", "mine=http://127.0.0.1:80"], "add --engine-port - at `--url`"),
        (["--url", "smg=http://127.0.0.1:80", "--engine-port", "1"], "another router - at `--url`"),
        (["--engines", "65"], "at most 64 - at `--engines`"),
        (
            ["--restart", "mine=./again"],
            "'mine' is not NAME=COMMAND with the name of a --url - at `--restart`",
        ),
    ],
)
def test_a_wrong_call_names_option_and_cure(argv, said):
    with pytest.raises(SpecError, match=said):
        cli.parse(argv)


def test_a_router_that_cannot_be_installed_is_left_out_and_the_others_play(monkeypatch, capsys):
    def refused(package, _):
        raise NotInstalledError("no wheel for this machine")

    async def plays(cell, *_):
        return run(1.0)

    monkeypatch.setattr(cli, "executable", refused)
    monkeypatch.setattr(cli, "play", plays)
    assert (
        cli.main(["--routers", "smg,perilune", "--loads", "ease", "--headers", "with", "--seeds", "1"]) == 0
    )
    out = capsys.readouterr().out
    assert "| ease, with session header | perilune |" in out
    assert "- Left out: smg: smg 1.13.0 cannot be installed: no wheel for this machine" in out


def test_help_names_every_router_with_its_settings(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert all(f"- {c.name}" in out and c.settings in out for c in CONTESTANTS)
    assert "recorded (--trace; at 8 engines 3 times as fast, texts 1/4 as long)" in out
