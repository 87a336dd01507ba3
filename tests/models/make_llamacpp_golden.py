"""Writes `data/gguf_vocabularies.json` and `data/llamacpp_token_ids.json`, what `test_gguf_tokenizer.py`
checks against: llama.cpp's token ids for hard texts.

    NYBBLE_LLAMACPP_PYTHON=.../bin/python python tests/models/make_llamacpp_golden.py [--keep-vocabularies]

runs in Nybble's environment; the variable names an interpreter that has llama-cpp-python.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf_samples as samples

from nybble.models.gguf_pretokenizers import PRETOKENIZERS
from nybble.models.open import ALIASES, _packaged_gguf


def main() -> None:
    python = os.environ["NYBBLE_LLAMACPP_PYTHON"]
    if "--keep-vocabularies" not in sys.argv:
        samples.DATA.mkdir(exist_ok=True)
        write(samples.VOCABULARIES, samples.train_vocabularies())
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)

        def ask(path: Path, texts: list[str], special: bool) -> list[list[int]]:
            golden["llama_cpp_python"], ids = samples.llamacpp_ids(
                python, path, texts, scratch, add_special=special, parse_special=special
            )
            return ids

        golden: dict[str, Any] = {"llama_cpp_python": "", "plain": {}, "special": {}, "digests": {}}
        files = {"smollm2": _packaged_gguf("smollm2", ALIASES["smollm2"])}
        kinds = {kind: name for name, kind in reversed(PRETOKENIZERS.items())}
        for name in kinds.values():
            files[name] = samples.write_byte_level(scratch / name, name)
        for name, settings in samples.SENTENCEPIECE_VARIANTS.items():
            files[name] = samples.write_sentencepiece(scratch / name, **settings)
        for name, path in files.items():
            golden["plain"][name] = ask(path, list(samples.HARD_TEXTS), special=False)
            golden["special"][name] = ask(path, list(samples.SPECIAL_TEXTS), special=True)
        for name in PRETOKENIZERS:
            path = samples.write_byte_level(scratch / f"digest-{name}", name)
            golden["digests"][name] = samples.digest(ask(path, samples.digest_texts(), special=False))
        write(samples.GOLDEN, golden)


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
