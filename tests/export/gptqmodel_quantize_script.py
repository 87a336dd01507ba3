"""Runs in GPTQModel's own environment: quantizes models, and says what each of its folders stands for.

python gptqmodel_quantize_script.py CASES.json

CASES holds objects with `model` (a Hugging Face folder in float32), `output` (the folder to write),
`settings` (of `QuantizeConfig`), `tokens` (an .npy of int64 [windows, length], for calibration and for the
logits) and `meant` (the .npz to write: the float16 weight [out, in] of each quantized layer, and `logits`
float32 [windows, length, vocab]). Prints a line of JSON for each.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

# Compiling the dequantization of each layer takes minutes and gives the same numbers.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import numpy as np
import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig


@torch.inference_mode()
def run(model: str, output: str, settings: dict[str, Any], tokens: str, meant: str) -> dict[str, Any]:
    windows = torch.from_numpy(np.load(tokens))
    calibration = [{"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]} for row in windows]
    with torch.inference_mode(False):
        loaded = GPTQModel.load(model, QuantizeConfig(device="cpu", **settings))
        loaded.quantize(calibration, batch_size=1)
    loaded.save(output)
    read = GPTQModel.load(output, backend=BACKEND.GPTQ_TORCH, device="cpu", dtype=torch.float16).model.eval()
    arrays = {
        name: module.dequantize_weight().T.contiguous().numpy()
        for name, module in read.named_modules()
        if hasattr(module, "qweight")
    }
    layers = len(arrays)
    arrays["logits"] = read(windows).logits.float().numpy()
    np.savez(meant, **arrays)
    return {"quantized_layers": layers}


def main(cases_file: str) -> None:
    torch.set_num_threads(2)
    for case in json.loads(Path(cases_file).read_text(encoding="utf-8")):
        try:
            result = run(**case)
        except Exception as error:  # the test reports it
            result = {"error": f"{type(error).__name__}: {error}"}
        print("\nRESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
