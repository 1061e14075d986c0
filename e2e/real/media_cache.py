"""What vLLM caches of prompts with pictures and sound, without an engine; run with vLLM's Python.

    {"ids": […], "media": [{"kind": "image", "data": BASE64, "start": 9, "length": 70}]}  a line of the input
    {"cached": 64, "events": BASE64}                                                     a line of the output

vLLM itself reads and hashes each medium, and its KVCacheManager finds cached blocks and makes KV events,
which come back as the engine would publish them. Sound is for a model that hears 16,000 samples a second, as
nearly all do; what resamples other sound is not installed, so linear interpolation stands for it. A line
with `name` alone is answered with vLLM's name for the medium; after one with `forget` nothing is cached.
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
from vllm.multimodal.media.audio import AudioMediaIO
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.parse import MultiModalDataParser
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

BLOCK, CHUNK, MOST_TOKENS, HEARS = 32, 160, 8192, 16_000
"""A step computes at most CHUNK tokens, so that media lie in several events."""


def identifier(medium: dict) -> str:
    """Return vLLM's name for the medium."""
    if medium["kind"] == "image":
        item = ImageMediaIO().load_base64("image/png", medium["data"])
    else:
        heard, rate = AudioMediaIO(audio_backend="soundfile").load_base64("audio/wav", medium["data"])
        if rate != HEARS:
            at = np.arange(len(heard) * HEARS // rate) * rate / HEARS
            heard = np.interp(at, np.arange(len(heard)), heard).astype(np.float32)
        items = MultiModalDataParser(target_sr=HEARS).parse_mm_data({"audio": [(heard, HEARS)]})
        (item,) = items["audio"].get_all_items_for_hash()
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
    if "name" in asked:
        print(json.dumps({"name": identifier(asked["name"])}), flush=True)
        continue
    if "forget" in asked:
        kv = manager()
        print("{}", flush=True)
        continue
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
