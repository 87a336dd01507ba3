"""Tokenizers of the kinds that models have, and a decoder in numpy to drive the engine with."""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from token_rules import RuleInPython
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Backend

from nybble.models.spec import ModelSpec, RopeSpec
from nybble.runtime.batch import Batch
from nybble.runtime.engine import Engine
from nybble.runtime.executor import NO_NUMBERS, KvLayout
from nybble.runtime.sampler import TokenRule
from nybble.runtime.tokenizer import Tokenizer

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


def _train(kind: str) -> Backend:
    tokenizer = Backend(models.BPE(byte_fallback=kind != "byte_level"))
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
    tokenizer = Backend.from_str(json.dumps(raw))
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
    """`tokenizer.json` by kind: byte-level BPE, and BPE with byte fallback as SentencePiece has it, twice."""
    return {kind: _train(kind).to_str().encode() for kind in KINDS}


class NumpyExecutor:
    """A small decoder in numpy, in float64, that keeps its keys and values in pages and reads them back
    through the block table only: a wrong slot or table changes its tokens. Each token is computed by
    itself, so its logits are the same bits in any batch.

    Layer l belongs to window group l % G. Unused pages hold NaN.
    """

    def __init__(
        self, vocab_size: int = 64, windows: tuple[int | None, ...] = (None, None), seed: int = 0
    ) -> None:
        layers, self.size = len(windows), 8
        self.spec = ModelSpec(
            model_type="numpy",
            vocab_size=vocab_size,
            hidden_size=self.size,
            intermediate_size=self.size,
            num_layers=layers,
            num_heads=1,
            num_kv_heads=1,
            head_dim=self.size,
            max_position=4096,
            norm_eps=1e-5,
            rope=RopeSpec(theta=10000.0, rotary_dim=self.size),
            sliding_windows=windows,
        )
        generator = np.random.default_rng(seed)
        self.embedding = generator.normal(size=(vocab_size, self.size))
        self.weights = generator.normal(size=(layers, 4, self.size, self.size)) * self.size**-0.5
        self.steps: list[Batch] = []
        self.fail_at: dict[int, BaseException] = {}
        self.closed = False
        self.weight_bytes = self.weights.nbytes
        self.skipped_bytes = 100
        self.decode_steps = 8
        self.runs: list[int] = []  # steps of each call of `decode`
        self.hurries = False

    def allocate_kv(self, num_blocks: int, page_size: int, kv_dtype: str = "f32") -> None:
        groups = len(self.spec.window_groups)
        self.cache = np.full((2, self.spec.num_layers, num_blocks * page_size, self.size), np.nan)
        self.groups = [self.spec.window_groups.index(w) for w in self.spec.sliding_windows]
        page_bytes = 2 * page_size * self.size * 8
        group_bytes = tuple(self.groups.count(group) * page_bytes for group in range(groups))
        self.kv_layout = KvLayout(num_blocks, page_size, "f32", sum(group_bytes), group_bytes)
        assert max(self.groups) < groups

    @property
    def best_tokens(self) -> None:
        return None

    def step(self, batch: Batch) -> NDArray[np.float32]:
        self.steps.append(batch)
        if (error := self.fail_at.get(len(self.steps))) is not None:
            raise error
        hidden = np.zeros((len(batch.token_ids), self.size))
        positions = np.zeros(len(batch.token_ids), int)
        owners = np.zeros(len(batch.token_ids), int)
        for b, (begin, end) in enumerate(pairwise(batch.cu_seqlens.tolist())):
            positions[begin:end] = batch.past_lens[b] + np.arange(end - begin)
            owners[begin:end] = b
        for t, token in enumerate(batch.token_ids):
            hidden[t] = self.embed(int(token), int(positions[t]))
        for layer, group in enumerate(self.groups):
            q, k, v, o = self.weights[layer]
            for t in range(len(hidden)):
                slot = batch.slot_mapping[group, t]
                self.cache[0, layer, slot], self.cache[1, layer, slot] = k @ hidden[t], v @ hidden[t]
            for t in range(len(hidden)):
                window = self.spec.sliding_windows[layer]
                where = np.arange(positions[t] + 1)[-(window or 0) :]
                pages = batch.block_table[group, owners[t], where // self.kv_layout.page_size]
                assert (pages >= 0).all()
                slots = pages * self.kv_layout.page_size + where % self.kv_layout.page_size
                keys, values = self.cache[0, layer, slots], self.cache[1, layer, slots]
                hidden[t] = hidden[t] + o @ attend(
                    q @ hidden[t], keys, values, self.spec.sliding_windows[layer]
                )
        logits = (hidden[batch.logit_rows] @ self.embedding.T * 2).astype(np.float32)
        if batch.best_only:
            logits[logits < logits.max(axis=1, keepdims=True)] = -np.inf
        return logits

    def decode(
        self,
        batch: Batch,
        steps: int,
        ends: Collection[int],
        seconds: float,
        rules: Sequence[TokenRule] = (),
    ) -> list[list[int]]:
        """Steps as the contract has them, each a `step` of its own."""
        assert batch.best_only == (not rules)
        assert 1 < steps <= self.decode_steps
        assert seconds > 0
        assert (batch.logit_rows == np.arange(len(batch.past_lens))).all()
        size = self.kv_layout.page_size
        tokens: list[list[int]] = []
        choices = [RuleInPython(rule) for rule in rules]
        self.runs.append(0)
        while True:
            logits = self.step(batch)
            self.runs[-1] += 1
            finite = np.isfinite(logits.max(axis=1))
            best = np.where(finite, logits.argmax(axis=1), NO_NUMBERS).tolist()
            for i, choice in enumerate(choices):
                if finite[i]:
                    best[i] = choice.next(logits[i])
            tokens.append(best)
            ended = min(best) < 0 or not set(ends).isdisjoint(best)
            if ended or self.hurries or len(tokens) == steps:
                return tokens
            past = batch.past_lens + 1
            pages = np.take_along_axis(batch.block_table, np.array(past // size)[None, :, None], axis=2)
            batch = replace(
                batch,
                token_ids=np.array(tokens[-1], np.int32),
                past_lens=past,
                slot_mapping=pages[:, :, 0] * size + past % size,
            )

    def hurry(self, wanted: bool) -> None:
        self.hurries = wanted

    def copy_blocks(self, src: NDArray[np.int32], dst: NDArray[np.int32], group: int = 0) -> None:
        self.write_blocks(dst, self.read_blocks(src, group), group)

    def read_blocks(self, ids: NDArray[np.int32], group: int = 0) -> bytes:
        return self._pages(group)[ids].tobytes()

    def write_blocks(self, ids: NDArray[np.int32], data: bytes, group: int = 0) -> None:
        pages = self._pages(group)
        pages[ids] = np.frombuffer(data).reshape(len(ids), *pages.shape[1:])
        layers = [layer for layer, of in enumerate(self.groups) if of == group]
        self.cache[:, layers] = np.moveaxis(pages, 0, 2).reshape(2, len(layers), -1, self.size)

    def _pages(self, group: int) -> NDArray[np.float64]:
        """A copy of what a group's pages hold, page by page."""
        layers = [layer for layer, of in enumerate(self.groups) if of == group]
        shape = (2, len(layers), -1, self.kv_layout.page_size, self.size)
        return np.ascontiguousarray(np.moveaxis(self.cache[:, layers].reshape(shape), 2, 0))

    def swap_is_cheaper(self, tokens: int) -> bool:
        return False

    def embed(self, token: int, position: int) -> NDArray[np.float64]:
        return self.embedding[token] + np.sin(position * 1.7 ** -np.arange(self.size))

    def reference(self, tokens: list[int]) -> NDArray[np.float32]:
        """The logits of every position of a text, without pages: [n, vocab]."""
        hidden = np.array([self.embed(token, p) for p, token in enumerate(tokens)])
        for layer, window in enumerate(self.spec.sliding_windows):
            q, k, v, o = self.weights[layer]
            keys, values = np.array([k @ h for h in hidden]), np.array([v @ h for h in hidden])
            hidden = np.array(
                [h + o @ attend(q @ h, keys[: p + 1], values[: p + 1], window) for p, h in enumerate(hidden)]
            )
        return (hidden @ self.embedding.T * 2).astype(np.float32)

    def close(self) -> None:
        self.closed = True


def attend(
    query: NDArray[np.float64], keys: NDArray[np.float64], values: NDArray[np.float64], window: int | None
) -> NDArray[np.float64]:
    if window is not None:
        keys, values = keys[-window:], values[-window:]
    scores = np.array([query @ key for key in keys]) * len(query) ** -0.5
    weights = np.exp(scores - scores.max())
    return (weights[:, None] * values).sum(0) / weights.sum()


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """64 tokens: letters, an end token (id 0), and the bytes of an emoji apart."""
    letters = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ.,"
    alphabet = dict(zip("🙂".encode(), bytes_to_unicode("🙂".encode()), strict=True))
    vocab = {"<end>": 0}
    for text in [*("Ġ" if c == " " else c for c in letters), *alphabet.values()]:
        vocab.setdefault(text, len(vocab))
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer({"tokenizer.json": backend.to_str().encode()})


def bytes_to_unicode(raw: bytes) -> str:
    """The characters that stand for bytes in a byte-level vocabulary."""
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(raw.decode())
    return "".join(text for text, _ in pieces)


@pytest.fixture
def make_executor() -> Callable[..., NumpyExecutor]:
    """`make_executor(num_blocks, page_size, **options)`: a `NumpyExecutor` with its cache."""

    def make(num_blocks: int = 64, page_size: int = 4, **options: Any) -> NumpyExecutor:
        executor = NumpyExecutor(**options)
        executor.allocate_kv(num_blocks, page_size)
        return executor

    return make


@pytest.fixture
def make_engine(make_executor: Callable[..., Any], byte_tokenizer: Tokenizer) -> Callable[..., Engine]:
    def make(executor: Any = None, **options: Any) -> Engine:
        settings = {"max_model_len": 200, "max_batch_tokens": 16, "eos_token_ids": [0], **options}
        return Engine(executor or make_executor(), byte_tokenizer, **settings)

    return make
