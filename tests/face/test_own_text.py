"""`--calibration self`: what a model itself writes."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nybble import quantize
from nybble.devices import resolve_device
from nybble.errors import CalibrationError, DoesNotFitError
from nybble.models.open import open_source
from nybble.own_text import BEGINNINGS, PROMPTS, RoundedSource, _open, own_text
from nybble.quant.packing import quantize_head
from nybble.quant.recipe import Recipe
from nybble.runtime.tokenizer import Tokenizer


def written(path: Path, tokens: int, seed: int = 0) -> str:
    source = open_source(path)
    try:
        return own_text(source, Tokenizer(source.tokenizer_files), tokens, seed=seed, threads=1)
    finally:
        source.close()


def test_it_is_long_enough_of_both_kinds_and_the_same_each_time(make_tiny_model: Callable[..., Path]) -> None:
    path = make_tiny_model(max_position_embeddings=192)
    text = written(path, 2500)
    source = open_source(path)
    tokenizer = Tokenizer(source.tokenizer_files)
    source.close()
    assert 2500 <= len(tokenizer.encode(text, add_special_tokens=False, parse_special=True)) < 5000
    assert text.startswith(f"<|im_start|>user\n{PROMPTS[0]}<|im_end|>\n<|im_start|>assistant\n")
    assert f"\n\n{BEGINNINGS[0]}" in text
    assert written(path, 2500) == text
    assert written(path, 2500, seed=1) != text


def test_without_a_chat_template_it_goes_on_from_beginnings(
    make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copytree(make_tiny_model(max_position_embeddings=192), tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").unlink()
    text = written(tmp_path / "m", 100)
    assert text.startswith(BEGINNINGS[0])
    assert PROMPTS[0] not in text


def test_a_context_that_is_too_short(make_tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(CalibrationError, match="has a context of 128 tokens, too short"):
        written(make_tiny_model(max_position_embeddings=128), 100)


def test_the_model_runs_in_8_bits(make_tiny_model: Callable[..., Path]) -> None:
    source = open_source(make_tiny_model())
    rounded = RoundedSource(source)
    for name, shape in source.spec.tensors().items():
        matrix, values = rounded.matrix(name), source.tensor(name)
        if len(shape) == 1:
            assert matrix is None
            assert np.array_equal(rounded.tensor(name), values)  # type: ignore[arg-type]
        else:
            assert matrix is not None
            assert np.array_equal(matrix.whole().dequantize(), quantize_head(values).dequantize())
    source.close()


def test_a_mixture_of_experts_writes_in_8_bits_with_a_router_of_floats(
    make_tiny_model: Callable[..., Path],
) -> None:
    path = make_tiny_model(
        "qwen2_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, max_position_embeddings=192,
    )  # fmt: skip
    source = open_source(path)
    router = "model.layers.1.mlp.gate.weight"
    assert np.array_equal(RoundedSource(source).tensor(router), source.tensor(router))  # type: ignore[arg-type]
    source.close()
    assert written(path, 100)


def with_budget(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    profile = replace(resolve_device("auto"), memory_budget=budget)
    monkeypatch.setattr("nybble.own_text.resolve_device", lambda name: profile)


def test_where_memory_is_short_fewer_run_at_once_and_write_the_same(
    make_tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny_model(max_position_embeddings=192, num_key_value_heads=4, head_dim=64)
    text = written(path, 1000)
    with_budget(monkeypatch, 1)
    with pytest.raises(
        DoesNotFitError, match="own calibration text, for which the model in 8 bits needs"
    ) as no:
        written(path, 1000)
    assert "\n" not in str(no.value)
    needed = re.search(r"needs ([\d.]+) MB", str(no.value))
    assert needed
    with_budget(monkeypatch, int(float(needed[1]) * 1e6) + 2_000_000)
    source = open_source(path)
    with _open(source, Tokenizer(source.tokenizer_files), 192, 1) as llm:
        assert 1 < llm._loaded.max_sequences < 32
        layout = llm._loaded.executor.kv_layout
        assert layout.num_blocks == llm._loaded.max_sequences * 192 // 16
    source.close()
    assert written(path, 1000) == text


def test_it_is_the_same_on_another_day(make_tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Where the chat template writes the date, also around messages of a file."""
    shutil.copytree(make_tiny_model(max_position_embeddings=192), tmp_path / "m")
    template = tmp_path / "m" / "chat_template.jinja"
    template.write_text("{{ strftime_now('%H:%M:%S %f') }} " + template.read_text())
    (tmp_path / "chats.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "All that is gold does not glitter. " * 40}]})
    )
    settings: Any = {"samples": 2, "seq_len": 32, "formats": ["gptq"], "threads": 1, "recipe": Recipe()}
    for text in ("self", tmp_path / "chats.jsonl"):
        one, other = (
            quantize(tmp_path / "m", tmp_path / "out", calibration=text, overwrite=True, **settings)
            for _ in range(2)
        )
        assert one.calibration_digest == other.calibration_digest


def test_a_mixture_calibrates(
    make_tiny_model: Callable[..., Path], tmp_path: Path, nybble: Callable[..., Any]
) -> None:
    path = make_tiny_model(max_position_embeddings=192)
    settings: Any = {"samples": 6, "seq_len": 32, "formats": ["gptq"], "threads": 1}
    one = quantize(path, tmp_path / "one", calibration=["default=2", "self"], **settings)
    other = nybble(
        "quantize", path, "-o", tmp_path / "other", "--calibration", "default=2", "--calibration", "self",
        "--samples", "6", "--seq-len", "32", "--formats", "gptq", "--threads", "1",
    )  # fmt: skip
    assert other.code == 0, other.err
    assert (tmp_path / "one" / "nybble.json").read_bytes() == (
        tmp_path / "other" / "nybble.json"
    ).read_bytes()
    plain = quantize(path, tmp_path / "plain", **settings)
    assert one.calibration_digest != plain.calibration_digest
