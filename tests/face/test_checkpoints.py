"""Quantized checkpoints that others made run as they are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bnb_checkpoints import INT8_SETTINGS, NF4_SETTINGS, write_bnb_checkpoint
from checkpoints import Layer, write_checkpoint

from nybble import LLM, SamplingParams, SettingError

IDS = list(range(3, 60))
CASES: dict[str, tuple[dict[str, Any], Layer]] = {
    "gptq, 3 bits, desc_act": (
        {"quant_method": "gptq", "bits": 3, "group_size": 32, "desc_act": True, "sym": True},
        Layer(3, 32, True, True),
    ),
    "gptq_v2, 4 bits, asymmetric": (
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "checkpoint_format": "gptq_v2"},
        Layer(4, 64, False),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        Layer(4, 32, False),
    ),
}


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def reference(source: Path, meant: dict[str, np.ndarray]) -> np.ndarray:
    """transformers' log-probabilities of `IDS` with these weights, [len(IDS) - 1]."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    state = {name: torch.from_numpy(np.array(values)) for name, values in meant.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0].log_softmax(-1)
    return np.asarray(logits[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0])


BNB: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nf4": (NF4_SETTINGS, {"blocksize": 128}),
    "nf4, scales quantized": (NF4_SETTINGS, {"double": True}),
    "int8": (INT8_SETTINGS, {}),
}


@pytest.mark.parametrize("executor", ["cpu", "ort"])
@pytest.mark.parametrize("case", [*CASES, *BNB])
def test_it_computes_what_its_weights_mean(
    make_tiny_model: Callable[..., Path], tmp_path: Path, case: str, executor: str
) -> None:
    if case in BNB:
        source = make_tiny_model(hidden_size=128, intermediate_size=128, num_attention_heads=8)
        meant = write_bnb_checkpoint(source, tmp_path / "q", BNB[case][0], **BNB[case][1])
    else:
        source, (settings, layer) = make_tiny_model(), CASES[case]
        meant = write_checkpoint(source, tmp_path / "q", settings, lambda stem: layer)
    expected = reference(source, meant)
    with LLM(tmp_path / "q", executor=executor, threads=1, max_model_len=128) as llm:
        scores = llm.score(IDS).logprobs[1:]
        answers = [llm.generate(IDS, SamplingParams(max_tokens=8, ignore_eos=True)).token_ids for _ in "ab"]
    assert answers[0] == answers[1]
    # Activations in 8 bits, and the head's weights; another weight changes them by 1 and more. Those of
    # bitsandbytes are of a wider model, and our kernels have NF4's code book in whole 127ths.
    error = np.abs(np.array(scores, np.float32) - expected)
    assert error.mean() < (0.04 if case in BNB else 0.02)
    assert error.max() < (0.2 if case in BNB else 0.1)


def test_packed_weights_are_kept(
    make_tiny_model: Callable[..., Path], tmp_path: Path, nybble: Callable[..., Any]
) -> None:
    settings, layer = CASES["awq"]
    write_checkpoint(make_tiny_model(), tmp_path / "q", settings, lambda stem: layer)
    command = (
        "run",
        tmp_path / "q",
        "a b c",
        "--max-tokens",
        "4",
        "--ignore-eos",
        "--raw",
        "--threads",
        "1",
    )
    first = nybble(*command)
    assert first.code == 0, first.err
    [packed] = (tmp_path / "cache" / "nybble").glob("*packed.bin")
    made = packed.stat().st_mtime_ns
    second = nybble(*command)
    assert (second.code, second.out) == (0, first.out)
    assert packed.stat().st_mtime_ns == made
    assert not (tmp_path / "q" / "cache").exists()


def test_there_is_no_onnx_half(make_tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    settings, layer = CASES["awq"]
    write_checkpoint(make_tiny_model(), tmp_path / "q", settings, lambda stem: layer)
    with pytest.raises(SettingError, match="format is 'onnx', but the folder is a checkpoint"):
        LLM(tmp_path / "q", format="onnx")
