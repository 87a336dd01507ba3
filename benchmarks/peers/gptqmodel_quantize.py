"""Runs in GPTQModel's own environment, for `benchmarks/quantize.py`: quantizes a Hugging Face folder on the
windows in its `calibration.npy` and prints time and peak memory as a line of JSON.

python gptqmodel_quantize.py MODEL OUTPUT SETTINGS
"""

import json
import resource
import sys
import time
from importlib.metadata import version

import numpy as np
import torch
from gptqmodel import GPTQModel, QuantizeConfig


def main(model: str, output: str, settings: str) -> None:
    windows = torch.from_numpy(np.load(f"{model}/calibration.npy").astype(np.int64))
    calibration = [{"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]} for row in windows]
    start = time.monotonic()
    loaded = GPTQModel.load(model, QuantizeConfig(device="cpu", **json.loads(settings)))
    loaded.quantize(calibration, batch_size=8)
    seconds = time.monotonic() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    loaded.save(output)
    print()
    print(json.dumps({"seconds": seconds, "peak_bytes": peak, "version": version("gptqmodel")}))


if __name__ == "__main__":
    main(*sys.argv[1:])
