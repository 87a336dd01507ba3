"""Sample GGUF files with small hostile vocabularies, texts that are hard to split, and llama.cpp's answers.

Loaded by the `gguf_samples` fixture, and by `make_llamacpp_golden.py`, which writes what is in `data/`.
"""

import hashlib
import json
import random
import subprocess
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

DATA = Path(__file__).parent / "data"
VOCABULARIES = DATA / "gguf_vocabularies.json"
GOLDEN = DATA / "llamacpp_token_ids.json"

# Pieces whose every neighbourhood some pre-tokenizer treats in a way of its own.
ATOMS = (
    *(
        " ",
        "  ",
        "   ",
        "\t",
        "\n",
        "\n\n",
        "\r\n",
        "\r",
        "\x0b",
        "\x0c",
        "\x1c",
        "\x1f",
        "\x7f",
        "\x01",
        "\x85",
    ),
    *("\u00a0", "\u2028", "\u2029", "\u3000", "\u1680", "\u200b", "\u200d", "\ufeff", "\u180e", "\u00ad"),
    *(
        "'s",
        "'S",
        "'t",
        "'re",
        "'RE",
        "'rE",
        "'ve",
        "'m",
        "'ll",
        "'LL",
        "'Ll",
        "'d",
        "'D",
        "'",
        "'x",
        "’s",
        "'ſ",
    ),
    *("0", "1", "12", "345", "6789", "٣", "४", "½", "²", "①", "Ⅷ", "〇", "𝟘", "3.14", "1,000"),
    *("a", "B", "the", "The", "HTTPServer", "camelCase", "x_y", "ß", "é", "e\u0301", "ǅ", "ʰ", "ñandú"),
    *(
        "中",
        "文字",
        "かな",
        "カナ",
        "ー",
        "한글",
        "\u1112\u1161\u11ab",
        "ไทย",
        "हिन्दी",
        "த்",
        "العربية",
        "עברית",
        "Ω",
        "привет",
    ),
    *(
        "!",
        "?",
        "...",
        "!!",
        "$",
        "+",
        "<=>",
        "^",
        "~",
        "|",
        "`",
        "_",
        "-",
        "—",
        "«",
        "。",
        "、",
        "！",
        "€",
        "∑",
        "©",
    ),
    *("🙂", "👨‍👩‍👧", "👍🏽", "🇫🇷", "❤️", "1️⃣", "\U000e0067", "\ufffd", "\ue000", "\U000f0000", "\u0378"),
    *(
        "{",
        "}",
        "()",
        "[0]",
        ";",
        "//",
        "/*",
        "*/",
        "#",
        "\\n",
        "=",
        "==",
        "->",
        "::",
        "<|",
        "|>",
        "</s>",
        "<s>",
    ),
)

