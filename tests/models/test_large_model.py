"""The model that benchmarks compare streaming on, as a GGUF file, at a small size."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from nybble.models.gguf_source import open_gguf
from nybble.models.spec import RopeSpec

pytest.importorskip("gguf")


def test_its_gguf_file_has_every_tensor(tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "large_model.py"
    found = importlib.util.spec_from_file_location("large_model", path)
    assert found is not None
    assert found.loader is not None
    large_model = importlib.util.module_from_spec(found)
    found.loader.exec_module(large_model)
    small = replace(
        large_model.SPEC, vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=16, rope=RopeSpec(theta=1e6, rotary_dim=16),
    )  # fmt: skip
    large_model.SPEC = small
    large_model.write_gguf(tmp_path / "model.gguf")
    with open_gguf(tmp_path / "model.gguf", "model.gguf") as source:
        assert source.spec == replace(small, model_type="llama", qkv_bias=False, sliding_windows=(None, None))
        for name, shape in source.spec.tensors().items():
            assert source.tensor(name).shape == shape
