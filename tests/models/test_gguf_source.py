"""GGUF files as model sources: the spec and the tensors are those of the model that was converted."""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from gguf_models import converted, interleaved, to_gguf_name
from numpy.typing import NDArray
from tiny_gguf import HIDDEN, INNER, tiny, tokenizer

from nybble.errors import MissingDependencyError
from nybble.models import gguf_source
from nybble.models.config import spec_from_config
from nybble.models.gguf_source import BLOCK_QUANTS, GgufSource, open_gguf

# Where a family's name in GGUF files is another.
ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32}  # which a file can't hold apart
GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.015625,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> GgufSource:
    return open_gguf(smollm2_gguf, "smollm2")


def test_smollm2_is_recovered(smollm2: GgufSource, smollm2_gguf: Path) -> None:
    """The numbers of the config.json that HuggingFaceTB published for SmolLM2-135M-Instruct."""
    published = {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
    }
    assert {key: smollm2.config[key] for key in published} == published
    assert smollm2.spec.head_dim == 64
    assert smollm2.spec.tied_embeddings
    assert smollm2.generation_config == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert smollm2.origin == "smollm2"
    assert smollm2.digest == hashlib.sha256(smollm2_gguf.read_bytes()).hexdigest()


def test_smollm2_tensors_are_the_gguf_packages(smollm2: GgufSource, smollm2_reader: Any) -> None:
    from gguf.quants import dequantize

    theirs = {t.name: dequantize(t.data, t.tensor_type) for t in smollm2_reader.tensors if "blk.7." in t.name}
    checked = 0
    for name, shape in smollm2.spec.layer_tensors(7).items():
        ours, expected = smollm2.tensor(name), theirs[to_gguf_name(name)]
        assert ours.dtype == np.float32
        assert ours.shape == shape
        if "q_proj" in name or "k_proj" in name:
            ours = interleaved(ours, 64)
        np.testing.assert_array_equal(ours, expected)
        checked += 1
    assert checked == len(theirs) == 9
    embedding = next(t for t in smollm2_reader.tensors if t.name == "token_embd.weight")
    np.testing.assert_array_equal(
        smollm2.tensor("model.embed_tokens.weight")[-100:],
        dequantize(embedding.data[-100:], embedding.tensor_type),
    )


@pytest.mark.slow
def test_smollm2_is_what_transformers_makes_of_it(smollm2: GgufSource, smollm2_gguf: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(smollm2_gguf.parent), gguf_file=smollm2_gguf.name)
    theirs = model.state_dict()
    for name in smollm2.spec.tensors():
        np.testing.assert_array_equal(smollm2.tensor(name), theirs[name].float().numpy(), err_msg=name)


CONVERTED = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 32, "num_key_value_heads": 1}),
    ("mistral", {"sliding_window": 64}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 32}),
    ("qwen3", {"attention_bias": True}),
    ("gemma2", {**GEMMA, "sliding_window": 64}),
    ("gemma2", {**GEMMA, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}),
    ("gemma3_text", {**GEMMA, "num_hidden_layers": 7, "sliding_window": 16}),
    ("gemma3_text", {**GEMMA, "rope_local_base_freq": 5000.0, "final_logit_softcapping": 10.0}),
    ("granite", GRANITE),
    ("granite", {"attention_bias": True, "mlp_bias": True}),
    ("smollm3", {"num_hidden_layers": 5}),
    ("olmo2", {}),
]


def convert(folder: Path, write: Callable[..., Path], family: str, overrides: dict[str, Any]) -> Path:
    """A Hugging Face folder as a GGUF file of float32, converted as llama.cpp converts it."""
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    original = spec_from_config(config, "config.json")
    tensors = load_file(folder / "model.safetensors")
    arch = ARCHITECTURES.get(family, family)
    sizes = {
        "block_count": original.num_layers,
        "context_length": original.max_position,
        "embedding_length": original.hidden_size,
        "feed_forward_length": original.intermediate_size,
        "attention.head_count": original.num_heads,
        "attention.head_count_kv": original.num_kv_heads,
        "attention.key_length": original.head_dim,
        "attention.value_length": original.head_dim,
        "attention.layer_norm_rms_epsilon": original.norm_eps,
        "rope.freq_base": original.rope.theta,
        "rope.dimension_count": original.head_dim,
        "attention.sliding_window": config.get("sliding_window"),
        "rope.freq_base_swa": overrides.get("rope_local_base_freq"),
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "embedding_scale": config.get("embedding_multiplier"),
        "residual_scale": config.get("residual_multiplier"),
        "attention.scale": config.get("attention_multiplier"),
        "logit_scale": config.get("logits_scaling"),
    }
    written = {
        to_gguf_name(name, arch): converted(name, tensors[name], arch, original.head_dim)
        for name in original.tensors()
    }
    metadata = {f"{arch}.{key}": value for key, value in sizes.items()} | tokenizer(original.vocab_size)
    return write(metadata, written, arch)