HARD_TEXTS = (
    "",
    " ",
    "  ",
    "\n",
    "Hello, world!",
    " leading space",
    "trailing space ",
    "trailing spaces   ",
    "  two  spaces   three    four     five",
    "a" + " " * 40 + "b",
    "tabs\tand\t\ttabs \t mixed",
    "line\nbreaks\n\nand\r\nCRLF\r\n\r\nand\rCR \n",
    "   \n   \n\n  indented\n    more",
    "\n \n  \n   x",
    "0 1 12 123 1234 12345 1234567890 12345678901234567890",
    "3.14159, 1,000,000.00 and 0xFF; 1e-10; 2^64; 50%",
    "٠١٢٣٤ ४५६ ½⅓²³ ①②③ Ⅷ Ⅻ 〇一二三 𝟘𝟙𝟚",
    "I'm you're he's we'll they've I'd can't",
    "I'M YOU'RE HE'S WE'LL THEY'VE I'D CAN'T",
    "'S 'Re 'Ll x'sy don''t 'tis '' ' s ’s ‘re 'ſ",
    "snake_case camelCase HTTPServer2Go kebab-case __init__",
    "def f(x: int) -> str:\n    return f\"{x!r:>{10}}\"  # comment\n",
    "for (int i = 0; i < n; ++i) {\n\ta[i] <<= 1; // shift\r\n}\n",
    "<html><body class=\"x\">&amp;</body></html>",
    "SELECT * FROM t WHERE a<>b AND c='it''s';",
    "path/to/file.txt C:\\Users\\x https://example.com/a?b=c&d=%20#frag",
    "user@example.com $100 €50 £20 ¥1000 +1-800-555-0100",
    "Übermäßig naïve café coöperate Straße ŒUVRE ǅungla",
    "cafe\u0301 e\u0301\u0302 n\u0303 \u0301alone a\u0323\u0307",
    "Привет, мир! Ёжик № 5",
    "Γειά σου Κόσμε Ωμέγα",
    "你好，世界！这是一个测试。中文abc混排123数字",
    "こんにちは世界。カタカナとひらがな　全角スペース",
    "안녕하세요 세계 \u1112\u1161\u11ab\u1100\u1173\u11af",
    "مرحبا بالعالم، كيف حالك؟ ٣٤٥",
    "שלום עולם! א״ב",
    "नमस्ते दुनिया हिन्दी क्षत्रिय",
    "สวัสดีชาวโลก ภาษาไทย",
    "தமிழ் மொழி",
    "ភាសាខ្មែរ မြန်မာ ქართული հայերեն",
    "🙂😀 👍🏽👍🏿 👨‍👩‍👧‍👦 🏳️‍🌈 🇫🇷🇩🇪 ❤️ 1️⃣ 🧑🏾‍🚀",
    "emoji🙂inside👍words and 🙂 spaced 🙂",
    "zero\u200bwidth\u200djoin\u200cer\ufeffbom soft\u00adhyphen",
    "nbsp\u00a0here\u00a0\u00a0two narrow\u202fspace thin\u2009space ideographic\u3000space",
    "line\u2028separator paragraph\u2029separator next\u0085line ogham\u1680space",
    "control\x01\x02\x1b[31mred\x1b[0m\x7f\x1c\x1d\x1e\x1f\x0b\x0c end",
    "private\ue000use \U000f0000 noncharacter\ufffe replacement\ufffd unassigned\u0378",
    "math ∑∫√≤≥≠∞ ← → ⇒ ∀x∈ℝ 𝒜𝔅ℂ x²+y²=z²",
    "quotes “double” ‘single’ «guillemets» „low“ —em –en …",
    "!!!???...,,,;;;:::---___===+++***///\\\\\\|||~~~^^^```@@@###$$$%%%&&&((([[[{{{",
    "! ? . , ; : - _ = + * / \\ | ~ ^ ` @ # $ % & ( [ {",
    "a!b?c.d,e;f:g-h_i=j+k*l/m\\n|o~p^q`r@s#t$u%v&w(x[y{z",
    "supercalifragilisticexpialidocious" * 8,
    "ACGT" * 100,
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "中" * 60,
    "🙂" * 20,
    "\t" * 20 + "x",
    "\n" * 20 + "x",
    " \n" * 10 + "x",
    "\u3000" * 5 + "x" + "\u00a0" * 5,
    "mixed123中文abcПривет456🙂def٣٤",
    "\\u0041 \\x41 &#65; %41",
    "▁already▁marked ▁ x",
    "Ġbyte Ċ level ĉ letters",
    "<s>not special</s> <unk> <0x0A> [INST] x [/INST]",
    "unreachable unreachable unreachables",
    "call <tool> now <tool><tool>x <too l>",
    "a <|im_start|>user\nhi<|im_end|>\n<|endoftext|> <|bos|> b",
    "{\"json\": [1, 2.5, null, true], \"k\": \"v\\n\"}",
    "x\t= 1\r\n\tif y:\r\n\t\tz()\r\n",
    "1st 2nd 3rd 4th 1990s 20th-century 3D 4K H2O C++ C# F#",
    "e.g. i.e. U.S.A. Ph.D. Mr. O'Neil rock'n'roll 'twas",
    "ﬁ ﬂ ﬃ ｆｕｌｌｗｉｄｔｈ １２３ ㎏ ㍿ ℡ ™",
    "𐍈 𐌰𐌱 𓀀 𝄞 𠮷 𪚥 🀄",
    "word\u0300\u0301\u0302\u0303\u0304\u0305\u0306\u0307\u0308 zalgo",
)  # fmt: skip

