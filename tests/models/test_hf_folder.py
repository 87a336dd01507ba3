"""Hugging Face folders: equal to what transformers loads, and clear about what is wrong with one."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nybble.errors import ModelFormatError, NybbleError, UnsupportedModelError
from nybble.models.hf_folder import HfFolder

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path, make_tiny_model: Callable[..., Path]) -> Path:
    """A copy of the small llama that a test may damage."""
    return Path(shutil.copytree(make_tiny_model("llama"), tmp_path / "model"))


@pytest.fixture
def sharded(tmp_path: Path, make_tiny_model: Callable[..., Path]) -> Path:
    """The same in several files."""
    from transformers import AutoModelForCausalLM

    source = make_tiny_model("llama")
    target = Path(shutil.copytree(source, tmp_path / "model"))
    (target / WEIGHTS).unlink()
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(target, max_shard_size="100KB")
    assert len(list(target.glob("model-*.safetensors"))) > 2
    return target


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(content), encoding="utf-8")


def edit_tensors(path: Path, **changes: Any) -> None:
    """Replaces tensors of a safetensors file, or removes one given None. `__` stands for a dot."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(path)
    for name, value in changes.items():
        if value is None:
            del tensors[name.replace("__", ".")]
        else:
            tensors[name.replace("__", ".")] = value
    save_file(tensors, path)


def refused(folder: Path, kind: type[NybbleError] = ModelFormatError) -> str:
    """The message of opening a folder that must be refused."""
    with pytest.raises(kind) as caught:
        HfFolder(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {"sliding_window": 8}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 32, "attention_bias": True}),
        ("phi3", {"head_dim": 12}),
    ],
)
@pytest.mark.parametrize("shard_size", [None, "60KB"])
def test_tensors_equal_those_that_transformers_loads(
    tmp_path: Path,
    make_tiny_model: Callable[..., Path],
    family: str,
    changes: dict[str, Any],
    dtype: str,
    shard_size: str | None,
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    source = make_tiny_model(family, dtype, **changes)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))
    path = source
    if shard_size is not None:
        path = Path(shutil.copytree(source, tmp_path / "sharded"))
        (path / WEIGHTS).unlink()
        model.save_pretrained(path, max_shard_size=shard_size)
        assert len(list(path.glob("model-*.safetensors"))) > 2
    expected = {name: value.float().numpy() for name, value in model.state_dict().items()}
    with HfFolder(path) as opened:
        if opened.spec.tied_embeddings:
            expected.pop("lm_head.weight")
        for name, rows in opened.spec.stored_rows().items():
            got = opened.tensor(name)
            assert got.dtype == np.float32
            assert np.array_equal(got, expected[rows.name][rows.begin : rows.end])
        assert set(opened.spec.stored_tensors()) == set(expected)


def test_what_comes_with_the_weights(folder: Path) -> None:
    with HfFolder(folder) as opened:
        assert opened.origin == "model"
        assert opened.config == json.loads((folder / "config.json").read_text())
        assert opened.generation_config["eos_token_id"] == 2
        names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
        assert opened.tokenizer_files == {name: (folder / name).read_bytes() for name in names}
        with pytest.raises(ModelFormatError, match="no tensor 'other'"):
            opened.tensor("other")


def test_only_the_tokenizer_itself_is_required(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").unlink()
    with HfFolder(folder) as opened:
        assert list(opened.tokenizer_files) == ["tokenizer.json"]
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json: cannot be opened: No such file" in refused(folder)


def test_stop_tokens_come_from_the_config_where_there_is_no_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", eos_token_id=[2, 5])
    with HfFolder(folder) as opened:
        assert opened.generation_config == {"bos_token_id": 1, "eos_token_id": [2, 5], "pad_token_id": 0}
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    with HfFolder(folder) as opened:
        assert opened.generation_config["temperature"] == 0.5
        assert opened.generation_config["eos_token_id"] == [2, 5]


@pytest.mark.parametrize("stops", ["2", -1, [2, None], True, 2.0])
def test_stop_tokens_must_be_token_ids(folder: Path, stops: object) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=stops)
    assert "generation_config.json: eos_token_id is" in refused(folder)


def test_the_digest_follows_weights_and_config(sharded: Path) -> None:
    def digest() -> str:
        with HfFolder(sharded) as opened:
            return opened.digest

    first = digest()
    assert len(first) == 64
    assert digest() == first
    (sharded / "README.md").write_text("another file")
    assert digest() == first
    shard = sorted(sharded.glob("model-*.safetensors"))[-1]
    content = bytearray(shard.read_bytes())
    content[-2] ^= 1
    shard.write_bytes(content)
    changed = digest()
    assert changed != first
    edit_json(sharded / "config.json", use_cache=False)
    assert digest() not in (first, changed)


def test_a_tied_head_may_be_stored_again_and_is_ignored(folder: Path) -> None:
    edit_json(folder / "config.json", tie_word_embeddings=True)
    with HfFolder(folder) as opened:
        assert opened.spec.head_name == "model.embed_tokens.weight"
        with pytest.raises(ModelFormatError, match=r"no tensor 'lm_head.weight'"):
            opened.tensor("lm_head.weight")


