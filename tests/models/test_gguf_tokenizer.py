"""Tokenizers recovered from GGUF metadata: llama.cpp's token ids, and nothing in a file taken on trust.

The golden ids are llama.cpp's own, written by `make_llamacpp_golden.py`. The vocabularies were trained
without a pre-tokenizer, so that a boundary that is missed or invented changes the ids.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from nybble.errors import ModelFormatError, UnsupportedModelError
from nybble.models.gguf_pretokenizers import PRETOKENIZERS
from nybble.models.gguf_source import open_gguf

KINDS = tuple({kind: name for name, kind in reversed(PRETOKENIZERS.items())}.values())
SENTENCEPIECE = ("sentencepiece", "sentencepiece-bare")


def tokenizer_of(files: Mapping[str, bytes], special: bool) -> Tokenizer:
    """`special`: whether control tokens are found in the text."""
    tokenizer: Tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    tokenizer.encode_special_tokens = not special
    return tokenizer


@pytest.fixture(scope="module")
def files_of(
    gguf_samples: ModuleType, smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Mapping[str, bytes]]:
    """The tokenizer files recovered from the sample of that name."""
    folder = tmp_path_factory.mktemp("tokenizers")
    made: dict[str, Mapping[str, bytes]] = {}

    def make(name: str) -> Mapping[str, bytes]:
        if name not in made:
            with open_gguf(sample_path(gguf_samples, smollm2_gguf, folder, name), name) as source:
                made[name] = source.tokenizer_files
        return made[name]

    return make


def sample_path(samples: ModuleType, smollm2_gguf: Path, folder: Path, name: str) -> Path:
    path: Path
    if name == "smollm2":
        path = smollm2_gguf
    elif name in samples.SENTENCEPIECE_VARIANTS:
        path = samples.write_sentencepiece(folder / name, **samples.SENTENCEPIECE_VARIANTS[name])
    else:
        path = samples.write_byte_level(folder / name, name)
    return path


@pytest.fixture(scope="module")
def golden(gguf_samples: ModuleType) -> dict[str, Any]:
    ids: dict[str, Any] = json.loads(gguf_samples.GOLDEN.read_text(encoding="utf-8"))
    return ids


def control_ids(tokenizer: Tokenizer) -> set[int]:
    return {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def check_ids(tokenizer: Tokenizer, text: str, expected: list[int]) -> None:
    """llama.cpp merges the pieces of "</s>" in a user's text into the control token where the vocabulary has
    the pieces. Ours has no control token there, and no other difference is accepted."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    control = control_ids(tokenizer)
    assert not control & set(ids), text
    if control & set(expected):
        return
    assert ids == expected, text


@pytest.mark.parametrize("name", [*KINDS, *SENTENCEPIECE, "smollm2"])
def test_token_ids_of_a_users_text_are_llamacpps(
    files_of: Callable[[str], Mapping[str, bytes]],
    golden: dict[str, Any],
    gguf_samples: ModuleType,
    name: str,
) -> None:
    tokenizer = tokenizer_of(files_of(name), special=False)
    for text, expected in zip(gguf_samples.HARD_TEXTS, golden["plain"][name], strict=True):
        check_ids(tokenizer, text, expected)


@pytest.mark.parametrize("name", [*KINDS, *SENTENCEPIECE, "smollm2"])
def test_token_ids_of_a_template_are_llamacpps(
    files_of: Callable[[str], Mapping[str, bytes]],
    golden: dict[str, Any],
    gguf_samples: ModuleType,
    name: str,
) -> None:
    """With control tokens found in the text, and the beginning and end added as the file asks for."""
    tokenizer = tokenizer_of(files_of(name), special=True)
    for text, expected in zip(gguf_samples.SPECIAL_TEXTS, golden["special"][name], strict=True):
        assert tokenizer.encode(text).ids == expected, text