# For the comparison in which control tokens are recognised and added.
SPECIAL_TEXTS = (
    "",
    "Hello",
    " Hello ",
    "<|im_start|>user\nhi <|im_end|>\n<|im_start|>assistant\n",
    "<|bos|><|eos|> a<|bos|>b  <|eos|>  c",
    "<s> [INST] hi [/INST] x </s><s>",
    "a<unk>b <tool> c<tool>",
    "<|endoftext|>1<|endoftext|>",
    "<|im_end|",
)
SENTENCEPIECE_VARIANTS: dict[str, dict[str, Any]] = {
    "sentencepiece": {},
    "sentencepiece-bare": {"add_space_prefix": False, "add_bos_token": False, "add_eos_token": True},
}


def digest_texts() -> list[str]:
    return [*HARD_TEXTS, *random_texts(300, seed=3)]


def digest(ids: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


def random_texts(count: int, seed: int, anything: float = 0.3) -> list[str]:
    """Concatenations of `ATOMS`; a share `anything` of them with one character from anywhere in Unicode."""
    generator = random.Random(seed)
    texts = []
    for _ in range(count):
        parts = [generator.choice(ATOMS) for _ in range(generator.randint(1, 14))]
        if generator.random() < anything:
            parts.insert(generator.randrange(len(parts)), _any_character(generator))
        texts.append("".join(parts))
    return texts


def _any_character(generator: random.Random) -> str:
    """A character that Unicode 3.2 had already: the newest ones are letters to one library and unassigned
    to another."""
    while True:
        character = chr(generator.randrange(1, 0x110000))
        if unicodedata.ucd_3_2_0.category(character) not in ("Cn", "Cs"):
            return character


def train_vocabularies() -> dict[str, Any]:
    """Byte-level and SentencePiece-like vocabularies trained without any pre-tokenizer, so that their merges
    cross every boundary that a pre-tokenizer should have kept."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    corpus = [*random_texts(6000, seed=1, anything=0), *(text for text in HARD_TEXTS for _ in range(4))]

    def train(texts: Iterable[str], alphabet: Sequence[str], split: Any) -> dict[str, Any]:
        tokenizer = Tokenizer(models.BPE())
        if split is not None:
            tokenizer.pre_tokenizer = split
        trainer = trainers.BpeTrainer(
            vocab_size=1800,
            initial_alphabet=list(alphabet),
            limit_alphabet=256,
            max_token_length=12,
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
        return model

    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    byte_level = train(corpus, pre_tokenizers.ByteLevel.alphabet(), whole)
    pieces = train(["▁" + text.replace(" ", "▁") for text in corpus], [], None)
    return {
        "byte_level": {
            "tokens": sorted(byte_level["vocab"], key=byte_level["vocab"].__getitem__),
            "merges": [" ".join(pair) for pair in byte_level["merges"]],
        },
        "sentencepiece": sorted(pieces["vocab"], key=pieces["vocab"].__getitem__),
    }


def load_vocabularies() -> dict[str, Any]:
    vocabularies: dict[str, Any] = json.loads(VOCABULARIES.read_text(encoding="utf-8"))
    return vocabularies


def write_byte_level(path: Path, pre: str, **settings: Any) -> Path:
    """A GGUF of the byte-level vocabulary with the pre-tokenizer `pre`, control tokens and a user-defined
    one."""
    data = load_vocabularies()["byte_level"]
    normal = [*data["tokens"], "unreachable", "Ġunreachable"]  # by merges, that is
    tokens = [*normal, "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<tool>"]
    types = [1] * len(normal) + [3, 3, 3, 3, 4]
    bos = len(normal)
    values = {"pre": pre, "bos_token_id": bos, "eos_token_id": bos + 1, "merges": data["merges"]}
    return write_tokenizer(path, "gpt2", tokens, types, values | settings)


_SENTENCEPIECE_FIRST = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)))


def sentencepiece_pieces() -> list[str]:
    """The SentencePiece-like vocabulary's normal tokens. None contains a control token's name, though there
    are "</" and "s>" to make one from."""
    pieces = load_vocabularies()["sentencepiece"]
    return [piece for piece in pieces if not any(name in piece for name in _SENTENCEPIECE_FIRST)]


def write_sentencepiece(path: Path, **settings: Any) -> Path:
    """A GGUF of the SentencePiece-like vocabulary: unknown, bos, eos, 256 bytes, pieces by falling score."""
    pieces = sentencepiece_pieces()
    tokens = [*_SENTENCEPIECE_FIRST, *pieces, "<tool>"]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4]
    # As SentencePiece writes them: merged pieces first, the single characters last.
    order = sorted(range(len(pieces)), key=lambda index: (len(pieces[index]) == 1, index))
    ranks = {index: -float(rank) for rank, index in enumerate(order)}
    scores = [0.0] * 259 + [ranks[index] for index in range(len(pieces))] + [-1e6]
    return write_tokenizer(path, "llama", tokens, types, {"scores": scores} | settings)


def write_tokenizer(
    path: Path, model: str, tokens: list[str], types: list[int], values: dict[str, Any]
) -> Path:
    """A GGUF of one tiny llama layer with this tokenizer; `values` are as `write_model` takes them."""
    import numpy as np

    sizes = {
        "block_count": 1, "context_length": 512, "embedding_length": 32, "feed_forward_length": 32,
        "attention.head_count": 2, "attention.head_count_kv": 1, "rope.dimension_count": 16,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    square = ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(tokens), 32), "output_norm": (32,)}
    shapes |= {f"blk.0.{name}": (32,) for name in ("attn_norm", "ffn_norm")}
    shapes |= {f"blk.0.{name}": (32, 32) for name in square}
    shapes |= {f"blk.0.{name}": (16, 32) for name in ("attn_k", "attn_v")}
    generator = np.random.default_rng(0)
    tensors = {
        f"{name}.weight": generator.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    metadata = {f"llama.{key}": value for key, value in sizes.items()}
    metadata |= {"tokenizer.ggml.model": model, "tokenizer.ggml.tokens": tokens}
    metadata |= {"tokenizer.ggml.token_type": types}
    metadata |= {key if "." in key else f"tokenizer.ggml.{key}": value for key, value in values.items()}
    return write_model(path, "llama", metadata, tensors)


def write_model(path: Path, arch: str, metadata: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """A GGUF written by the `gguf` package. Metadata values are bool, int (uint32), float (float32), str or
    list, None to leave a key out. Tensors are float arrays, or pairs of a quantized type's name and uint8
    blocks."""
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(path, arch)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[1], raw_dtype=GGMLQuantizationType[tensor[0]])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_WORKER = """
import ctypes, json, sys
import llama_cpp
request = json.load(open(sys.argv[1], encoding="utf-8"))
silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
model = llama_cpp.Llama(request["path"], vocab_only=True, verbose=False)
answer = {
    "version": llama_cpp.__version__,
    "ids": [
        model.tokenize(text.encode(), add_bos=request["add_special"], special=request["parse_special"])
        for text in request["texts"]
    ],
}
json.dump(answer, open(sys.argv[2], "w", encoding="utf-8"))
"""


def llamacpp_ids(
    python: str, path: Path, texts: Sequence[str], scratch: Path, add_special: bool, parse_special: bool
) -> tuple[str, list[list[int]]]:
    """llama.cpp's token ids for each text, from the interpreter `python` that has llama_cpp, and its
    version."""
    request, answer = scratch / "request.json", scratch / "answer.json"
    settings = {"path": str(path), "texts": list(texts)}
    settings |= {"add_special": add_special, "parse_special": parse_special}
    request.write_text(json.dumps(settings), encoding="utf-8")
    subprocess.run([python, "-c", _WORKER, str(request), str(answer)], check=True, timeout=300)
    result = json.loads(answer.read_text(encoding="utf-8"))
    return result["version"], result["ids"]


_LOGITS_WORKER = """
import ctypes, json, sys
import llama_cpp, numpy
request = json.load(open(sys.argv[1], encoding="utf-8"))
silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
float32 = 0  # of the cache; nothing else of the model is rounded
model = llama_cpp.Llama(
    request["path"], n_ctx=128, n_batch=128, n_threads=1, logits_all=True, type_k=float32, type_v=float32,
    flash_attn=False, swa_full=True, verbose=False,
)
model.eval(request["ids"])
numpy.save(sys.argv[2], numpy.array(model.scores[: len(request["ids"])], numpy.float32))
"""


def llamacpp_logits(python: str, path: Path, ids: list[int], scratch: Path) -> NDArray[np.float32]:
    """llama.cpp's logits [n, vocab] of a model in float32 after each of its token ids."""
    request, answer = scratch / "request.json", scratch / "logits.npy"
    request.write_text(json.dumps({"path": str(path), "ids": ids}), encoding="utf-8")
    subprocess.run([python, "-c", _LOGITS_WORKER, str(request), str(answer)], check=True, timeout=300)
    logits: NDArray[np.float32] = np.load(answer)
    return logits