def test_an_untied_head_must_be_there(folder: Path) -> None:
    edit_tensors(folder / WEIGHTS, lm_head__weight=None)
    assert f"{WEIGHTS}: tensor 'lm_head.weight' is missing, expected [512, 64]" in refused(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit_tensors(folder / WEIGHTS, **{Q_PROJ: None})
    assert f"{WEIGHTS}: tensor '{Q_PROJ}' is missing" in refused(folder)


def test_a_wrong_shape_is_named(folder: Path) -> None:
    edit_tensors(folder / WEIGHTS, **{Q_PROJ: np.zeros((32, 64), np.float32)})
    assert f"{WEIGHTS}: tensor '{Q_PROJ}' is [32, 64], expected [64, 64]" in refused(folder)


def test_a_wrong_type_is_named(folder: Path) -> None:
    edit_tensors(folder / WEIGHTS, **{Q_PROJ: np.zeros((64, 64), np.int8)})
    message = refused(folder, UnsupportedModelError)
    assert f"tensor '{Q_PROJ}' is I8, expected F32, F16 or BF16" in message


def test_a_tensor_that_would_be_ignored_is_refused(folder: Path) -> None:
    """A bias that the config does not announce would change the result."""
    edit_tensors(folder / WEIGHTS, model__layers__0__self_attn__q_proj__bias=np.ones(64, np.float32))
    message = refused(folder, UnsupportedModelError)
    assert "tensor 'model.layers.0.self_attn.q_proj.bias', which this config's llama model" in message


def test_old_rotary_buffers_are_ignored(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder / WEIGHTS, **{name: np.ones(8, np.float32)})
    with HfFolder(folder) as opened:
        assert name not in opened.spec.tensors()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_values_that_are_not_finite_are_refused(folder: Path, value: float, dtype: Any) -> None:
    weight = np.zeros((64, 64), dtype)
    weight[3, 5] = value
    edit_tensors(folder / WEIGHTS, **{Q_PROJ: weight})
    with HfFolder(folder) as opened:
        with pytest.raises(ModelFormatError, match=f"{WEIGHTS}: tensor '{Q_PROJ}' holds NaN or infinity"):
            opened.tensor(Q_PROJ)
        assert np.isfinite(opened.tensor("model.norm.weight")).all()


def test_a_missing_shard_is_named(sharded: Path) -> None:
    name = sorted(sharded.glob("model-*.safetensors"))[1].name
    (sharded / name).unlink()
    assert f"{name}: is missing, but {INDEX} names it" in refused(sharded)


def test_a_tensor_that_is_not_in_the_named_shard(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())["weight_map"]
    other = next(name for name in index.values() if name != index[Q_PROJ])
    edit_json(sharded / INDEX, weight_map=index | {Q_PROJ: other})
    assert f"{other}: tensor '{Q_PROJ}' is missing, but {INDEX} says it is there" in refused(sharded)


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "a/b.safetensors",
        "..",
        "",
        "x.bin",
        3,
        None,
        "a\0.safetensors",
    ],
)
def test_an_index_must_stay_in_its_folder(sharded: Path, name: object) -> None:
    index = json.loads((sharded / INDEX).read_text())["weight_map"]
    edit_json(sharded / INDEX, weight_map=index | {Q_PROJ: name})
    assert "expected the plain name of a .safetensors file" in refused(sharded)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_an_index_without_a_map(sharded: Path, weight_map: object) -> None:
    edit_json(sharded / INDEX, weight_map=weight_map)
    assert f"{INDEX}: weight_map is" in refused(sharded)


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    path = sorted(sharded.glob("model-*.safetensors"))[0]
    os.truncate(path, path.stat().st_size - 1)
    assert f"{path}: truncated" in refused(sharded)


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    message = refused(folder, UnsupportedModelError)
    assert "pytorch_model.bin, a pickle" in message
    assert "safetensors" in message


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    assert f"has neither {WEIGHTS} nor {INDEX}" in refused(folder)


def test_a_quantized_checkpoint_is_not_a_source(folder: Path) -> None:
    edit_json(folder / "config.json", quantization_config={"quant_method": "gptq"})
    assert "quantization_config" in refused(folder, UnsupportedModelError)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "expected an object"),
        (b'{"a": 1, "a": 2}', "'a' appears twice"),
        (b'{"rms_norm_eps": NaN}', "NaN is not a JSON number"),
        (b"\xff", "not UTF-8"),
        (b" " * (5 << 20), "expected at most"),
        (b"[" * 200_000, "not valid JSON"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not valid JSON"),
    ],
    ids=range(9),
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_damaged_config_is_named(folder: Path, name: str, content: bytes, expected: str) -> None:
    (folder / name).write_bytes(content)
    message = refused(folder)
    assert message.startswith(str(folder / name))
    assert expected in message


def test_a_config_that_is_not_a_regular_file(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    assert "config.json: not a regular file" in refused(folder)


def test_no_file_stays_open(sharded: Path) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = open_files()
    opened = HfFolder(sharded)
    assert open_files() > before
    opened.close()
    opened.close()
    assert open_files() == before
    edit_json(sharded / "config.json", vocab_size=513)
    refused(sharded)
    assert open_files() == before
