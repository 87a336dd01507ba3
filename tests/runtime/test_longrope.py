"""longrope's two sets of frequencies: one is chosen at load, by the longest context, and transformers chooses
by the sequence, so each choice is compared with sequences that have transformers choose it, too."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import LONGROPE, Weights, load, mean_kl, paged_logits, quantized, read_config, some_ids
from decoders import transformers_logits as theirs

from nybble import LLM
from nybble.errors import ModelFormatError
from nybble.export.onnx_reader import OnnxWeights
from nybble.export.onnx_writer import write_onnx
from nybble.kvcache import KvCache
from nybble.runtime.cpu_executor import CpuExecutor
from nybble.runtime.ort_executor import OrtExecutor
from nybble.runtime.prefix_file import PrefixFile
from nybble.runtime.saved_prefix import prefix_key, save_prefix

ORIGINAL, CONTEXT = 64, 512
# The longest context to load for, and how many tokens are run.
CHOICES = {"short": (ORIGINAL, ORIGINAL), "long": (CONTEXT, ORIGINAL + 30)}


@pytest.fixture(scope="module")
def path(make_tiny_model: Callable[..., Path]) -> Path:
    changes = {"original_max_position_embeddings": ORIGINAL, "rope_parameters": LONGROPE}
    return make_tiny_model("phi3", max_position_embeddings=CONTEXT, **changes)


@pytest.fixture(scope="module")
def weights(path: Path) -> Weights:
    return quantized(load(path), 4, 32, True, False)


def test_the_choices_are_not_the_same(path: Path, weights: Weights) -> None:
    """transformers gives the first tokens other logits when they are part of a longer sequence."""
    ids = some_ids(weights.spec.vocab_size, ORIGINAL + 1)
    short, long = theirs(read_config(path), weights, ids[:-1]), theirs(read_config(path), weights, ids)
    assert mean_kl(short, long[:-1]) > 0.05


@pytest.mark.parametrize("choice", CHOICES)
def test_cpu_executor(choice: str, path: Path, weights: Weights) -> None:
    max_position, length = CHOICES[choice]
    ids = some_ids(weights.spec.vocab_size, length)
    executor = CpuExecutor(weights, threads=1, max_position=max_position)
    found = paged_logits(executor, ids, length // 2)
    executor.close()
    assert mean_kl(theirs(read_config(path), weights, ids), found) < 5e-3


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("from_file", [False, True])
def test_ort_executor(choice: str, from_file: bool, path: Path, weights: Weights, tmp_path: Path) -> None:
    max_position, length = CHOICES[choice]
    ids = some_ids(weights.spec.vocab_size, length)
    options: dict[str, Any] = {"threads": 1, "accuracy_level": 0, "max_position": max_position}
    if from_file:
        graph, _ = write_onnx(weights, tmp_path)
        assert OnnxWeights(graph).spec == weights.spec
        executor = OrtExecutor.from_file(graph, **options)
    else:
        executor = OrtExecutor.from_weights(weights, **options)
    with executor:
        found = paged_logits(executor, ids, length // 2)
    assert np.abs(found - theirs(read_config(path), weights, ids)).max() < 2e-3


@pytest.fixture(scope="module")
def artifact(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from nybble import quantize

    out = tmp_path_factory.mktemp("longrope") / "artifact"
    quantize(path, out, method="rtn", group_size=32)
    return out


@pytest.mark.parametrize("executor", ["cpu", "ort"])
def test_max_model_len_chooses(artifact: Path, executor: str) -> None:
    ids = some_ids(512, 38)
    found = {}
    for context in (40, ORIGINAL, ORIGINAL + 1, CONTEXT):
        with LLM(artifact, executor=executor, threads=1, max_model_len=context, device="laptop-cpu") as llm:
            found[context] = llm.score(ids).logprobs
    assert found[40] == found[ORIGINAL]
    assert found[CONTEXT] == found[ORIGINAL + 1]
    assert found[ORIGINAL] != found[CONTEXT]


@pytest.fixture(scope="module", params=["cpu", "ort"])
def executors(weights: Weights, request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    contexts = {"short": ORIGINAL, "short again": 50, "long": CONTEXT}
    if request.param == "cpu":
        made: Any = {n: CpuExecutor(weights, threads=1, max_position=c) for n, c in contexts.items()}
    else:
        made = {n: OrtExecutor.from_weights(weights, threads=1, max_position=c) for n, c in contexts.items()}
    yield made
    for executor in made.values():
        executor.close()


def test_a_prefix_saved_with_one_choice_is_refused_by_the_other(
    executors: dict[str, Any], tmp_path: Path
) -> None:
    ids, digest = some_ids(512, 32), "5a" * 32
    for executor in executors.values():
        executor.allocate_kv(4, 16, "f16")
    cache = KvCache(4, 16, (None,))
    blocks = cache.sequence()
    blocks.append(len(ids))
    cache.insert(blocks, ids, len(ids))
    file = tmp_path / "some.prefix"
    save_prefix(file, digest, executors["short"], cache, ids)
    with PrefixFile(file, prefix_key(executors["short again"], digest)) as saved:
        assert saved.tokens == tuple(ids)
    with pytest.raises(ModelFormatError, match="rope"):
        PrefixFile(file, prefix_key(executors["long"], digest))
