"""Runs in an environment with bitsandbytes: writes checkpoints with it, and computes what it makes of ours.

python bnb_script.py CASES.json

CASES holds objects with `do` "write" (a float folder `source`, a new folder `out`, and `settings` of
`BitsAndBytesConfig`), or `do` "run" (a quantized folder `folder`). Both have `tokens`, an .npy of int64
[length], and write what the quantized layers stand for to `weights` (safetensors, float32) and the logits of
`tokens` to `logits` (.npy, float32 [length, vocab]). Prints a line of JSON for each.
"""

import json
import sys
from pathlib import Path
from typing import Any

import bitsandbytes
import numpy as np
import torch
from bitsandbytes.functional import dequantize_4bit
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


def dequantized(module: Any) -> torch.Tensor | None:
    """The weight [out, in] float32 of a layer that bitsandbytes quantized; None for another."""
    if isinstance(module, bitsandbytes.nn.Linear4bit):
        return dequantize_4bit(module.weight.data, module.weight.quant_state).float()
    if isinstance(module, bitsandbytes.nn.Linear8bitLt):
        scb = module.weight.SCB if module.weight.SCB is not None else module.state.SCB
        return module.weight.data.float() * (scb.float()[:, None] / 127)
    return None


@torch.inference_mode()
def report(model: Any, tokens: str, weights: str, logits: str) -> dict[str, Any]:
    found = {name: dequantized(module) for name, module in model.named_modules()}
    kept = {f"{name}.weight": value.contiguous() for name, value in found.items() if value is not None}
    save_file(kept, weights)
    ids = torch.from_numpy(np.load(tokens))[None]
    np.save(logits, model(ids).logits[0].float().numpy())
    return {"layers": len(kept)}


def write(source: str, out: str, settings: dict[str, Any], **files: str) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=BitsAndBytesConfig(**settings), device_map="cpu", dtype=torch.float32
    ).eval()
    model.save_pretrained(out)
    return report(model, **files)


def run(folder: str, **files: str) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", dtype=torch.float32).eval()
    return report(model, **files)


def main(cases_file: str) -> None:
    torch.set_num_threads(2)
    for case in json.loads(Path(cases_file).read_text(encoding="utf-8")):
        try:
            result = {"write": write, "run": run}[case.pop("do")](**case)
        except Exception as error:  # the test reports it
            result = {"error": f"{type(error).__name__}: {error}"}
        print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
