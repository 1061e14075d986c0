"""Tiny models with random weights, in the files of real ones: `python -m enginebed.models FOLDER`.

    qwen    Qwen3's architecture, ChatML, no BOS
    llama   Llama's architecture and chat format; the tokenizer puts a BOS before every text, as Llama's does

Two layers of width 64, 0.6 MB each, written in a second. Weights, vocabulary and adapters follow from fixed
seeds, so all engines of one model answer alike, and an answer says which prompt's KV it was computed from.
An answer is words, which become the same tokens again in the next prompt, as nearly always with a trained
model's; of random tokens, few answers' KV could be found again.
Each model has two LoRA adapters, `adapters/one` and `adapters/two`. With `window`, every second layer has a
sliding window.
"""

import json
import random
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

Object = dict[str, Any]
Array = np.ndarray[Any, np.dtype[np.float32]]
Arrays = dict[str, Array]
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD = 64, 128, 2, 2, 1, 32
VOCABULARY = 512
ADAPTERS = ("one", "two")
RANK = 8
CONTEXT_TOKENS = 32_768


@dataclass(frozen=True, slots=True)
class Tiny:
    """A kind of model."""

    name: str
    architecture: str
    model_type: str
    norms_heads: bool
    """Queries and keys are normalised for each head, as Qwen3 does."""
    specials: tuple[str, ...]
    bos: str
    """Empty for none."""
    eos: str
    template: str
    layers: int = LAYERS


_CHATML = """\
{%- if tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if messages[0].role == 'system' -%}{{- messages[0].content + '\\n\\n' -}}{%- endif -%}
    {{- '# Tools\\n\\n<tools>' -}}
    {%- for tool in tools -%}{{- '\\n' -}}{{- tool | tojson -}}{%- endfor -%}
    {{- '\\n</tools><|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if not (loop.first and message.role == 'system') -%}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}
    {%- for call in message.tool_calls or [] -%}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
        {{- (call.function.arguments | tojson) + '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
_THINKING = """\
{%- set latest = namespace(index=0) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{%- set latest.index = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if messages[0].role == 'system' -%}{{- messages[0].content + '\\n\\n' -}}{%- endif -%}
    {{- '# Tools\\n\\nYou may call these functions:\\n<tools>' -}}
    {%- for tool in tools -%}{{- '\\n' -}}{{- tool | tojson -}}{%- endfor -%}
    {{- '\\n</tools><|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else '' -%}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' -}}
    {%- elif message.role == 'assistant' -%}
        {{- '<|im_start|>assistant\\n' -}}
        {%- if message.reasoning_content is string and loop.index0 > latest.index -%}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' -}}
        {%- endif -%}
        {{- content -}}
        {%- for call in message.tool_calls or [] -%}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- elif message.role == 'tool' -%}
        {%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' -}}
        {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if enable_thinking is defined and enable_thinking is false -%}
        {{- '<think>\\n\\n</think>\\n\\n' -}}
    {%- endif -%}
{%- endif -%}
"""
_LLAMA_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' -}}
    {%- if loop.first and tools -%}
        {{- 'Functions:\\n' -}}
        {%- for tool in tools -%}{{- tool | tojson(indent=4) + '\\n\\n' -}}{%- endfor -%}
    {%- endif -%}
    {{- message.content or '' -}}
    {%- for call in message.tool_calls or [] -%}
        {{- '{"name": "' + call.function.name + '", "parameters": ' -}}
        {{- (call.function.arguments | tojson) + '}' -}}
    {%- endfor -%}
    {{- '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""
QWEN = Tiny(
    "qwen",
    "Qwen3ForCausalLM",
    "qwen3",
    norms_heads=True,
    specials=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    bos="",
    eos="<|im_end|>",
    template=_CHATML,
)
LLAMA = Tiny(
    "llama",
    "LlamaForCausalLM",
    "llama",
    norms_heads=False,
    specials=(
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ),
    bos="<|begin_of_text|>",
    eos="<|eot_id|>",
    template=_LLAMA_TEMPLATE,
)
QWEN_THINKING = replace(QWEN, name="qwen-thinking", template=_THINKING)
"""With a template like Qwen3's: it thinks unless told not to, and forgets the thoughts of earlier turns."""
QWEN_DEEP = replace(QWEN, name="qwen-deep", layers=32)
"""With so much KV per token, 8 KiB in float32, that a transfer takes the longer the more tokens it has."""
TINY = {tiny.name: tiny for tiny in (QWEN, LLAMA)}


def write(tiny: Tiny, folder: Path, window: int = 0) -> Path:
    """Write the model into `folder`. `window`: how many tokens every second layer sees (Llama only); with 0
    all layers see everything."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(tiny)
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = tokenizer.token_to_id(tiny.eos)
    bos = tokenizer.token_to_id(tiny.bos) if tiny.bos else None
    assert eos is not None
    _dump(folder / "config.json", _config(tiny, eos, bos, window))
    _dump(folder / "generation_config.json", {"eos_token_id": eos, "bos_token_id": bos, "do_sample": False})
    _dump(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": tiny.eos,
            "pad_token": tiny.specials[0],
            **({"bos_token": tiny.bos} if tiny.bos else {}),
            "model_max_length": CONTEXT_TOKENS,
            "chat_template": tiny.template,
        },
    )
    _save(folder / "model.safetensors", _weights(tiny, tokenizer))
    for i, name in enumerate(ADAPTERS):
        _write_adapter(folder / "adapters" / name, seed=100 + i)
    return folder


def _config(tiny: Tiny, eos: int, bos: int | None, window: int) -> Object:
    sliding: Object = {}
    if window:
        kinds = ["sliding_attention" if i % 2 else "full_attention" for i in range(tiny.layers)]
        sliding = {"sliding_window": window, "layer_types": kinds}
    return {
        "architectures": [tiny.architecture],
        "model_type": tiny.model_type,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": tiny.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT_TOKENS,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": bos,
        "eos_token_id": eos,
        **sliding,
    }


def _tokenizer(tiny: Tiny) -> Tokenizer:
    """Byte-level BPE; no text is unknown to it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(tiny.specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random(7)
    syllables = [a + b for a in "bcdfghlmnprst" for b in "aeiou"]
    words = ["".join(rng.choice(syllables) for _ in range(rng.randrange(1, 4))) for _ in range(400)]
    tokenizer.train_from_iterator([" ".join(rng.choice(words) for _ in range(4000))], trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in tiny.specials]
    )
    if tiny.bos:
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=f"{tiny.bos} $A",
                    pair=f"{tiny.bos} $A {tiny.bos} $B",
                    special_tokens=[(tiny.bos, tokenizer.token_to_id(tiny.bos))],
                ),
            ]
        )
    return tokenizer


