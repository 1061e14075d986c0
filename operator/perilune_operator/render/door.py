"""What engines load of ours: the middleware before vLLM that keeps clients' transfer parameters out
(`engine_door.py`), and the connector for hand-offs (`engine_connector.py`). A ConfigMap has the sources of
both; the rest is what an engine's pod needs to load them.
"""

from pathlib import Path

from perilune_api import names
from perilune_api.inference_pool.mooncake import Transfer
from perilune_operator.observe.facts import Object
from perilune_operator.render import engine_door
from perilune_operator.render.objects import Context

MODULE = "perilune_door"
CONNECTOR = "perilune_connector"
CONNECTOR_SOURCE = Path(engine_door.__file__).with_name("engine_connector.py")
"""It imports vLLM, so it cannot be imported here."""
FOLDER = "/etc/perilune/door"
ARGS = [f"--middleware={MODULE}.{engine_door.Door.__name__}"]
MOUNT: Object = {"name": "door", "mountPath": FOLDER, "readOnly": True}


def name(pool: Context) -> str:
    """Return the name of the ConfigMap."""
    return f"{pool.name}-engine-door"


def config(pool: Context) -> Object:
    """Return the ConfigMap with the sources."""
    data = {f"{MODULE}.py": Path(engine_door.__file__).read_text()}
    if pool.spec.mooncake.transfer is Transfer.HANDOFF:
        data[f"{CONNECTOR}.py"] = CONNECTOR_SOURCE.read_text()
    return pool.object("ConfigMap", name(pool), "engine", data=data)


def volume(pool: Context) -> Object:
    return {"name": "door", "configMap": {"name": name(pool)}}


def env(pool: Context) -> list[Object]:
    """Return the environment by which the middleware is found, the port for metrics, and the secrets that
    let transfer parameters pass; gateways send one with the legs of hand-offs."""
    port = {"name": engine_door.METRICS_PORT, "value": str(names.METRICS_PORT)}
    return [{"name": "PYTHONPATH", "value": FOLDER}, port, *pool.secrets.engines.env()]


def keep_path(variables: dict[str, Object]) -> None:
    """Put the folder before a PYTHONPATH of the user's."""
    path = variables["PYTHONPATH"]
    if path.get("value", FOLDER) != FOLDER:
        variables["PYTHONPATH"] = {**path, "value": f"{FOLDER}:{path['value']}"}
