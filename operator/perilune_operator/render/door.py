"""The middleware before vLLM that keeps clients' transfer parameters out (`engine_door.py`): a ConfigMap with
its source, and what an engine's pod needs to load it.
"""

import hmac
from pathlib import Path

from perilune_operator.observe.facts import Object
from perilune_operator.render import engine_door
from perilune_operator.render.objects import Context

MODULE = "perilune_door"
FOLDER = "/etc/perilune/door"
ARGS = [f"--middleware={MODULE}.{engine_door.Door.__name__}"]
MOUNT: Object = {"name": "door", "mountPath": FOLDER, "readOnly": True}


def name(pool: Context) -> str:
    """The name of the ConfigMap."""
    return f"{pool.name}-engine-door"


def config(pool: Context) -> Object:
    """The ConfigMap with the middleware."""
    source = Path(engine_door.__file__).read_text()
    return pool.object("ConfigMap", name(pool), "engine", data={f"{MODULE}.py": source})


def volume(pool: Context) -> Object:
    return {"name": "door", "configMap": {"name": name(pool)}}


def env(pool: Context) -> list[Object]:
    """The environment by which the middleware is found, and its secret."""
    return [{"name": "PYTHONPATH", "value": FOLDER}, *secret(pool)]


def secret(pool: Context) -> list[Object]:
    """The environment variable with the secret that lets transfer parameters pass; gateways send it with the
    legs of hand-offs. It follows from the pool's uid: a user who may read the pool's pods can know it, a
    client of the model cannot."""
    value = hmac.new(pool.uid.encode(), b"engine door", "sha256").hexdigest()
    return [{"name": engine_door.SECRET, "value": value}]


def keep_path(variables: dict[str, Object]) -> None:
    """Put the folder before a PYTHONPATH of the user's."""
    path = variables["PYTHONPATH"]
    if path.get("value", FOLDER) != FOLDER:
        variables["PYTHONPATH"] = {**path, "value": f"{FOLDER}:{path['value']}"}
