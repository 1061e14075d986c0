"""The arena's routers as a table, what it plays, its result as a table, and its command line."""

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from perilune_api.pool import EndpointSpec, Engine, Metadata, Model, Pool, Spec, SpecError
from perilune_lab.load.result import Result
from perilune_lab.report import Quantiles, Run
from perilune_research.arena import aiperf_client, cli, dynamo_workers, install, table
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
from perilune_research.arena.loads import LEVELS, Setting, engine_options, sessions, traffic
from perilune_research.arena.play import FAILED_S, Cell, with_failures

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
    about = {"conversation_id": "s", "turn_index": 1, "x_request_id": "r"}
    metrics = {
        "time_to_first_token": {"value": 250.0, "unit": "ms"},
        "request_latency": {"value": 1500.0, "unit": "ms"},
        "usage_prompt_tokens": {"value": 40, "unit": "tokens"},
        "usage_prompt_cache_read_tokens": {"value": 32, "unit": "tokens"},
        "usage_completion_tokens": {"value": 7, "unit": "tokens"},
    }
    good = {"metadata": about | {"request_start_ns": 10**9, "request_end_ns": 3 * 10**9}, "metrics": metrics}
    bad = {
        "metadata": about | {"request_start_ns": 2 * 10**9, "request_end_ns": 2 * 10**9},
        "metrics": {},
        "error": {"code": 503, "type": "Service Unavailable", "message": "none is ready"},
    }
    served, refused = aiperf_client.results([*map(msgspec.json.encode, (good, bad)), b""])
    assert (served.session, served.turn, served.succeeded) == ("s", 1, True)
    assert (served.ttft_s, served.e2e_s, served.finished_at_s) == (0.25, 1.5, 2.0)
    assert (served.prompt_tokens, served.cached_tokens, served.output_tokens) == (40, 32, 7)
    assert (refused.status, refused.error, refused.submitted_at_s) == (503, "none is ready", 1.0)


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


def played(**ttfts_s: list[float]) -> list[tuple[Cell, Run]]:
    names = {"ours": OURS, "robin": "envoy-round-robin", "smg": "smg"}
    return [
        (Cell(BY_NAME[names[router]], EASE, True, seed), run(ttft_s))
        for router, times in ttfts_s.items()
        for seed, ttft_s in enumerate(times)
    ]


def test_the_table_has_a_row_for_each_router_with_an_interval_over_seeds():
    rows = table.table(played(ours=[1.0, 2.0], robin=[3.0]))
    assert [row.count("|") for row in rows] == [9] * 4
    assert "| ease, with session header | perilune | 1.50 [1.00–2.00] |" in rows[2]
    assert "| envoy-round-robin | 3.00 |" in rows[3]


def test_requests_that_failed_are_counted_over_seeds():
    cell = Cell(BY_NAME["smg"], EASE, False, 0)
    rows = table.table([(cell, run(1.0, succeeded=7)), (cell, run(1.0))])
    assert "| ease, without session header | smg |" in rows[2]
    assert rows[2].endswith("| 3 of 20 | 2 |")


def test_the_load_at_which_perilune_is_farthest_behind_comes_first():
    knee = [(replace(cell, level=BY_LEVEL["knee"]), ran) for cell, ran in played(ours=[2.0], robin=[1.0])]
    both = [*played(ours=[1.0], robin=[2.0]), *knee]
    assert [line.split(",")[0] for line in table.table(both)[2:]] == ["| knee", "| knee", "| ease", "| ease"]
    assert ["behind" in line for line in table.verdicts(both)] == [True, True, False, False]


def test_a_request_that_failed_counts_with_the_worst_latency():
    def result(error: str) -> Result:
        times = {"submitted_at_s": 0.0, "finished_at_s": 1.0, "due_at_s": 0.0}
        return Result(session="s", turn=0, request_id="r", error=error, ttft_s=0.5, e2e_s=1.0, **times)

    counted = with_failures(run(0.5), [result("")] * 8 + [result("503")] * 2)
    assert (counted.ttft_s.p50, counted.ttft_s.p99, counted.e2e_s.p99) == (0.5, FAILED_S, FAILED_S)


def test_a_router_without_answers_has_no_times():
    nothing = Run(policy="smg", requests=5, succeeded=0, rejected=0, success_rate=0.0)
    assert (
        "| – | – | – | – | 5 of 5 | 1 |" in table.table([(Cell(BY_NAME["smg"], EASE, True, 0), nothing)])[2]
    )


@pytest.mark.parametrize(
    ("ours", "smg", "said"),
    [
        pytest.param(
            [1.0, 1.1], [2.0, 2.1], "49% ahead of the best other router (smg) in TTFT p90.", id="ahead"
        ),
        pytest.param(
            [2.0, 2.1], [1.0, 1.1], "95% behind the best other router (smg) in TTFT p90.", id="behind"
        ),
        pytest.param([1.0, 3.0], [2.0, 2.2], "within what the seeds can tell.", id="overlap"),
        pytest.param([1.0], [2.0], "within what the seeds can tell.", id="one seed"),
    ],
)
def test_verdicts_say_who_is_ahead_of_the_best_other_router(ours, smg, said):
    ttft, _ = table.verdicts(played(ours=ours, robin=[9.0, 9.1], smg=smg))
    assert ttft.endswith(said)


def test_the_legend_names_versions_and_who_was_left_out():
    lines = table.legend(CONTESTANTS, {"smg": "no such package"})
    assert "- sglang-router (sglang-router 0.3.2): cache_aware, its default and recommended policy." in lines
    assert lines[-1] == "- Left out: smg: no such package"


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


def test_a_router_of_the_users_own_plays_every_load_except_its_restart():
    argv = ["--routers", OURS, "--url", "mine=http://127.0.0.1:8080", "--engine-port", "18000"]
    cells = list(cli.parse(argv).cells())
    loads = {name: {c.level.name for c in cells if c.contestant.name == name} for name in (OURS, "mine")}
    assert loads[OURS] - loads["mine"] == {"restart"}


def test_cells_that_the_file_has_are_kept_and_the_others_are_played(tmp_path, monkeypatch, capsys):
    seen = []

    async def plays(cell, *_):
        seen.append(cell.seed)
        return run(1.0)

    monkeypatch.setattr(cli, "play", plays)
    path = tmp_path / "arena.json"
    argv = [
        *("--routers", "perilune", "--loads", "ease", "--headers", "with"),
        "--json",
        str(path),
        "--seeds",
    ]
    assert [cli.main([*argv, "2"]), cli.main([*argv, "3"])] == [0, 0]
    assert seen == [0, 1, 2]
    assert "| 0 of 30 | 3 |" in capsys.readouterr().out
    with pytest.raises(
        SpecError, match="8 engines, 30 seconds and the client lab: name another file - at `--json`"
    ):
        cli.kept(cli.parse([*argv, "3", "--seconds", "20"]))
    path.write_text("{}")
    with pytest.raises(SpecError, match="no file of the arena"):
        cli.kept(cli.parse([*argv, "3"]))


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
