"""The genai graph, stepped with past and present, computes what the paged graph does."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import (
    CASES,
    PROMPT,
    UNUSUAL,
    Weights,
    load,
    paged_logits,
    quantized,
    some_ids,
)
from numpy.typing import NDArray

from nybble.errors import ModelFormatError, UnsupportedModelError
from nybble.export.genai_config import INPUT_NAMES, OUTPUT_NAMES
from nybble.export.onnx_writer import write_onnx
from nybble.runtime.ort_executor import OrtExecutor
from nybble.runtime.ort_genai import GenaiGraph
from nybble.runtime.ort_session import make_session

BOUND = 2e-3


def random_weights(head_dim: int = 24) -> Weights:
    spec = replace(UNUSUAL, head_dim=head_dim)
    rng = np.random.default_rng(5)
    tensors: Any = {
        name: (rng.normal(size=shape) * (0.2 if len(shape) == 2 else 1)).astype(np.float32)
        for name, shape in spec.tensors().items()
    }
    return Weights(spec, tensors)


def written(weights: Weights, folder: Path) -> tuple[Path, Path]:
    """Both graphs."""
    paged, genai, _ = write_onnx(weights, folder, contracts=("paged", "genai"))
    return paged, genai


def stepped(graph: GenaiGraph, ids: list[int], prompt: int = PROMPT, chunk: int = 1) -> NDArray[np.float32]:
    """Logits after the prompt, and after every `chunk` tokens that follow."""
    graph.reset()
    rows = [graph.step(ids[:prompt])]
    rows += [graph.step(ids[i : i + chunk]) for i in range(prompt, len(ids), chunk)]
    return np.stack(rows)


def assert_graphs_agree(weights: Weights, folder: Path) -> None:
    paged, genai = written(weights, folder)
    ids = some_ids(weights.spec.vocab_size)
    with OrtExecutor.from_file(paged, threads=1, accuracy_level=0) as executor:
        expected = paged_logits(executor, ids)[PROMPT - 1 :]
    found = stepped(GenaiGraph(genai, threads=1, accuracy_level=0), ids)
    assert found.shape == expected.shape
    assert np.abs(expected).max() > 0.5
    assert np.abs(found - expected).max() < BOUND


@pytest.mark.parametrize("case", [case for case in CASES if "odd sizes" not in case])
def test_every_family_gives_the_paged_graphs_logits(
    case: str, make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    family, overrides = CASES[case]
    assert_graphs_agree(load(make_tiny_model(family, **overrides)), tmp_path)


def test_partial_rotation_soft_caps_windows_and_odd_sizes(tmp_path: Path) -> None:
    assert_graphs_agree(random_weights(), tmp_path)


@pytest.mark.parametrize(("bits", "symmetric", "permuted"), [(4, False, True), (8, True, False)])
def test_quantized_weights(bits: int, symmetric: bool, permuted: bool, tmp_path: Path) -> None:
    assert_graphs_agree(quantized(random_weights(), bits, 32, symmetric, permuted), tmp_path)


@pytest.fixture(scope="module")
def genai(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows of 9 tokens in two layers of three."""
    return written(quantized(random_weights(), 4, 32, True, False), tmp_path_factory.mktemp("genai"))[1]


@pytest.mark.parametrize("prompt", [1, 8, 9, 10, 95])
def test_logits_do_not_depend_on_where_the_prompt_ends(prompt: int, genai: Path) -> None:
    graph = GenaiGraph(genai, threads=1, accuracy_level=0)
    ids = some_ids(graph.spec.vocab_size)
    expected = stepped(graph, ids, 1)
    found = stepped(graph, ids, prompt)
    assert np.abs(found - expected[prompt - 1 :]).max() < 1e-4


def test_a_sequence_goes_on_in_chunks(genai: Path) -> None:
    graph = GenaiGraph(genai, threads=1, accuracy_level=0)
    ids = some_ids(graph.spec.vocab_size, 60)
    expected = stepped(graph, ids, 1)
    assert np.abs(stepped(graph, ids, 15, 15) - expected[14::15]).max() < 1e-4


def session_of(path: Path) -> Any:
    return make_session(
        path.read_bytes(), providers=[("CPUExecutionProvider", {})], threads=1, folder=str(path.parent)
    )


