"""Argo CD's health check of docs/install.md, run by a Lua interpreter as Argo CD does it."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from lupa import LuaRuntime

Object = dict[str, Any]
PAGE = Path(__file__).parents[2] / "docs/install.md"


def health(pool: Object) -> str:
    (block,) = re.findall(r"```yaml\n(data:\n  resource\.customizations.*?)```", PAGE.read_text(), re.S)
    (script,) = yaml.safe_load(block)["data"].values()
    lua = LuaRuntime()
    judge = lua.eval(f"function(obj)\n{script}\nend")
    return str(judge(lua.table_from(pool, recursive=True))["status"])


def pool(*conditions: tuple[str, str, int], observed: int = 2) -> Object:
    told = [{"type": t, "status": s, "observedGeneration": g, "message": "m"} for t, s, g in conditions]
    return {"metadata": {"generation": 2}, "status": {"observedGeneration": observed, "conditions": told}}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        pytest.param({"metadata": {"generation": 1}}, "Progressing", id="no status yet"),
        pytest.param(pool(("Ready", "True", 2)), "Healthy", id="the present generation is in force"),
        pytest.param(pool(("Ready", "True", 1)), "Progressing", id="an earlier one still is"),
        pytest.param(pool(("Ready", "False", 2)), "Progressing", id="not ready yet"),
        pytest.param(pool(("Ready", "True", 1), observed=1), "Progressing", id="the change was not seen yet"),
        pytest.param(
            pool(("Ready", "True", 1), ("Stalled", "True", 2)), "Degraded", id="it cannot go on, and answers"
        ),
        pytest.param(pool(("Ready", "True", 2), ("Stalled", "False", 2)), "Healthy", id="not stalled"),
    ],
)
def test_argo_cd_tells_the_truth(given: Object, said: str) -> None:
    assert health(given) == said
