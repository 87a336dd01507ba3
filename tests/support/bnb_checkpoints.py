"""bitsandbytes checkpoints packed byte by byte from its documentation, with none of Nybble's code."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

# Dettmers et al. 2023, appendix E.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
)  # fmt: skip
NF4_SETTINGS: dict[str, Any] = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_quant_storage": "uint8", "bnb_4bit_use_double_quant": False, "llm_int8_skip_modules": None,
}  # fmt: skip
INT8_SETTINGS: dict[str, Any] = {
    "quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True, "llm_int8_threshold": 6.0,
}  # fmt: skip


def nested(absmax: NDArray[np.float32], blocksize: int = 256) -> tuple[dict[str, Any], NDArray[np.float32]]:
    """Scales in 8 bits over a code book of their own: what is stored, and what that stands for."""
    offset = float(absmax.mean())
    book = np.linspace(-1, 1, 256).astype(np.float32)
    codes, scales, meant = [], [], []
    for start in range(0, len(absmax), blocksize):
        part = absmax[start : start + blocksize] - np.float32(offset)
        scale = np.float32(max(abs(float(x)) for x in part))
        scales.append(scale)
        for value in part:
            code = int(np.abs(book.astype(np.float64) * float(scale) - float(value)).argmin())
            codes.append(code)
            meant.append(book[code] * scale + np.float32(offset))
    stored = {
        "absmax": np.array(codes, np.uint8),
        "nested_absmax": np.array(scales, np.float32),
        "nested_quant_map": book,
    }
    state = {"nested_blocksize": blocksize, "nested_dtype": "float32", "nested_offset": offset}
    return stored | {"state": state}, np.array(meant, np.float32)


def nf4_tensors(
    name: str, weight: NDArray[np.float32], blocksize: int = 64, double: bool = False
) -> tuple[dict[str, NDArray[Any]], NDArray[np.float32]]:
    """A weight as stored, and what that stands for in float32."""
    flat, packed, absmax, codes = weight.reshape(-1), bytearray(), [], []
    for start in range(0, flat.size, blocksize):
        block = [float(x) for x in flat[start : start + blocksize]]
        largest = max(abs(x) for x in block)
        absmax.append(largest)
        codes += np.abs(np.subtract.outer(block, np.multiply(NF4, largest))).argmin(axis=1).tolist()
    for first, second in zip(codes[::2], codes[1::2], strict=True):
        packed += struct.pack("B", first * 16 + second)
    scales = np.array(absmax, np.float32)
    parts: dict[str, Any] = {"absmax": scales}
    state: dict[str, Any] = {
        "quant_type": "nf4", "blocksize": blocksize, "dtype": "float16", "shape": list(weight.shape)
    }  # fmt: skip
    if double:
        parts, scales = nested(scales)
        state |= parts.pop("state")
    stored = {f"{name}.{part}": value for part, value in parts.items()}
    stored[f"{name}.quant_map"] = np.array(NF4, np.float32)
    stored[f"{name}.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    stored[name] = np.frombuffer(bytes(packed), np.uint8).reshape(-1, 1)
    meant = [np.float32(NF4[code]) * scales[i // blocksize] for i, code in enumerate(codes)]
    return stored, np.array(meant, np.float32).reshape(weight.shape)


def int8_tensors(
    name: str, weight: NDArray[np.float32]
) -> tuple[dict[str, NDArray[Any]], NDArray[np.float32]]:
    """A weight as stored, and what that stands for in float32."""
    stem, largest = name.removesuffix(".weight"), np.abs(weight).max(axis=1).astype(np.float32)
    codes = np.rint(weight * (127 / largest[:, None])).astype(np.int8)
    stored = {name: codes, f"{stem}.SCB": largest, f"{stem}.weight_format": np.array(0, np.uint8)}
    return stored, codes.astype(np.float32) * (largest[:, None] / 127)


def write_bnb_checkpoint(
    source: Path,
    out: Path,
    settings: dict[str, Any],
    quantizes: Callable[[str], bool] = lambda stem: True,
    **nf4: Any,
) -> dict[str, NDArray[np.float32]]:
    """A float folder as a quantized one; `quantizes` says which linear layers are (by their names without
    `.weight`), `nf4` are `nf4_tensors`'. Returns what every tensor stands for."""
    shutil.copytree(source, out)
    stored: dict[str, NDArray[Any]] = {}
    meant = {}
    for name, weight in load_file(out / "model.safetensors").items():
        linear = weight.ndim == 2 and "embed" not in name and not name.startswith("lm_head")
        if not linear or not quantizes(name.removesuffix(".weight")):
            stored[name] = weight.astype(np.float16)
            meant[name] = stored[name].astype(np.float32)
        elif settings["load_in_4bit"]:
            parts, meant[name] = nf4_tensors(name, weight.astype(np.float32), **nf4)
            stored |= parts
        else:
            parts, meant[name] = int8_tensors(name, weight.astype(np.float32))
            stored |= parts
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    return meant
