"""Where engines find the model: `model.cache`, and the init containers that fill it.

claim, hostPath ─▶ mounted at FOLDER, as Hugging Face's cache; `fetch-model` downloads what is missing,
                   one pod at a time, so that a node (or all nodes that share a claim) downloads once
image           ─▶ mounted at MODEL; a node's container runtime pulls it once
none            ─▶ each pod downloads into its own disk
"""

import re

from perilune_api.inference_pool.engine import ModelSpec
from perilune_operator.observe.facts import Object
from perilune_operator.render.objects import USER, Context, container_security

FOLDER = "/var/cache/models"
MODEL = "/model"
VOLUME = "models"
FETCHER = "fetch-model"
OWNER = "own-cache"

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")

FETCH = """\
import argparse, fcntl, os, sys
from huggingface_hub import snapshot_download
flags = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
flags.add_argument("--revision")
model, revision = sys.argv[1], flags.parse_known_args(sys.argv[2:])[0].revision
other = ["original/*", "consolidated*", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack"]
name = model.replace("/", "--")
with open(os.path.join(os.environ["HF_HOME"], f".fetch-{name}"), "w") as lock:
    print("waiting for other pods that fetch", model, flush=True)
    fcntl.flock(lock, fcntl.LOCK_EX)
    found = snapshot_download(model, revision=revision, ignore_patterns=[*other, "*.bin", "*.pt"])
    if not any(file.endswith(".safetensors") for file in os.listdir(found)):
        found = snapshot_download(model, revision=revision, ignore_patterns=other)
print("complete:", found, flush=True)
"""
"""Downloads a model from the hub into HF_HOME, or finds it there, also without a network. Arguments: the
model, then the engine's own, of which it reads --revision. Formats that vLLM does not load are left out."""


def source(model: ModelSpec) -> str:
    """Return what vLLM loads."""
    image = model.cache is not None and model.cache.image
    return model.source or (MODEL if image else model.name)


def downloads(model: ModelSpec) -> bool:
    """Return whether the model comes from Hugging Face's hub, and not from a path or another store."""
    return bool(_HUB_ID.fullmatch(source(model)))


def volumes(pool: Context) -> list[Object]:
    cache = pool.spec.model.cache
    if cache is None:
        return []
    if cache.claim:
        return [{"name": VOLUME, "persistentVolumeClaim": {"claimName": cache.claim}}]
    if cache.host_path:
        return [{"name": VOLUME, "hostPath": {"path": cache.host_path, "type": "DirectoryOrCreate"}}]
    policy = pool.spec.engine.image_pull_policy
    return [{"name": VOLUME, "image": {"reference": cache.image, "pullPolicy": policy}}]


def mounts(pool: Context) -> list[Object]:
    cache = pool.spec.model.cache
    if cache is None:
        return []
    if cache.image:
        return [{"name": VOLUME, "mountPath": MODEL, "readOnly": True}]
    return [{"name": VOLUME, "mountPath": FOLDER}]


def env(pool: Context) -> list[Object]:
    cache = pool.spec.model.cache
    return [{"name": "HF_HOME", "value": FOLDER}] if cache is not None and not cache.image else []


def init_containers(pool: Context, image: str, resources: Object, variables: list[Object]) -> list[Object]:
    """Return the init containers. `image`: the engine's, which has Hugging Face's client. `resources`,
    `variables`: the engine's, among which a user's HF_TOKEN or proxy is."""
    model, cache = pool.spec.model, pool.spec.model.cache
    if cache is None or cache.image:
        return []
    base = {
        "image": image,
        "imagePullPolicy": pool.spec.engine.image_pull_policy,
        "resources": resources,
    }
    made: list[Object] = []
    if (
        cache.host_path and not pool.defaults.platform_user
    ):  # the kubelet creates the folder as root's, and fsGroup does not reach it
        security = {**container_security("CHOWN"), "runAsUser": 0, "runAsGroup": 0, "runAsNonRoot": False}
        own = {"name": OWNER, **base, "command": ["chown", f"{USER}:{USER}", FOLDER]}
        made.append({**own, "securityContext": security, "volumeMounts": mounts(pool)})
    if downloads(model):
        fetch = ["python3", "-c", FETCH, source(model), *pool.spec.engine.args]
        here = [{"name": "home", "mountPath": "/home/perilune"}, {"name": "tmp", "mountPath": "/tmp"}]
        made.append(
            {
                "name": FETCHER,
                **base,
                "command": fetch,
                "env": variables,
                "securityContext": container_security(),
                "volumeMounts": [*here, *mounts(pool)],
            }
        )
    return made
