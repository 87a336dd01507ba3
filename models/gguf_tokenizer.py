"""The tokenizer and chat template of a GGUF file, as Hugging Face files whose token ids are llama.cpp's."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ..errors import ModelFormatError, UnsupportedModelError
from .gguf_file import StringArray
from .gguf_metadata import Metadata
from .gguf_pretokenizers import PRETOKENIZERS, PreTokenizer

_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "▁"
_MAX_PIECE = 512  # characters in a SentencePiece token; each is tried in two parts at every place
# Turn markers that llama.cpp treats as control tokens whatever type the file gives them.
_TURN_MARKERS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
        *("<end_of_turn>", "<EOT>", "[EOT]", "</s>", "<eos>", "<｜end▁of▁sentence｜>"),
    )
)


def tokenizer_files(meta: Metadata, vocab_size: int) -> Mapping[str, bytes]:
    """`tokenizer.json`, `tokenizer_config.json` and, where the file has a template, `chat_template.jinja`.

    `vocab_size` is the embedding's number of rows; the file may name fewer tokens. Raises `ModelFormatError`
    for lists that contradict each other, `UnsupportedModelError` for a tokenizer that is not recovered.
    """
    tokens = _tokens(meta, vocab_size)
    types = _token_types(meta, tokens)
    model = meta.text(_PREFIX + "model")
    if model == "gpt2":
        name = meta.text(_PREFIX + "pre", "default")
        if name not in PRETOKENIZERS:
            raise UnsupportedModelError(
                f"{meta.where}: tokenizer.ggml.pre is {name[:60]!r}; supported: {', '.join(PRETOKENIZERS)}"
            )
        document = _byte_level(meta, tokens, PRETOKENIZERS[name])
        add_bos = PRETOKENIZERS[name].add_bos
    elif model == "llama":
        document = _sentencepiece(meta, tokens, types)
        add_bos = True
    else:
        raise UnsupportedModelError(
            f"{meta.where}: tokenizer.ggml.model is {model[:60]!r}; supported: gpt2 (byte-level "
            "BPE) and llama (SentencePiece BPE)"
        )
    add_bos = meta.flag(_PREFIX + "add_bos_token", add_bos)
    add_eos = meta.flag(_PREFIX + "add_eos_token", False)
    bos, eos = special_id(meta, "bos", len(tokens)), special_id(meta, "eos", len(tokens))
    document |= {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, types),
        "post_processor": _post_processor(
            meta,
            tokens,
            _needed(meta, "bos", bos) if add_bos else None,
            _needed(meta, "eos", eos) if add_eos else None,
        ),
    }
    content = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    try:
        Tokenizer.from_str(content)
    except Exception as error:  # the library raises nothing more specific
        raise ModelFormatError(f"{meta.where}: the tokenizer cannot be built: {str(error)[:200]}") from None
    files = {
        "tokenizer.json": content.encode(),
        "tokenizer_config.json": _config(meta, tokens, add_bos, add_eos),
    }
    if "tokenizer.chat_template" in meta:
        files["chat_template.jinja"] = meta.text("tokenizer.chat_template").encode()
    return files


def generation_config(meta: Metadata) -> dict[str, Any]:
    """`generation_config.json`: the beginning, the padding, and every token that ends a turn or a message."""
    count = len(meta.get(_PREFIX + "tokens", StringArray, (), "an array of strings"))
    ends = [special_id(meta, role, count) for role in ("eos", "eot", "eom")]
    stops = list(dict.fromkeys(token for token in ends if token is not None))
    values = {
        "bos_token_id": special_id(meta, "bos", count),
        "eos_token_id": stops[0] if len(stops) == 1 else stops or None,
        "pad_token_id": special_id(meta, "padding", count),
    }
    return {key: value for key, value in values.items() if value is not None}


def special_id(meta: Metadata, role: str, count: int) -> int | None:
    """The id of a role ("bos", "eos", "eot", "padding", "unknown", …) among `count` tokens, None where the
    file names none. SentencePiece's ids are 1 and 2 by default, as llama.cpp has them."""
    default = {"bos": 1, "eos": 2}.get(role) if meta.values.get(_PREFIX + "model") == "llama" else None
    key = f"{_PREFIX}{role}_token_id"
    if key not in meta and default is None:
        return None
    token = meta.integer(key, default, most=2**32 - 1)
    if token >= count:
        raise ModelFormatError(f"{meta.where}: {key} is {token}, but the file has {count} tokens")
    return token


