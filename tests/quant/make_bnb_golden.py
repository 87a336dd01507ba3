"""Writes data/bnb.npz: small weights as bitsandbytes quantizes and dequantizes them on a CPU.

pip install bitsandbytes==0.50.2 && python make_bnb_golden.py
"""

import json
from pathlib import Path

import bitsandbytes
import numpy as np
import torch
from bitsandbytes.functional import (
    dequantize_4bit,
    int8_vectorwise_dequant,
    int8_vectorwise_quant,
    quantize_4bit,
)

OUT = Path(__file__).parent / "data" / "bnb.npz"


def main() -> None:
    generator = torch.Generator().manual_seed(3)
    # Two blocks of 256 scales, the second of them short.
    weight = torch.randn((22, 768), generator=generator) * torch.rand((22, 1), generator=generator)
    weight = weight.half().float()
    arrays = {"weight": weight.half().numpy(), "version": np.array(bitsandbytes.__version__)}
    for name, nested in (("nf4", False), ("double", True)):
        packed, state = quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=nested)
        meant = dequantize_4bit(packed, state)
        arrays[f"{name}.meant"] = meant.numpy()
        arrays[name] = packed.numpy()
        for key, value in state.as_dict(packed=True).items():
            arrays[f"{name}.{key}"] = value.numpy()
    codes, scb, _ = int8_vectorwise_quant(weight.half())
    arrays |= {"int8": codes.numpy(), "int8.SCB": scb.numpy()}
    arrays["int8.meant"] = int8_vectorwise_dequant(codes, scb).numpy()
    np.savez_compressed(OUT, **arrays)
    print(json.dumps({name: [str(a.dtype), list(a.shape)] for name, a in arrays.items()}, indent=1))


if __name__ == "__main__":
    main()
