"""What `tokenizer.ggml.pre` names: how text is split into pieces before byte-level BPE.

Each entry is a fact about llama.cpp's `llama-vocab.cpp` (`unicode_regex_split`): regular expressions applied
one after another, each splitting the pieces of those before it into its matches and what lies between.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class PreTokenizer:
    """`ignore_merges`: a piece that is a token is taken whole. `add_bos`: the default where the file does not
    say."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Spelled out instead of (?i:…), which would also fold the long s (U+017F).
_CONTRACTIONS = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3 = PreTokenizer((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",), True, True)
_QWEN2 = PreTokenizer((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",))
_DIGITS_THEN_GPT2 = PreTokenizer((r"\p{N}", _GPT2))

PRETOKENIZERS = {
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "smollm": _DIGITS_THEN_GPT2,
}