def _needed(meta: Metadata, role: str, token: int | None) -> int:
    if token is None:
        raise ModelFormatError(f"{meta.where}: a {role} token is to be added, but {role}_token_id is missing")
    return token


def _tokens(meta: Metadata, vocab_size: int) -> list[str]:
    tokens = meta.strings(_PREFIX + "tokens")
    if not tokens:
        raise ModelFormatError(f"{meta.where}: the metadata lacks tokenizer.ggml.tokens")
    if len(tokens) > vocab_size:
        raise ModelFormatError(f"{meta.where}: {len(tokens)} tokens, but the embedding has {vocab_size} rows")
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    if len(set(tokens)) != len(tokens):
        seen: set[str] = set()
        twice = next(token for token in tokens if token in seen or seen.add(token))  # type: ignore[func-returns-value]
        raise ModelFormatError(f"{meta.where}: the token {twice[:60]!r} has two ids")
    return tokens


def _column(meta: Metadata, name: str, kinds: str, count: int) -> list[Any] | None:
    """An array of one number a token, or None."""
    if _PREFIX + name not in meta:
        return None
    values = meta.get(_PREFIX + name, np.ndarray, None, "an array of numbers")
    if values.dtype.kind not in kinds or len(values) < count:
        raise ModelFormatError(
            f"{meta.where}: tokenizer.ggml.{name} has {len(values)} values of type {values.dtype}; "
            f"expected one for each of {count} tokens"
        )
    numbers: list[Any] = values[:count].tolist()
    return numbers


def _token_types(meta: Metadata, tokens: list[str]) -> list[int]:
    types = _column(meta, "token_type", "iu", len(tokens)) or [_NORMAL] * len(tokens)
    return [_CONTROL if token in _TURN_MARKERS else kind for token, kind in zip(tokens, types, strict=True)]


def _added_tokens(tokens: list[str], types: list[int]) -> list[dict[str, Any]]:
    """Control tokens are special: found where a template puts them, not in a user's text. User-defined ones
    are found everywhere."""
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _USER_DEFINED,
        }
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _bpe(tokens: list[str], merges: list[tuple[str, str]], **settings: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: index for index, token in enumerate(tokens)},
        "merges": _as_lines(merges) or merges,
    } | settings


def _as_lines(merges: list[tuple[str, str]]) -> list[str] | None:
    """The older form of merges, which every version of the library reads, and in four fifths of the time.
    None where it can't say them: it splits at spaces, and takes a first line of a file for no merge."""
    if any(" " in token for pair in merges for token in pair) or any(
        left.startswith("#version") for left, _ in merges
    ):
        return None
    return [f"{left} {right}" for left, right in merges]


def _byte_level(meta: Metadata, tokens: list[str], pre: PreTokenizer) -> dict[str, Any]:
    """GPT-2's scheme: bytes as printable characters, merges by rank inside the pieces `pre` splits off."""
    lines = meta.strings(_PREFIX + "merges")
    if lines is None:
        raise ModelFormatError(f"{meta.where}: the metadata lacks tokenizer.ggml.merges")
    known = set(tokens)
    merges: dict[tuple[str, str], None] = {}  # the first of two equal merges counts
    for line in lines:
        cut = line.find(" ", 1)
        left, right = line[:cut], line[cut + 1 :]
        if cut < 1 or left not in known or right not in known or left + right not in known:
            raise ModelFormatError(
                f"{meta.where}: the merge {line[:60]!r} is not two tokens that make a third"
            )
        merges.setdefault((left, right))
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in pre.patterns
    ]
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, to_bytes]},
        "decoder": to_bytes,
        "model": _bpe(tokens, list(merges), ignore_merges=pre.ignore_merges),
    }