@pytest.mark.parametrize("name", PRETOKENIZERS)
def test_every_pretokenizer_name_was_compared_with_llamacpp(
    files_of: Callable[[str], Mapping[str, bytes]],
    golden: dict[str, Any],
    gguf_samples: ModuleType,
    name: str,
) -> None:
    tokenizer = tokenizer_of(files_of(name), special=False)
    texts = gguf_samples.digest_texts()
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert gguf_samples.digest(ids) == golden["digests"][name]


def test_the_kinds_are_told_apart_by_the_golden_ids(golden: dict[str, Any]) -> None:
    """Were two pre-tokenizers confused, the test above would fail."""
    assert len({golden["digests"][name] for name in KINDS}) == len(KINDS)


@pytest.mark.interop
@pytest.mark.parametrize("name", [*PRETOKENIZERS, *SENTENCEPIECE, "smollm2"])
def test_random_texts_against_a_live_llamacpp(
    files_of: Callable[[str], Mapping[str, bytes]],
    gguf_samples: ModuleType,
    smollm2_gguf: Path,
    tmp_path: Path,
    name: str,
) -> None:
    python = os.environ.get("NYBBLE_LLAMACPP_PYTHON")
    if python is None:
        pytest.skip("NYBBLE_LLAMACPP_PYTHON names no interpreter that has llama_cpp")
    path = sample_path(gguf_samples, smollm2_gguf, tmp_path, name)
    texts = gguf_samples.random_texts(2000, seed=sum(map(ord, name)))
    _, expected = gguf_samples.llamacpp_ids(
        python, path, texts, tmp_path, add_special=False, parse_special=False
    )
    tokenizer = tokenizer_of(files_of(name), special=False)
    for text, ids in zip(texts, expected, strict=True):
        check_ids(tokenizer, text, ids)


NO_SURROGATES = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.mark.parametrize("name", [*KINDS, "smollm2"])
def test_byte_level_text_survives_a_round_trip(
    files_of: Callable[[str], Mapping[str, bytes]], name: str
) -> None:
    """Text whose bytes are tokens, that is; SmolLM2 has none for 21 bytes, and llama.cpp drops them too."""
    tokenizer = tokenizer_of(files_of(name), special=False)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = tokenizer.get_vocab()

    @settings(max_examples=100, deadline=None)
    @given(text=NO_SURROGATES)
    def check(text: str) -> None:
        if any(byte not in vocabulary for piece, _ in to_bytes.pre_tokenize_str(text) for byte in piece):
            return
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text

    check()


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_sentencepiece_text_survives_a_round_trip(
    files_of: Callable[[str], Mapping[str, bytes]], name: str
) -> None:
    """Except for ▁, which that scheme cannot tell from a space."""
    tokenizer = tokenizer_of(files_of(name), special=False)

    @settings(max_examples=100, deadline=None)
    @given(text=NO_SURROGATES.filter(lambda text: "▁" not in text and "<tool>" not in text))
    def check(text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text

    check()


@pytest.mark.parametrize("name", [*KINDS, *SENTENCEPIECE, "smollm2"])
def test_a_users_text_never_becomes_a_control_token(
    files_of: Callable[[str], Mapping[str, bytes]], name: str
) -> None:
    tokenizer = tokenizer_of(files_of(name), special=False)
    control = control_ids(tokenizer)
    names = [tokenizer.id_to_token(index) for index in sorted(control)]
    assert names

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.sampled_from([*names, " ", "▁", "<", "x"]), max_size=6))
    def check(parts: list[str]) -> None:
        assert not control & set(tokenizer.encode("".join(parts), add_special_tokens=False).ids)

    check()
    tokenizer.encode_special_tokens = False
    for token in names:
        assert tokenizer.encode(f"a{token}b", add_special_tokens=False).ids.count(
            tokenizer.token_to_id(token)
        )


