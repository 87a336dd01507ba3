"""`genai_config.json`, from which onnxruntime-genai loads an artifact's folder: the names of the graph's
inputs and outputs, the sizes of its cache, special tokens, and how to sample.

onnxruntime-genai refuses a key that it does not know, so nothing else is in it.
"""

import json
from collections.abc import Mapping
from typing import Any, Protocol

from ..errors import ModelFormatError, UnsupportedModelError
from ..models.spec import ModelSpec

# Its name for a decoder of which it need not know more; what a family does otherwise is in the graph.
MODEL_TYPE = "decoder"
HEAD_DIM_MULTIPLE = 8
# The graph's own names, by onnxruntime-genai's for them; %d is the layer.
INPUT_NAMES = {
    "input_ids": "input_ids",
    "attention_mask": "attention_mask",
    "position_ids": "position_ids",
    "past_key_names": "past_key_values.%d.key",
    "past_value_names": "past_key_values.%d.value",
}
OUTPUT_NAMES = {
    "logits": "logits",
    "present_key_names": "present.%d.key",
    "present_value_names": "present.%d.value",
}


def check_genai(spec: ModelSpec) -> None:
    """Raises `UnsupportedModelError` for a model whose attention `GroupQueryAttention` cannot express."""
    if spec.head_dim % HEAD_DIM_MULTIPLE:
        raise UnsupportedModelError(
            f"onnx_contract 'genai': head_dim is {spec.head_dim}; GroupQueryAttention takes multiples of "
            f"{HEAD_DIM_MULTIPLE}"
        )


class Described(Protocol):
    """What the file is made from: a source's or a quantized model's."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def config(self) -> dict[str, Any]: ...

    @property
    def generation_config(self) -> dict[str, Any]: ...

    @property
    def tokenizer_files(self) -> Mapping[str, bytes]: ...


def genai_config(model: Described, graph: str) -> dict[str, Any]:
    """The file's content; `graph` is the graph's path inside the folder. Special tokens are those that the
    configs and the tokenizer's files name. Worth calling before hours of quantizing, for what it refuses.

    Raises `ModelFormatError` for a special token that is no token id, `UnsupportedModelError` as
    `check_genai` does, and where no token ends a text: onnxruntime-genai cannot do without.
    """
    check_genai(model.spec)
    spec, generation_config = model.spec, model.generation_config
    named = {key: _token_ids(key, model) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    end = named["eos_token_id"]
    if not end:
        raise UnsupportedModelError(
            "onnx_contract 'genai' needs an eos_token_id, which no file of the model names"
        )
    described: dict[str, Any] = {
        "type": MODEL_TYPE,
        "context_length": spec.max_position,
        "vocab_size": spec.vocab_size,
        "eos_token_id": end if len(end) > 1 else end[0],
        "pad_token_id": (named["pad_token_id"] or end)[0],
        "decoder": {
            "session_options": {"provider_options": []},
            "filename": graph,
            "head_size": spec.head_dim,
            "hidden_size": spec.hidden_size,
            "num_attention_heads": spec.num_heads,
            "num_hidden_layers": spec.num_layers,
            "num_key_value_heads": spec.num_kv_heads,
            "inputs": INPUT_NAMES,
            "outputs": OUTPUT_NAMES,
        },
    }
    if named["bos_token_id"]:
        described["bos_token_id"] = named["bos_token_id"][0]
    search: dict[str, Any] = {"max_length": spec.max_position, "past_present_share_buffer": True}
    search["do_sample"] = generation_config.get("do_sample") is True
    for key, kind in (
        ("temperature", float),
        ("top_p", float),
        ("top_k", int),
        ("repetition_penalty", float),
    ):
        value = generation_config.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            search[key] = kind(value)
    return {"model": described, "search": search}


def _token_ids(key: str, model: Described) -> list[int]:
    """The ids that the generation config, else the config, has under `key`, and the tokenizer's own."""
    file, value = "generation_config.json", model.generation_config.get(key)
    if value is None:
        file, value = "config.json", model.config.get(key)
    ids = list(value) if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ModelFormatError(f"{file}: {key} is {value!r}; expected token ids")
    found = _tokenizer_token_id(key.removesuffix("_id"), model.tokenizer_files)
    # Some configs have -1 for none.
    return list(dict.fromkeys(i for i in (*ids, found) if i is not None and i >= 0))


def _tokenizer_token_id(key: str, files: Mapping[str, bytes]) -> int | None:
    """The id of the token that `tokenizer_config.json` names under `key`."""
    token = _object(files.get("tokenizer_config.json")).get(key)
    text = token.get("content") if isinstance(token, dict) else token
    added = _object(files.get("tokenizer.json")).get("added_tokens")
    for entry in added if isinstance(added, list) else []:
        if isinstance(entry, dict) and text is not None and entry.get("content") == text:
            found = entry.get("id")
            return found if isinstance(found, int) else None
    return None


def _object(content: bytes | None) -> dict[str, Any]:
    """A JSON object, or nothing: the tokenizer's files were read and checked with the model."""
    try:
        data = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}
