"""GGUF files as model sources: the spec, the tensors and the errors a user can meet."""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from gguf_models import converted, interleaved, to_gguf_name
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nybble.errors import (
    MissingDependencyError,
    ModelFormatError,
    NybbleError,
    UnsupportedModelError,
)
from nybble.models import gguf_source
from nybble.models.config import spec_from_config
from nybble.models.gguf_config import llama3_factors
from nybble.models.gguf_source import BLOCK_QUANTS, GgufSource, open_gguf

HIDDEN, INNER, HEADS, KV_HEADS, HEAD, LAYERS = 32, 64, 4, 2, 8, 2
# Where a family's name in GGUF files is another.
ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32}  # which a file can't hold apart
GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.015625,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}


def tokenizer(count: int = 260) -> dict[str, Any]:
    from tokenizers import pre_tokenizers

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "<|eos|>", "<|eot|>", "<|bos|>"]
    tokens += [f"<unused{n}>" for n in range(count - len(tokens))]
    types = [1] * 257 + [3] * (len(tokens) - 257)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 259,
        "tokenizer.ggml.eos_token_id": 257,
    }


def tiny(arch: str = "llama", **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata and tensors of a small model; `changes` replace or add metadata (None removes), with "__" for
    dots after the architecture."""
    sizes = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    metadata = {f"{arch}.{key}": value for key, value in sizes.items()} | tokenizer()
    metadata |= {f"{arch}.{key.replace('__', '.')}": value for key, value in changes.items()}
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (260, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "output.weight": (260, HIDDEN),
    }
    for layer in range(LAYERS):
        rows = {"attn_q": HEADS * HEAD, "attn_k": KV_HEADS * HEAD, "attn_v": KV_HEADS * HEAD}
        for name, size in (rows | {"attn_output": HIDDEN, "ffn_gate": INNER, "ffn_up": INNER}).items():
            shapes[f"blk.{layer}.{name}.weight"] = (size, HIDDEN)
        shapes[f"blk.{layer}.ffn_down.weight"] = (HIDDEN, INNER)
        shapes |= {f"blk.{layer}.{name}.weight": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
    generator = np.random.default_rng(5)
    return metadata, {
        name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }


@pytest.fixture
def write(tmp_path: Path, gguf_samples: ModuleType) -> Callable[..., Path]:
    def make(metadata: Mapping[str, Any], tensors: Mapping[str, Any], arch: str = "llama") -> Path:
        path: Path = gguf_samples.write_model(tmp_path / "m.gguf", arch, dict(metadata), dict(tensors))
        return path

    return make


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


@pytest.mark.parametrize(("factor", "theta"), [(8.0, 500000.0), (32.0, 500000.0), (4.0, 10000.0)])
def test_llama3_rope_factors_become_parameters(
    write: Callable[..., Path], factor: float, theta: float
) -> None:
    """Against transformers' own scaling: the factors are computed from its frequencies."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    sizes = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": theta}
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = AutoConfig.for_model(
        "llama", **sizes, rope_scaling=dict(scaling), max_position_embeddings=131072
    )
    theirs = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")[0].numpy()
    base = theta ** -(np.arange(0, 128, 2) / 128)
    metadata, tensors = tiny(
        embedding_length=512, attention__head_count=4, context_length=131072, rope__freq_base=theta
    )
    tensors = {
        name: np.zeros((512,) if "norm" in name else (len(values), 512), np.float32)
        for name, values in tensors.items()
    }
    for layer in range(LAYERS):
        for name, shape in {
            "attn_q": (512, 512),
            "attn_output": (512, 512),
            "ffn_down": (512, INNER),
        }.items():
            tensors[f"blk.{layer}.{name}.weight"] = np.zeros(shape, np.float32)
        for name in ("attn_k", "attn_v"):
            tensors[f"blk.{layer}.{name}.weight"] = np.zeros((256, 512), np.float32)
    tensors["rope_freqs.weight"] = (base / theirs).astype(np.float32)
    with open_gguf(write(metadata, tensors), "m") as source:
        assert source.config["rope_scaling"] == scaling
        np.testing.assert_allclose(source.spec.rope.inv_freq(), theirs, rtol=1e-6)
        assert "rope_freqs.weight" not in source.spec.tensors()


def test_rope_factors_of_another_scaling_are_refused(write: Callable[..., Path]) -> None:
    metadata, tensors = tiny()
    tensors["rope_freqs.weight"] = np.linspace(1, 8, HEAD // 2, dtype=np.float32)
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight does not follow"):
        open_gguf(write(metadata, tensors), "m")
    tensors["rope_freqs.weight"] = np.ones(3, np.float32)
    with pytest.raises(ModelFormatError, match=r"has shape \(3,\); expected \(4,\)"):
        open_gguf(write(metadata, tensors), "m")
    tensors["rope_freqs.weight"] = np.ones(HEAD // 2, np.float32)
    with open_gguf(write(metadata, tensors), "m") as source:
        assert source.spec.rope.scaling == "none"


def test_llama3_factors_have_their_three_regions() -> None:
    factors = llama3_factors(500000.0, 128, 8.0, 1.0, 4.0, 8192)
    assert (factors[:29] == 1).all()
    assert (factors[35:] == 8).all()
    assert (np.diff(factors[28:36]) > 0).all()


def test_rope_scalings_of_the_metadata(write: Callable[..., Path]) -> None:
    metadata, tensors = tiny(rope__scaling__type="linear", rope__scaling__factor=4.0)
    with open_gguf(write(metadata, tensors), "m") as source:
        assert (source.spec.rope.scaling, source.spec.rope.factor) == ("linear", 4.0)
    metadata, tensors = tiny(rope__scale_linear=2.0)
    with open_gguf(write(metadata, tensors), "m") as source:
        assert (source.spec.rope.scaling, source.spec.rope.factor) == ("linear", 2.0)
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    metadata, tensors = tiny(**yarn, rope__scaling__original_context_length=32)
    with open_gguf(write(metadata, tensors), "m") as source:
        rope = source.spec.rope
        assert (rope.scaling, rope.factor, rope.original_max_position) == ("yarn", 4.0, 32)
        # https://arxiv.org/abs/2309.00071, section 3.4
        assert rope.attention_factor == pytest.approx(0.1 * np.log(4) + 1)
    metadata, tensors = tiny(**yarn, rope__scaling__attn_factor=0.5, rope__scaling__yarn_beta_fast=16.0)
    with open_gguf(write(metadata, tensors), "m") as source:
        assert source.spec.rope.attention_factor == pytest.approx(0.5 * (0.1 * np.log(4) + 1))
        assert (source.spec.rope.beta_fast, source.spec.rope.beta_slow) == (16.0, 1.0)


def test_every_token_that_ends_a_turn_is_a_stop_token(write: Callable[..., Path]) -> None:
    metadata, tensors = tiny()
    metadata |= {"tokenizer.ggml.eot_token_id": 258, "tokenizer.ggml.padding_token_id": 0}
    with open_gguf(write(metadata, tensors), "m") as source:
        assert source.generation_config == {
            "bos_token_id": 259,
            "eos_token_id": [257, 258],
            "pad_token_id": 0,
        }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope__scaling__type": "longrope"}, "'longrope'; supported: none, linear, yarn"),
        ({"rope__dimension_count": 4}, "only 8, a head, is supported"),
        ({"attention__value_length": 16}, "only 8, a head, is supported"),
        ({"expert_count": 8}, r"llama\.expert_count is set"),
        ({"expert_count": [8, 8]}, r"llama\.expert_count is set"),
        ({"logit_scale": 0.5}, r"llama\.logit_scale is set"),
        ({"attention__head_count_kv": [2, 1]}, "differs between layers"),
    ],
)
def test_features_that_are_not_run(write: Callable[..., Path], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        open_gguf(write(*tiny(**changes)), "m")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": None}, r"lacks llama\.block_count"),
        ({"block_count": "two"}, "'two'; expected a whole number"),
        ({"attention__head_count": 0}, "is 0"),
        ({"attention__head_count": 5}, "no multiple of 5 heads"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, "expected a finite number"),
        ({"embedding_length": 64}, "shape"),
        ({"block_count": 3}, r"'blk\.2\..*' .* is missing"),
    ],
)
def test_metadata_that_contradicts_the_file(
    write: Callable[..., Path], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFormatError, match=message):
        open_gguf(write(*tiny(**changes)), "m")


