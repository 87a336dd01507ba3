"""Runs in onnxruntime-genai's own environment: loads artifacts' folders as they are, and forces texts through
them.

python genai_script.py CASES.json

CASES holds objects with `artifact`, `tokens` (an .npy of int64 [n]), `prompt` (how many of them are the
prompt) and `logits` (the .npy to write: float32 [n - prompt + 1, vocab], after the prompt and after each
later token); and may have `texts` (to tokenize) and `messages` (to render with the chat template). Prints a
line of JSON for each.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as og


def generator_of(model: Any, **search: Any) -> Any:
    params = og.GeneratorParams(model)
    params.set_search_options(**search)
    return og.Generator(model, params)


def forced_logits(model: Any, ids: list[int], prompt: int) -> np.ndarray:
    generator = generator_of(model, max_length=len(ids) + 1)
    generator.append_tokens(np.array(ids[:prompt], np.int32))
    rows = [generator.get_logits().reshape(-1).copy()]
    for token in ids[prompt:]:
        generator.append_tokens(np.array([token], np.int32))
        rows.append(generator.get_logits().reshape(-1).copy())
    return np.stack(rows)


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    generator = generator_of(model, max_length=len(ids) + count, do_sample=False)
    generator.append_tokens(np.array(ids, np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [int(token) for token in generator.get_sequence(0)[len(ids) :]]


def run(case: dict[str, Any]) -> dict[str, Any]:
    model = og.Model(case["artifact"])
    ids = np.load(case["tokens"]).tolist()
    np.save(case["logits"], forced_logits(model, ids, case["prompt"]))
    tokenizer = og.Tokenizer(model)
    result: dict[str, Any] = {"type": model.type, "greedy": greedy(model, ids[: case["prompt"]], 16)}
    result["encoded"] = [[int(i) for i in tokenizer.encode(text)] for text in case.get("texts", [])]
    result["decoded"] = [tokenizer.decode(np.array(i, np.int32)) for i in result["encoded"]]
    if "messages" in case:
        messages = json.dumps(case["messages"])
        result["rendered"] = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return result


def main(cases_file: str) -> None:
    for case in json.loads(Path(cases_file).read_text(encoding="utf-8")):
        try:
            result = run(case)
        except Exception as error:  # the test reports it
            result = {"error": f"{type(error).__name__}: {error}"}
        print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
