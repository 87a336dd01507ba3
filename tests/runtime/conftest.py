"""Tokenizers of the kinds that models have, trained here on Python's own help texts."""

import json
from pydoc_data.topics import topics

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SPECIAL = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|user|>",
    "<|system|>",
    "<|assistant|>",
]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def _train(kind: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=kind != "byte_level"))
    alphabet: list[str] = []
    first: list[str] = []
    if kind == "byte_level":
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        first = [f"<0x{byte:02X}>" for byte in range(256)]
        if kind == "metaspace":
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        else:  # the older form of the same vocabulary: the space is the normalizer's
            tokenizer.normalizer = normalizers.Sequence(
                [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            )
        steps = [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
        tokenizer.decoder = decoders.Sequence(steps)
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=first, initial_alphabet=alphabet, show_progress=False
    )
    texts = [topics[name] for name in sorted(topics)[:8]]
    if kind != "byte_level":
        texts = [word for text in texts for word in text.split(" ")]
    tokenizer.train_from_iterator(texts, trainer)
    raw = json.loads(tokenizer.to_str())
    raw["added_tokens"] = []  # byte tokens are plain vocabulary
    tokenizer = Tokenizer.from_str(json.dumps(raw))
    tokenizer.add_special_tokens([*SPECIAL, AddedToken("<|end|>", rstrip=True, normalized=False)])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in ADDED])
    if kind != "byte_level":
        begin = tokenizer.token_to_id("<s>")
        begins = [("<s>", begin)]
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=begins)
    return tokenizer


KINDS = ("byte_level", "metaspace", "prepend")


@pytest.fixture(scope="session")
def tokenizer_json() -> dict[str, bytes]:
    """`tokenizer.json` by kind: byte-level BPE, and SentencePiece-like BPE with byte fallback in two forms."""
    return {kind: _train(kind).to_str().encode() for kind in KINDS}
