"""The documents: links lead somewhere, commands and their options exist, YAML is what the programs take."""

import contextlib
import importlib
import importlib.util
import io
import json
import re
import shlex
import subprocess
import sys
from functools import cache
from itertools import takewhile
from pathlib import Path

import fast_yaml
import msgspec
import pytest
from pages import NAMES, ROOT, Block, anchors, blocks, commands, inline_code, links
from waiting import HANG

from perilune_api import pool
from perilune_api.inference_pool import arguments, checks
from perilune_lab.cli import PROGRAM

MAINS = {
    "perilune-gateway": "perilune_gateway.main",
    "perilune-operator": "perilune_operator.main",
    "perilune-extension-server": "perilune_operator.extension_server.main",
}
OTHERS = {
    "curl",
    "docker",
    "git",
    "cd",
    "export",
    "jq",
    "unshare",
    "ip",
    "kind",
    "gzip",
    "tail",
    "cat",
    "grep",
    "pip",
}
"""Programs that are not ours and whose options nobody checks here."""
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
VALUES = fast_yaml.load((ROOT / "charts" / "perilune" / "values.yaml").read_text())


def read(name: str) -> str:
    return (ROOT / name).read_text()


def shell_blocks(name: str) -> list[Block]:
    return [block for block in blocks(read(name)) if block.language in ("sh", "bash", "console")]


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_files_and_headings(name):
    wrong = []
    for target in links(read(name)):
        if re.match(r"[a-z]+:", target):
            continue  # another host's
        file, _, anchor = target.partition("#")
        path = (ROOT / name).parent / file if file else ROOT / name
        if not path.exists() or (anchor and anchor not in anchors(path.read_text())):
            wrong.append(target)
    assert wrong == []


@pytest.mark.parametrize("name", NAMES)
def test_commands_of_the_documents_exist(name):
    wrong = [
        (" ".join(command)[:80], error)
        for block in shell_blocks(name)
        for command in commands(block)
        if (error := problem(command))
    ]
    assert wrong == []


@pytest.mark.parametrize("name", NAMES)
def test_commands_in_sentences_exist(name):
    spans = [split(code) for code in inline_code(read(name))]
    ours = [words for words in spans if program(words[0]) in {"perilune", "make", *MAINS} and len(words) > 1]
    assert [(" ".join(words), error) for words in ours if (error := problem(words))] == []


def split(code: str) -> list[str]:
    """Words; also of code that is no command and has a quote alone."""
    try:
        return shlex.split(code) or [""]
    except ValueError:
        return code.split()


def program(word: str) -> str:
    return word.removeprefix(".venv/bin/")


def problem(words: list[str]) -> str:
    """Return what is wrong with a command; empty if nothing can be found without running it."""
    name, rest = program(words[0]), words[1:]
    if missing := [w for w in rest if re.match(r"(examples|charts|docs|e2e|tests)/", w) and not exists(w)]:
        return f"no such file: {missing}"
    if name == "make":
        named = [w for w in rest if not re.match(r"[A-Z]+=|[A-Z]+$|-", w)]
        return ", ".join(f"no target {target}" for target in named if target not in TARGETS)
    if name == "perilune":
        if not rest or rest[0].startswith("-") or rest[0] in ("COMMAND", "…"):
            return ""
        if rest[0] not in PROGRAM.commands:
            return f"no command {rest[0]}"
        return unknown_options(rest[1:], help_of(PROGRAM.commands[rest[0]].module))
    if name in MAINS:
        return unknown_options(rest, help_of(MAINS[name]))
    if name in ("python", "python3"):
        return "" if rest[:1] != ["-m"] or found(rest[1]) else f"no module {rest[1]}"
    if name == "vllm":
        return vllm(rest)
    if name == "helm":
        return ", ".join(f"no value {key}" for key in set_values(rest) if not has_value(key))
    if name == "kubectl" or name in OTHERS:
        return ""
    if words[0].startswith(".venv/bin/"):
        return "" if Path(sys.executable).with_name(name).exists() else f"no program {name} in .venv"
    return "" if exists(words[0]) and "/" in words[0] else f"unknown program {name}"