def _sentencepiece(meta: Metadata, tokens: list[str], types: list[int]) -> dict[str, Any]:
    """SentencePiece BPE with byte fallback: the neighbours whose union has the highest score merge first."""
    missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in set(tokens)]
    if missing:
        raise UnsupportedModelError(
            f"{meta.where}: the vocabulary has no token for byte {missing[0]}; byte fallback needs all 256"
        )
    prefix = meta.flag(_PREFIX + "add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    steps = [{"type": "Prepend", "prepend": _SPACE}, replace] if prefix else [replace]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = special_id(meta, "unknown", len(tokens))
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            tokens,
            _merges_from_scores(meta, tokens, types),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=tokens[unknown] if unknown is not None else None,
        ),
    }


def _merges_from_scores(meta: Metadata, tokens: list[str], types: list[int]) -> list[tuple[str, str]]:
    """Every pair of tokens whose union is a token, by falling score of the union.

    No pair makes a control token: a user's text must not turn into one. Raises `UnsupportedModelError` where
    two unions have one score, since then position decides, which ranks cannot say.
    """
    scores = _column(meta, "scores", "if", len(tokens))
    if scores is None:
        raise ModelFormatError(f"{meta.where}: the metadata lacks tokenizer.ggml.scores")
    known = set(tokens)
    unions: dict[float, str] = {}
    merges: list[tuple[float, int, str, str]] = []
    for token, kind, score in zip(tokens, types, scores, strict=True):
        if kind in (_UNKNOWN, _CONTROL, _BYTE) or len(token) < 2:
            continue
        if len(token) > _MAX_PIECE:
            raise ModelFormatError(
                f"{meta.where}: the token {token[:40]!r}... has {len(token)} characters; expected at most "
                f"{_MAX_PIECE}"
            )
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [(left, right) for left, right in pairs if left in known and right in known]
        if not pairs:
            continue
        if score != score or unions.setdefault(score, token) != token:
            other = unions.get(score, "")
            raise UnsupportedModelError(
                f"{meta.where}: the tokens {other[:40]!r} and {token[:40]!r} have the score {score}, which "
                "leaves their merges without an order"
            )
        merges += [(-score, len(right), left, right) for left, right in pairs]
    return [(left, right) for *_, left, right in sorted(merges)]


def _post_processor(
    meta: Metadata, tokens: list[str], bos: int | None, eos: int | None
) -> dict[str, Any] | None:
    if bos is None and eos is None:
        return None

    def special(token: int | None, type_id: int) -> list[dict[str, Any]]:
        return [] if token is None else [{"SpecialToken": {"id": tokens[token], "type_id": type_id}}]

    def template(name: str, type_id: int) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": name, "type_id": type_id}}
        return [*special(bos, type_id), text, *special(eos, type_id)]

    return {
        "type": "TemplateProcessing",
        "single": template("A", 0),
        "pair": template("A", 0) + template("B", 1),
        "special_tokens": {
            tokens[token]: {"id": tokens[token], "ids": [token], "tokens": [tokens[token]]}
            for token in (bos, eos)
            if token is not None
        },
    }


def _config(meta: Metadata, tokens: list[str], add_bos: bool, add_eos: bool) -> bytes:
    """`tokenizer_config.json`, for loaders that want the special tokens by role."""
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    ids = {name: special_id(meta, role, len(tokens)) for role, name in names.items()}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta.integer(f"{meta.text('general.architecture')}.context_length"),
    }
    settings |= {f"{name}_token": tokens[token] for name, token in ids.items() if token is not None}
    return json.dumps(settings, ensure_ascii=False, indent=2).encode()