def _weights(tiny: Tiny, tokenizer: Tokenizer) -> Arrays:
    rng = np.random.default_rng(11)
    words = [i for token, i in tokenizer.get_vocab().items() if re.fullmatch("Ġ[a-z]{2,}", token)]
    says = np.isin(np.arange(VOCABULARY), words).astype(np.float32)

    def matrix(out: int, into: int) -> Array:
        return rng.standard_normal((out, into), np.float32) / np.float32(into**0.5)

    def ones(size: int) -> Array:
        return np.ones(size, np.float32)

    made = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN),
        "model.norm.weight": ones(HIDDEN),
        "lm_head.weight": 20 * matrix(VOCABULARY, HIDDEN) * says[:, None],  # whatever the temperature
    }
    for i in range(tiny.layers):
        layer = {
            "input_layernorm.weight": ones(HIDDEN),
            "post_attention_layernorm.weight": ones(HIDDEN),
            "self_attn.q_proj.weight": matrix(HEADS * HEAD, HIDDEN),
            "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD, HIDDEN),
            "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD, HIDDEN),
            "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD),
            "mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            "mlp.up_proj.weight": matrix(INNER, HIDDEN),
            "mlp.down_proj.weight": matrix(HIDDEN, INNER),
        }
        if tiny.norms_heads:
            layer |= {"self_attn.q_norm.weight": ones(HEAD), "self_attn.k_norm.weight": ones(HEAD)}
        made |= {f"model.layers.{i}.{name}": weight for name, weight in layer.items()}
    return made


def _write_adapter(folder: Path, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
        "r": RANK,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
    _dump(folder / "adapter_config.json", config)
    rng = np.random.default_rng(seed)
    made: Arrays = {}
    for i in range(LAYERS):
        for name, out in (("q_proj", HEADS * HEAD), ("v_proj", KV_HEADS * HEAD)):
            at = f"base_model.model.model.layers.{i}.self_attn.{name}"
            made[f"{at}.lora_A.weight"] = rng.standard_normal((RANK, HIDDEN), np.float32) / np.float32(8)
            made[f"{at}.lora_B.weight"] = rng.standard_normal((out, RANK), np.float32) / np.float32(8)
    _save(folder / "adapter_model.safetensors", made)


def _save(path: Path, arrays: Arrays) -> None:
    """Write the safetensors format: the header's length, a JSON header, then the arrays' bytes."""
    header: Object = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, array in arrays.items():
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": (at, at + array.nbytes)}
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(array.astype("<f4").tobytes())


def _dump(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    for made in TINY.values():
        print(write(made, Path(sys.argv[1]) / made.name))