def exists(word: str) -> bool:
    return (ROOT / word.partition("::")[0]).exists()


def found(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def options(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)]


def unknown_options(words: list[str], text: str) -> str:
    words = list(takewhile(lambda word: word not in (">", "&"), words))
    known = set(re.findall(r"--[a-z][a-z-]*", text)) | {"--help"}
    return ", ".join(f"no option {option}" for option in options(words) if option not in known)


@cache
def help_of(module: str) -> str:
    """Return what `--help` prints, also for sub-commands."""
    main = importlib.import_module(module).main
    text = printed(main, ["--help"])
    listed = re.search(r"^  \{([a-z,-]+)\}", text, re.MULTILINE)
    return text + "".join(
        printed(main, [name, "--help"]) for name in (listed[1].split(",") if listed else [])
    )


def printed(main, argv: list[str]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(argv)
    return out.getvalue()


def vllm(words: list[str]) -> str:
    """Return the options that the operator gives its engines; the events' configuration is JSON."""
    if "--kv-events-config" in words:
        events = json.loads(words[words.index("--kv-events-config") + 1])
        assert set(events) <= {"enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint", "topic"}
    return ", ".join(f"no option {o}" for o in options(words) if o not in arguments.VLLM_ARGS)


def set_values(words: list[str]) -> list[str]:
    """Keys of `--set A=…,B=…`, of our chart."""
    if not any(word.startswith("charts/perilune") for word in words):
        return []
    given = [words[i + 1] for i, word in enumerate(words) if word in ("--set", "--set-string")]
    return [pair.partition("=")[0] for pairs in given for pair in pairs.split(",")]


def has_value(key: str) -> bool:
    at = VALUES
    for part in key.split("."):
        if not isinstance(at, dict) or part not in at:
            return False
        at = at[part]
    return True


@pytest.mark.parametrize("name", NAMES)
def test_yaml_parses_and_pools_are_valid(name):
    for block in blocks(read(name)):
        if block.language in ("yaml", "yml"):
            for document in fast_yaml.load_all(block.text):
                check_pool(document)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_examples_are_valid(path):
    for document in fast_yaml.load_all(path.read_text()):
        check_pool(document)


def check_pool(document: object) -> None:
    """Check a document: a pool document lists endpoints, an InferencePool never does; anything else is not
    ours."""
    if not isinstance(document, dict) or document.get("kind") != "InferencePool":
        return
    if document.get("apiVersion") == "inference.networking.k8s.io/v1":
        return
    if "endpoints" in document["spec"]:
        pool.parse(msgspec.yaml.encode(document))
    else:
        checks.convert(document["spec"])


def test_the_readme_shows_the_smallest_pool():
    shown = next(block for block in blocks(read("README.md")) if block.language == "yaml")
    assert fast_yaml.load(shown.text) == fast_yaml.load(read("examples/smallest.yaml"))


def test_the_readme_is_short():
    assert len(read("README.md").splitlines()) <= 150


def test_every_value_of_the_chart_is_documented():
    page = read("charts/perilune/README.md")
    assert [key for key in VALUES if f"`{key}" not in page] == []


def test_every_kind_of_page_is_reached_from_the_index():
    index = set(links(read("docs/index.md")))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").glob("*.md")}
    assert pages - index - {"index.md"} == set()


def test_the_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG)
    assert (done.returncode, done.stderr) == (0, "")
    loaded = [
        target
        for page in Path(tmp_path).rglob("*.html")
        for tag in re.findall(r"<(?:script|img|link)\b[^>]*>", page.read_text())
        for target in re.findall(r'(?:src|href)="(https?://[^"]+)"', tag)
    ]
    assert loaded == []