def test_smollm2s_chat_template_and_roles(
    files_of: Callable[[str], Mapping[str, bytes]], smollm2_reader: Any
) -> None:
    files = files_of("smollm2")
    template = smollm2_reader.fields["tokenizer.chat_template"].contents()
    assert files["chat_template.jinja"].decode() == template
    roles = json.loads(files["tokenizer_config.json"])
    assert (roles["bos_token"], roles["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert (roles["add_bos_token"], roles["model_max_length"]) == (False, 8192)


@pytest.mark.parametrize("name", ["smollm2", "llama-bpe", "sentencepiece"])
def test_transformers_loads_the_recovered_files(
    files_of: Callable[[str], Mapping[str, bytes]],
    golden: dict[str, Any],
    gguf_samples: ModuleType,
    tmp_path: Path,
    name: str,
) -> None:
    from transformers import AutoTokenizer

    for file, content in files_of(name).items():
        (tmp_path / file).write_bytes(content)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text, expected in zip(gguf_samples.SPECIAL_TEXTS, golden["special"][name], strict=True):
        assert theirs(text)["input_ids"] == expected, text
    if name == "smollm2":
        messages = [{"role": "user", "content": "hi"}]
        rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert rendered.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@pytest.fixture
def files_with(gguf_samples: ModuleType, tmp_path: Path) -> Callable[..., Mapping[str, bytes]]:
    """The files of the byte-level sample, or the SentencePiece one, with metadata changed."""

    def make(kind: str = "byte_level", pre: str = "gpt-2", **settings: Any) -> Mapping[str, bytes]:
        path = tmp_path / "m.gguf"
        if kind == "byte_level":
            gguf_samples.write_byte_level(path, pre, **settings)
        else:
            gguf_samples.write_sentencepiece(path, **settings)
        with open_gguf(path, "m.gguf") as source:
            return source.tokenizer_files

    return make


def test_beginning_and_end_are_added_as_the_file_asks(
    files_with: Callable[..., Mapping[str, bytes]],
) -> None:
    def ends(**settings: Any) -> tuple[bool, bool]:
        tokenizer = tokenizer_of(files_with(**settings), special=True)
        tokens = tokenizer.encode("x").tokens
        return tokens[0] in ("<|bos|>", "<s>"), tokens[-1] in ("<|eos|>", "</s>")

    assert ends() == (False, False)
    assert ends(add_bos_token=True) == (True, False)
    assert ends(add_bos_token=True, add_eos_token=True) == (True, True)
    assert ends(pre="llama-bpe") == (True, False)
    assert ends(pre="llama-bpe", add_bos_token=False) == (False, False)
    assert ends(kind="sentencepiece") == (True, False)
    assert ends(kind="sentencepiece", add_eos_token=True) == (True, True)


def test_a_file_without_a_pretokenizer_has_the_default_one(
    files_with: Callable[..., Mapping[str, bytes]],
) -> None:
    without = files_with(**{"tokenizer.ggml.pre": None})
    assert without["tokenizer.json"] == files_with(pre="default")["tokenizer.json"]


@pytest.mark.parametrize("last", ["1", "a b", ""])
def test_merges_that_a_line_cannot_say_are_kept(gguf_samples: ModuleType, tmp_path: Path, last: str) -> None:
    """Of merges as lines, the library skips those that begin as a file's first line does, and refuses those
    with another space."""
    path, word = tmp_path / "m.gguf", "#version" if last else "#versio"
    parts = [*word, last] if last else [*word]
    wholes = ["".join(parts[: n + 1]) for n in range(1, len(parts))]
    merges = [f"{whole.removesuffix(part)} {part}" for whole, part in zip(wholes, parts[1:], strict=True)]
    tokens = list(dict.fromkeys([*parts, "1", "a", "b", "Ġ", *wholes]))
    gguf_samples.write_tokenizer(path, "gpt2", tokens, [1] * len(tokens), {"merges": merges})
    with open_gguf(path, "m.gguf") as source:
        files = source.tokenizer_files
    written = json.loads(files["tokenizer.json"])["model"]["merges"]
    assert all(isinstance(merge, list if last else str) for merge in written)
    read = json.loads(tokenizer_of(files, special=False).to_str())["model"]["merges"]
    assert [" ".join(pair) for pair in read] == merges


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"pre": "tekken"}, "tokenizer.ggml.pre is 'tekken'; supported: default, gpt-2"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model is 't5'; supported: gpt2"),
        ({"kind": "sentencepiece", "scores": "tied"}, "leaves their merges without an order"),
        ({"kind": "sentencepiece", "scores": "nan"}, "leaves their merges without an order"),
    ],
)
def test_tokenizers_that_are_not_recovered(
    files_with: Callable[..., Mapping[str, bytes]],
    gguf_samples: ModuleType,
    settings_: dict[str, Any],
    message: str,
) -> None:
    if "scores" in settings_:
        count = 259 + len(gguf_samples.sentencepiece_pieces()) + 1
        settings_ = settings_ | {"scores": [-1.0 if settings_["scores"] == "tied" else float("nan")] * count}
    with pytest.raises(UnsupportedModelError, match=message):
        files_with(**settings_)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"merges": None}, "lacks tokenizer.ggml.merges"),
        ({"merges": ["nospace"]}, "the merge 'nospace' is not two tokens that make a third"),
        ({"merges": ["a zzz"]}, "is not two tokens"),
        ({"merges": [1, 2]}, "tokenizer.ggml.merges is an array of 2; expected an array of strings"),
        ({"tokenizer.ggml.tokens": None}, "lacks tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": "x"}, "tokenizer.ggml.tokens is 'x'"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "the token 'a' has two ids"),
        ({"tokenizer.ggml.tokens": [str(n) for n in range(5000)]}, "5000 tokens, but the embedding has"),
        ({"tokenizer.ggml.token_type": [1, 2, 3]}, "token_type has 3 values"),
        ({"tokenizer.ggml.token_type": [0.5] * 3000}, "token_type has 3000 values of type float32"),
        ({"bos_token_id": 99999}, "bos_token_id is 99999, but the file has"),
        ({"eos_token_id": None, "add_eos_token": True}, "eos_token_id is missing"),
        ({"add_bos_token": "yes"}, "add_bos_token is 'yes'; expected a boolean"),
        ({"kind": "sentencepiece", "scores": None}, "lacks tokenizer.ggml.scores"),
        ({"kind": "sentencepiece", "scores": [1.0]}, "scores has 1 values"),
    ],
)
def test_lists_that_contradict_each_other(
    files_with: Callable[..., Mapping[str, bytes]], settings_: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFormatError, match=message) as caught:
        files_with(**settings_)
    assert str(caught.value).startswith("m.gguf: ")
    assert "\n" not in str(caught.value)


def test_byte_fallback_needs_every_byte(gguf_samples: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tokens = ["<unk>", "<s>", "</s>", "<0x00>", "a"]
    gguf_samples.write_tokenizer(path, "llama", tokens, [2, 3, 3, 6, 1], {"scores": [0.0] * 5})
    with (
        open_gguf(path, "m.gguf") as source,
        pytest.raises(UnsupportedModelError, match="no token for byte 1"),
    ):
        _ = source.tokenizer_files


def test_a_token_of_a_hundred_thousand_characters_is_refused(
    gguf_samples: ModuleType, tmp_path: Path
) -> None:
    """It would be tried in two parts at every place."""
    path = tmp_path / "m.gguf"
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), "a", "aa", "a" * 100_000]
    types = [6] * 256 + [1] * 3
    scores = [-float(n) for n in range(len(tokens))]
    gguf_samples.write_tokenizer(path, "llama", tokens, types, {"scores": scores})
    with (
        open_gguf(path, "m.gguf") as source,
        pytest.raises(ModelFormatError, match="has 100000 characters; expected at most 512"),
    ):
        _ = source.tokenizer_files
