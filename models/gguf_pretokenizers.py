"""What `tokenizer.ggml.pre` names: how text is split into pieces before byte-level BPE.

The facts are those of llama.cpp's `llama-vocab.cpp`: regular expressions applied one after another, each
splitting the pieces of those before it into its matches and what lies between. Here they are written for
Oniguruma, the engine of `tokenizers`.
"""

from ..records import dataclass


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
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_SEED_CODER = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_CJK = r"[[一-龥ࠀ-一가-퟿]&&[^\s]]+"

_KINDS = {
    PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")): ("default",),
    PreTokenizer((_GPT2,)): ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion"),
    PreTokenizer((r"\p{N}", _GPT2)): (
        *("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    ),
    PreTokenizer((_LLAMA3,), True, True): ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"),
    PreTokenizer((_LLAMA3,)): ("smaug-bpe", "dbrx", "chatglm-bpe"),
    PreTokenizer((_QWEN2,)): ("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"),
    PreTokenizer((_SEED_CODER,)): ("seed-coder",),
    PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")): ("deepseek-coder",),
}
PRETOKENIZERS = {name: kind for kind, names in _KINDS.items() for name in names}
