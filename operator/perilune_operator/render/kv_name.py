"""A name of what an engine's KV means. Engines copy KV by position and cannot tell whose it is, so while
engines of another model revision or data type are rolled out, nothing may go between the two kinds: gateways
let no KV go between engines of two names, and each name has keys of its own in a shared store.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence

from perilune_operator.render.objects import Context

FLAGS = frozenset(
    {
        "--attention-backend",
        "--attention-config",
        "--calculate-kv-scales",
        "--code-revision",
        "--dtype",
        "--hf-config-path",
        "--hf-overrides",
        "--kv-cache-dtype",
        "--load-format",
        "--model-impl",
        "--quantization",
        "--revision",
        "--rope-scaling",
        "--rope-theta",
        "-q",
    }
)
"""vLLM's flags that change what a block of KV means, or how it is laid out."""


def kv_name(pool: Context) -> str:
    """Return the name. Engines of unequal images have one name: whether their KV is alike cannot be seen."""
    model, engine = pool.spec.model, pool.spec.engine
    made_by = (
        model.source or model.name,
        model.cache.image if model.cache else "",
        engine.block_size,
        *_flags(engine.args),
    )
    return hashlib.sha256(json.dumps(made_by).encode()).hexdigest()[:16]


def _flags(args: Sequence[str]) -> Iterator[str]:
    """Yield those of the arguments that are FLAGS, each with its value."""
    for i, arg in enumerate(args):
        name, _, value = arg.partition("=")
        flag = name.split(".", 1)[0]
        if (flag.replace("_", "-") if flag.startswith("--") else flag) not in FLAGS:
            continue
        follows = args[i + 1] if i + 1 < len(args) and not args[i + 1].startswith("-") else ""
        yield f"{name.replace('_', '-')}={value or follows}"