def test_a_shorter_sequence_of_a_batch_is_padded_at_its_end(genai: Path) -> None:
    """As onnxruntime-genai does: the mask and the positions of the padding are zeros."""
    graph = GenaiGraph(genai, threads=1)
    spec, session = graph.spec, session_of(genai)
    texts = [some_ids(spec.vocab_size, 20), some_ids(spec.vocab_size, 33)[20:]]
    length = max(map(len, texts))
    mask = np.array([[1] * len(t) + [0] * (length - len(t)) for t in texts], np.int64)
    positions = np.array([[*range(len(t))] + [0] * (length - len(t)) for t in texts], np.int64)
    ids = np.array([t + [1] * (length - len(t)) for t in texts], np.int64)
    cache = [np.zeros((2, spec.num_kv_heads, 0, spec.head_dim), np.float32)] * (2 * spec.num_layers)
    kinds = [(kind, layer) for layer in range(spec.num_layers) for kind in ("key", "value")]
    past = [INPUT_NAMES[f"past_{kind}_names"] % layer for kind, layer in kinds]
    present = [OUTPUT_NAMES[f"present_{kind}_names"] % layer for kind, layer in kinds]
    expected = [stepped(GenaiGraph(genai, threads=1), [*t, 7, 8, 9], len(t)) for t in texts]
    for step in range(4):
        logits, *cache = session.run(
            ["logits", *present],
            {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
            | dict(zip(past, cache, strict=True)),
        )
        assert logits.shape == (2, 1, spec.vocab_size)
        for row in range(2):
            # Activations are rounded, and a row of a batch may be so another way.
            assert np.abs(logits[row, 0] - expected[row][step]).max() < 0.1
        ids = np.full((2, 1), 7 + step, np.int64)
        positions = np.array([[len(t) + step] for t in texts], np.int64)
        mask = np.concatenate([mask, np.ones((2, 1), np.int64)], axis=1)


def test_past_and_present_may_be_one_buffer_as_long_as_the_context(genai: Path) -> None:
    """As onnxruntime-genai runs it: nothing is copied, and the mask is as long as the buffer too."""
    import onnxruntime as ort

    graph = GenaiGraph(genai, threads=1, accuracy_level=None)
    spec, session, capacity = graph.spec, session_of(genai), 128
    ids = some_ids(spec.vocab_size, 40)
    expected = stepped(graph, ids, 30)
    arrays = [
        np.zeros((1, spec.num_kv_heads, capacity, spec.head_dim), np.float32)
        for _ in range(2 * spec.num_layers)
    ]
    caches = [ort.OrtValue.ortvalue_from_numpy(array) for array in arrays]
    kinds = [(kind, layer) for layer in range(spec.num_layers) for kind in ("key", "value")]
    done = 0
    for row, new in enumerate([ids[:30], *([i] for i in ids[30:])]):
        binding = session.io_binding()
        mask = np.zeros((1, capacity), np.int64)
        mask[:, : done + len(new)] = 1
        binding.bind_cpu_input("input_ids", np.array([new], np.int64))
        binding.bind_cpu_input("attention_mask", mask)
        binding.bind_cpu_input("position_ids", np.arange(done, done + len(new), dtype=np.int64)[None])
        for (kind, layer), cache in zip(kinds, caches, strict=True):
            binding.bind_ortvalue_input(INPUT_NAMES[f"past_{kind}_names"] % layer, cache)
            binding.bind_ortvalue_output(OUTPUT_NAMES[f"present_{kind}_names"] % layer, cache)
        binding.bind_output("logits")
        session.run_with_iobinding(binding)
        found = binding.copy_outputs_to_cpu()[-1]
        done += len(new)
        assert np.abs(found[0, 0] - expected[row]).max() < BOUND
        assert all(np.any(array[:, :, done - 1]) and not np.any(array[:, :, done:]) for array in arrays)


def test_heads_that_the_operator_cannot_take_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'genai': head_dim is 20; .* multiples of 8"):
        written(random_weights(head_dim=20), tmp_path)


def test_each_executor_refuses_the_others_graph(genai: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"genai\.onnx: has the genai contract"):
        OrtExecutor.from_file(genai)
    with pytest.raises(ModelFormatError, match=r"decoder\.onnx: has the paged contract"):
        GenaiGraph(genai.with_name("decoder.onnx"))