@pytest.mark.parametrize(("family", "overrides"), CONVERTED)
def test_a_converted_model_comes_back(
    write: Callable[..., Path],
    make_tiny_model: Callable[..., Path],
    family: str,
    overrides: dict[str, Any],
) -> None:
    """A Hugging Face model converted as llama.cpp converts it has the spec and tensors it had."""
    from safetensors.numpy import load_file

    folder = make_tiny_model(family, **overrides)
    original = spec_from_config(json.loads((folder / "config.json").read_text()), "config.json")
    tensors = load_file(folder / "model.safetensors")
    with open_gguf(convert(folder, write, family, overrides), "m") as source:
        assert source.spec == original
        for name in original.tensors():
            if family.startswith("gemma") and name.endswith("norm.weight"):  # 1 was added in float32
                np.testing.assert_allclose(source.tensor(name), tensors[name], atol=2e-7, err_msg=name)
            else:
                np.testing.assert_array_equal(source.tensor(name), tensors[name], err_msg=name)


# llama.cpp ignores a llama's window, and has no biases in qwen3.
OURS_ALONE = (("mistral", {"sliding_window": 64}), ("qwen3", {"attention_bias": True}))


@pytest.mark.interop
@pytest.mark.parametrize(("family", "overrides"), [case for case in CONVERTED if case not in OURS_ALONE])
def test_llamacpp_computes_the_same(
    write: Callable[..., Path],
    make_tiny_model: Callable[..., Path],
    gguf_samples: ModuleType,
    tmp_path: Path,
    family: str,
    overrides: dict[str, Any],
) -> None:
    """What is taken for granted of an architecture is what llama.cpp takes for granted, past windows too."""
    from nybble.quant.forward import logits

    python = os.environ.get("NYBBLE_LLAMACPP_PYTHON")
    if python is None:
        pytest.skip("NYBBLE_LLAMACPP_PYTHON names no interpreter that has llama_cpp")
    path = convert(make_tiny_model(family, **overrides), write, family, overrides)
    ids = np.random.default_rng(3).integers(3, 250, 100)
    theirs = gguf_samples.llamacpp_logits(python, path, ids.tolist(), tmp_path)
    with open_gguf(path, "m") as source:
        ours = logits(source, ids[None])[0].numpy()
    np.testing.assert_allclose(ours, theirs, atol=5e-3)


def random_blocks(kind: str, rows: int, columns: int) -> NDArray[np.uint8]:
    """Blocks of the type: quantized by the gguf package where it can, else random bytes with sound scales."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import quantize

    generator = np.random.default_rng(9)
    values = generator.standard_normal((rows, columns)).astype(np.float32)
    if not kind.endswith("_K"):
        blocks: NDArray[np.uint8] = quantize(values, GGMLQuantizationType[kind])
        return blocks
    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = generator.integers(0, 256, (rows, columns // elements, size), dtype=np.uint8)
    # Where the half-precision scales of each block are, from ggml's definition of the blocks.
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind]
    for place in places:
        scale = generator.uniform(-1, 1, raw.shape[:2]).astype(np.float16)
        raw[..., place : place + 2] = scale[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", BLOCK_QUANTS)
def test_every_block_type_is_the_gguf_packages(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    metadata, tensors = tiny(embedding_length=256, attention__head_count=32, attention__head_count_kv=32)
    generator = np.random.default_rng(1)
    for name, values in tensors.items():
        rows = 256 if "attn" in name or "ffn_down" in name else len(values)
        columns = INNER if "ffn_down" in name else 256
        tensors[name] = generator.standard_normal((rows, columns)).astype(np.float32)
        if "norm" in name:
            tensors[name] = tensors[name][0]
    name = "blk.1.ffn_up.weight"
    blocks = random_blocks(kind, INNER, 256)
    tensors[name] = (kind, blocks)
    # Chunks of a few rows, with a shorter last one.
    monkeypatch.setattr(gguf_source, "_CHUNK_ELEMENTS", 256 * 7)
    with open_gguf(write(metadata, tensors), "m") as source:
        values = source.tensor("model.layers.1.mlp.up_proj.weight")
    np.testing.assert_array_equal(values, dequantize(blocks, GGMLQuantizationType[kind]))
    assert np.isfinite(values).all()


def test_half_precision_tensors(write: Callable[..., Path]) -> None:
    metadata, tensors = tiny()
    exact = np.arange(INNER * HIDDEN, dtype=np.float32).reshape(INNER, HIDDEN) % 251 - 100
    tensors["blk.0.ffn_up.weight"] = exact.astype(np.float16)
    upper_half = (exact.view(np.uint32) >> 16).astype("<u2")  # these values need no more bits
    tensors["blk.0.ffn_gate.weight"] = ("BF16", upper_half.view(np.uint8))
    with open_gguf(write(metadata, tensors), "m") as source:
        np.testing.assert_array_equal(source.tensor("model.layers.0.mlp.up_proj.weight"), exact)
        np.testing.assert_array_equal(source.tensor("model.layers.0.mlp.gate_proj.weight"), exact)


def test_a_missing_gguf_package_names_the_extra(smollm2: GgufSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingDependencyError, match=r"nybble\[quantize\]"):
        smollm2.tensor("model.layers.0.mlp.down_proj.weight")
    assert smollm2.tensor("model.norm.weight").shape == (576,)
