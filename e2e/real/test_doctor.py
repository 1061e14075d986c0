"""`perilune doctor` on genuine engines that their owner started with wrong flags: the right rows and cures;
and when the cures' own flags are followed, nothing is left, and every prediction is exact."""

import asyncio
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec import structs

from enginebed import conversations, judged
from enginebed.marks import SHORT
from perilune_api.findings import EVENTS_FLAG
from perilune_api.pool import dump

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800), pytest.mark.asyncio(loop_scope="session")]
BLOCK, TURNS, ARGS = 64, 20 if SHORT else 36, ["--num-gpu-blocks-override=400"]
OPERATORS = ("--middleware", "--kv-events-config", "--block-size", "--enable-request-id-headers")
"""Options that the operator gives its own engines, and their owner did not give his."""
EVENTS = shlex.split(EVENTS_FLAG)


class Owner:
    """Starts engines by a command of his own."""

    def __init__(self, rig, rendered):
        self.rig = rig
        usual = [word for word in rendered.engine.command if word.partition("=")[0] not in OPERATORS]
        self.rendered = replace(rendered, engine=replace(rendered.engine, command=tuple(usual)))
        self.engines, self.flags = [], []

    async def start(self, *flags):
        """Start one more engine, without waiting for it."""
        self.engines.append(await self._started(len(self.engines), flags))
        self.flags.append(list(flags))

    async def _started(self, number, flags):
        made = (*self.rendered.engine.command, *flags)
        of = replace(self.rendered, engine=replace(self.rendered.engine, command=made))
        return await self.rig.engine(of, number)

    async def follow(self, report):
        """Start the engines of all findings again, with what the cures say."""
        told = {}
        for finding in report["findings"]:
            for url in finding["engines"] if not finding["exact"] else ():
                told.setdefault(url, []).append(finding["cure"])
        for number, engine in enumerate(self.engines):
            if engine.url in told:
                flags = self.flags[number]
                for cure in told[engine.url]:
                    flags = followed(flags, cure)
                self.flags[number] = flags
                engine.kill()
                await engine.ended(60)
                self.engines[number] = await self._started(number, flags)
        await self.rig.ready(*self.engines)


def followed(flags, cure):
    """Return an engine's flags with the one that a cure names, and its value; without it where the cure
    gives it no value and its opposite is not there."""
    words = shlex.split(cure)
    (at,) = (i for i, word in enumerate(words) if word.startswith("--"))
    name = words[at]
    value = words[at + 1].rstrip(",") if at + 1 < len(words) else ""
    kept, i = [], 0
    while i < len(flags):
        own = flags[i] in (name, name.replace("--enable", "--no-enable"))
        takes = i + 1 < len(flags) and not flags[i + 1].startswith("--")
        kept += [] if own else flags[i : i + 1 + takes]
        i += 1 + takes
    if value:
        return [*kept, name, value]
    return [*kept, name] if name.startswith("--enable") else kept


async def doctor(*arguments):
    """Return the exit status and the report."""
    program = Path(sys.executable).with_name("perilune")
    ran = await asyncio.create_subprocess_exec(
        program, "doctor", "--json", *arguments, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await ran.communicate()
    return ran.returncode, json.loads(said)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def owner(rig, tiny, tmp_path_factory):
    """One engine as the documents say; and one that reuses nothing, says nothing of it, and has another block
    size and another template."""
    config = json.loads((tiny["qwen"] / "tokenizer_config.json").read_text())
    template = tmp_path_factory.mktemp("template") / "other.jinja"
    template.write_text(config["chat_template"].replace("<|im_start|>", "<|im_start|>the "))
    model = {"name": "tiny", "source": str(tiny["qwen"]), "contextTokens": 4096}
    made = Owner(rig, rig.render({"model": model, "engine": {"blockSize": BLOCK, "args": ARGS}}))
    await made.start("--block-size", str(BLOCK), *EVENTS)
    await made.start("--block-size", "32", "--no-enable-prefix-caching", "--chat-template", str(template))
    await rig.ready(*made.engines)
    return made


async def test_wrong_flags_are_named_and_their_cures_make_all_exact(rig, owner, tiny, tmp_path):
    good, bad = (engine.url for engine in owner.engines)
    status, report = await doctor(good, bad)
    print(json.dumps({**report, "engines": [{**row, "tokens": "…"} for row in report["engines"]]}, indent=1))
    found = {finding["finding"]: finding for finding in report["findings"]}
    assert (status, report["exact"]) == (1, False)
    wrong = [name for name in found if not found[name]["exact"]]
    assert wrong == ["no_prefix_caching", "block_size", "no_events", "tokens"], "worst first"
    assert all(found[name]["engines"] == [bad] for name in wrong)
    rows = report["engines"]
    assert [(row["blockSize"], row["prefixCaching"]) for row in rows] == [(BLOCK, True), (32, False)]
    assert [(bool(row["events"]), row["eventsAnswer"]) for row in rows] == [(True, True), (False, None)]
    assert {(row["model"], row["contextTokens"], row["version"][:4]) for row in rows} == {
        ("tiny", 4096, rig.environment.version[:4])
    }
    chats = [told for told in rows[1]["tokens"] if told["api"] == "chat" and not told["tools"]]
    assert {(told["outcome"], told["part"]) for told in chats} == {("different", "template")}

    await owner.follow(report)
    status, report = await doctor(good, bad)
    assert (status, report["exact"]) == (0, True), report["findings"]
    assert [finding["finding"] for finding in report["findings"]] == ["no_transfer"]
    assert {told["outcome"] for row in report["engines"] for told in row["tokens"]} <= {"equal", "untold"}

    document = owner.rendered.with_endpoints([engine.pod.address for engine in owner.engines])
    model = structs.replace(document.spec.model, tokenizer=str(tiny["qwen"]))
    document = structs.replace(document, spec=structs.replace(document.spec, model=model))
    (tmp_path / "pool.yaml").write_bytes(dump(document))
    status, report = await doctor("--pool", str(tmp_path / "pool.yaml"))
    assert (status, report["exact"]) == (0, True), report["findings"]

    await rig.start_gateway(document)
    await rig.start_envoy(document)
    phase = judged.Phase("after the cures")
    await judged.play(rig, conversations.mixed(12, 7, "tiny"), phase, TURNS)
    assert not phase.failed, judged.misses(phase)
    assert sum(each.cached for each in phase.answered) > 0
    assert phase.exact == 1.0, judged.misses(phase)
    assert (await rig.page("/api/health"))["problems"] == []
