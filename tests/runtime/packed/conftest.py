"""A small model, the file that its packed weights are kept in, and a cache folder of the user."""

from collections.abc import Callable
from pathlib import Path

import pytest
from decoders import Weights, load, quantized
from packed_files import DIGEST

from nybble.runtime.packed_cache import cache_files, load_packed


@pytest.fixture(scope="module")
def weights(make_tiny_model: Callable[..., Path]) -> Weights:
    """Small, so that every part of the file is soon hit."""
    path = make_tiny_model("qwen2", vocab_size=64, num_hidden_layers=2, intermediate_size=64)
    return quantized(load(path), 4, 64, False, True)


@pytest.fixture(scope="module")
def good(weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of `weights`."""
    folder = tmp_path_factory.mktemp("good")
    load_packed(folder, DIGEST, weights.spec, lambda: weights)
    return cache_files(folder, DIGEST)[0].read_bytes()


@pytest.fixture(autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the user that is not there yet."""
    folder = tmp_path_factory.mktemp("home") / "not yet" / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder
