"""What vLLM caches of prompts with pictures and sound, without an engine; run with vLLM's Python.

    {"ids": […], "media": [{"kind": "image", "data": BASE64, "start": 9, "length": 70}]}  a line of the input
    {"cached": 64, "events": BASE64}                                                     a line of the output

vLLM itself reads and hashes each medium, and its KVCacheManager finds cached blocks and makes KV events,
which come back as the engine would publish them. Pictures are files; sound is 16-bit PCM.
"""

import base64
import json
import sys
from itertools import count

import msgspec
import numpy as np
import torch
from vllm.distributed.kv_events import KVEventBatch
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.multimodal.media.image import ImageMediaIO
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

BLOCK, CHUNK, MOST_TOKENS = 32, 160, 8192
"""A step computes at most CHUNK tokens, so that media lie in several events."""


def identifier(medium: dict) -> str:
    """Return vLLM's name for the medium."""
    if medium["kind"] == "image":
        item = ImageMediaIO().load_base64("image/png", medium["data"])
    else:
        item = np.frombuffer(base64.b64decode(medium["data"]), np.int16).astype(np.float32) / 32768
    return MultiModalHasher.hash_kwargs("blake3", model_id="tiny", **{medium["kind"]: item})


def manager() -> KVCacheManager:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
    config = KVCacheConfig(4096, [], [KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(
        config, MOST_TOKENS, BLOCK, BLOCK, max_in_flight_tokens=CHUNK, enable_kv_cache_events=True
    )


init_none_hash(sha256_cbor)
kv, hasher, numbers = manager(), get_request_block_hasher(BLOCK, sha256_cbor), count()
for line in sys.stdin:
    asked = json.loads(line)
    features = [
        MultiModalFeatureSpec(
            data=None,
            modality=medium["kind"],
            identifier=identifier(medium),
            mm_position=PlaceholderRange(offset=medium["start"], length=medium["length"]),
        )
        for medium in asked["media"]
    ]
    ids, parameters = asked["ids"], SamplingParams(max_tokens=1)
    request = Request(str(next(numbers)), ids, parameters, None, mm_features=features, block_hasher=hasher)
    hits, cached, request.shared_prefix_boundary = kv.get_computed_blocks(request)
    at, batches = cached, []
    while at < len(ids):
        step = min(CHUNK, len(ids) - at)
        found = (cached, hits) if at == cached else ()
        assert kv.allocate_slots(request, step, *found) is not None
        at += step
        request.num_computed_tokens = at
        batches += kv.take_events()
    kv.free(request)
    events = msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=batches))
    told = {"cached": cached, "events": base64.b64encode(events).decode()}
    print(json.dumps(told), flush=True)