def test_other_architectures_are_named(write: Callable[..., Path]) -> None:
    metadata, tensors = tiny("mamba")
    with pytest.raises(UnsupportedModelError, match="'mamba'; supported: llama, qwen2, qwen3"):
        open_gguf(write(metadata, tensors, "mamba"), "m")


def test_split_files_are_refused(write: Callable[..., Path]) -> None:
    metadata, tensors = tiny()
    with pytest.raises(UnsupportedModelError, match="one of 3 parts of a split GGUF"):
        open_gguf(write(metadata | {"split.count": 3}, tensors), "m")


def test_tensors_that_are_missing_misshapen_or_extra(write: Callable[..., Path]) -> None:
    metadata, tensors = tiny()
    name = "blk.1.attn_k.weight"
    with pytest.raises(ModelFormatError, match=r"blk\.1\.attn_k\.weight.*is missing"):
        open_gguf(write(metadata, {n: t for n, t in tensors.items() if n != name}), "m")
    with pytest.raises(ModelFormatError, match=r"has shape \(32, 32\); expected \(16, 32\)"):
        open_gguf(write(metadata, tensors | {name: np.zeros((32, 32), np.float32)}), "m")
    extra = {"blk.1.attn_q.bias": np.zeros(32, np.float32)}
    with pytest.raises(UnsupportedModelError, match=r"'blk\.1\.attn_q\.bias' is not part"):
        open_gguf(write(metadata, tensors | extra), "m")


def test_a_tensor_type_that_is_not_read_is_named(write: Callable[..., Path]) -> None:
    metadata, tensors = tiny()
    tensors["blk.0.ffn_up.weight"] = ("IQ4_NL", np.zeros((INNER, 18), np.uint8))
    with pytest.raises(UnsupportedModelError, match=r"'blk\.0\.ffn_up\.weight' has type IQ4_NL"):
        open_gguf(write(metadata, tensors), "m")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("quantized", [False, True])
def test_values_that_are_not_finite_are_found(
    write: Callable[..., Path], value: float, quantized: bool
) -> None:
    metadata, tensors = tiny()
    values = tensors["blk.1.ffn_down.weight"]
    if quantized:
        blocks = np.zeros((HIDDEN, INNER // 32 * 34), np.uint8)
        blocks[-1, :2] = np.array([value], np.float16).view(np.uint8)
        blocks[-1, 2] = 1
        tensors["blk.1.ffn_down.weight"] = ("Q8_0", blocks)
    else:
        values[-1, -1] = value
    with (
        open_gguf(write(metadata, tensors), "m") as source,
        pytest.raises(ModelFormatError, match=r"m: tensor 'blk\.1\.ffn_down\.weight' holds a NaN"),
    ):
        source.tensor("model.layers.1.mlp.down_proj.weight")


def test_an_unknown_tensor_name_is_an_error(write: Callable[..., Path]) -> None:
    with (
        open_gguf(write(*tiny()), "m") as source,
        pytest.raises(ModelFormatError, match=r"no tensor 'model\.layers\.9"),
    ):
        source.tensor("model.layers.9.mlp.down_proj.weight")


def test_a_missing_gguf_package_names_the_extra(smollm2: GgufSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingDependencyError, match=r"nybble\[quantize\]"):
        smollm2.tensor("model.layers.0.mlp.down_proj.weight")
    assert smollm2.tensor("model.norm.weight").shape == (576,)


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="m: cannot be opened: No such file"):
        open_gguf(tmp_path / "none.gguf", "m")
    with pytest.raises(ModelFormatError, match="m: cannot be read: Is a directory"):
        open_gguf(tmp_path, "m")


@pytest.fixture(scope="module")
def sound_file(tmp_path_factory: pytest.TempPathFactory, gguf_samples: ModuleType) -> bytes:
    path: Path = gguf_samples.write_model(tmp_path_factory.mktemp("sound") / "m.gguf", "llama", *tiny())
    return path.read_bytes()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_changed_file_opens_or_gives_one_error(
    sound_file: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever is changed, what opens gives tensors of the spec's shapes, and what does not is one error."""
    content = bytearray(sound_file)
    header = content.index(b"output_norm.weight") + 400
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header))
        content[at] = data.draw(st.integers(0, 255) | st.sampled_from([0, 1, content[at] ^ 1, 128, 255]))
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    path.write_bytes(content[: len(content) - data.draw(st.sampled_from([0, 0, 0, 1, 5000]))])
    try:
        with open_gguf(path, "m") as source:
            for name, shape in source.spec.tensors().items():
                assert source.tensor(name).shape == shape
    except NybbleError:
        return
