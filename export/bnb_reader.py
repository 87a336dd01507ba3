"""Reads bitsandbytes' checkpoints, NF4 and LLM.int8(), as transformers writes them, and the artifact's half
in the same layout. LLM.int8() multiplies outlier columns of a batch's activations apart; here its weights are
read for what they stand for, and activations are rounded like any other model's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelFormatError, UnsupportedModelError
from ..models.config import spec_from_config
from ..models.config_reader import read_json_object, shown
from ..quant.packing import QuantizedTensor
from ..quant.packing_bnb import STATE, Nf4State, from_bnb_int8, from_bnb_nf4
from ..quant.packing_nf4 import NF4_CODE_BOOK, Nf4Tensor
from ..quant.packing_rows import MatrixRows
from ..quant.recipe import BNB_SETTINGS, Recipe
from .bnb_config import BnbConfig
from .checkpoint_weights import CheckpointWeights
from .shards import FLOATS

MAX_STATE_BYTES = 4096  # some 130 are needed
FP4_STATE = "quant_state.bitsandbytes__fp4"


class BnbWeights(CheckpointWeights):
    """Layers in NF4 or in 8 bits; those that `llm_int8_skip_modules` named are stored as they were."""

    def __init__(self, folder: Path) -> None:
        """Raises `ModelFormatError` or `UnsupportedModelError`, naming the file, tensor or setting."""
        folder = Path(folder)
        where = str(folder / "config.json")
        config = read_json_object(folder / "config.json", where)
        settings = config.get("quantization_config")
        if not isinstance(settings, dict):
            raise ModelFormatError(f"{where}: quantization_config is {shown(settings)}; expected an object")
        self.bnb_config = BnbConfig.from_json(settings, where)
        self._states: dict[str, Nf4State] = {}
        super().__init__(folder, spec_from_config(config, where))

    @property
    def recipe(self) -> Recipe | None:
        if self.bnb_config.bits == 8:
            whole = all(self._stored(name) == "I8" for name in self._linears)
            return Recipe().changed(method="int8") if whole else None
        sizes = {self._states[name].blocksize if name in self._states else None for name in self._linears}
        if sizes <= set(BNB_SETTINGS["nf4"]["group_size"]) and len(sizes) == 1:
            return Recipe().changed(method="nf4", group_size=sizes.pop())
        return None

    def _stored(self, name: str) -> str:
        """The dtype of a tensor's data."""
        return self._shards.file(name).tensors[name].dtype

    def _quantized(self, name: str) -> MatrixRows | None:
        rows, columns = self._shapes[name]
        if self._stored(name) in FLOATS:
            return None
        if self.bnb_config.bits == 8:
            return MatrixRows(rows, columns, 8, columns, "symmetric", None, self._int8_reader(name))
        state = self._states[name]
        read = self._nf4_reader(name, state, columns)
        return MatrixRows(rows, columns, 4, state.blocksize, "nf4", None, read)

    def _stored_rows(self, name: str, begin: int, end: int) -> NDArray[Any]:
        return self._shards.file(name).raw(name, (begin, end))

    def _int8_reader(self, name: str) -> Callable[[int, int], QuantizedTensor]:
        scb = f"{name.removesuffix('.weight')}.SCB"

        def read(begin: int, end: int) -> QuantizedTensor:
            where = f"{self._shards.file(name).where}: {name}"
            return from_bnb_int8(
                self._stored_rows(name, begin, end), self._stored_rows(scb, begin, end), where
            )

        return read

    def _nf4_reader(self, name: str, state: Nf4State, columns: int) -> Callable[[int, int], Nf4Tensor]:
        absmax, nested = f"{name}.absmax", state.nested
        where = f"{self._shards.file(name).where}: {name}"
        if nested is not None:
            quant_map = self._shards.raw(f"{name}.nested_quant_map")
            nested_absmax = self._shards.raw(f"{name}.nested_absmax")

        def read(begin: int, end: int) -> Nf4Tensor:
            blocks = begin * columns // state.blocksize, end * columns // state.blocksize
            scales = self._stored_rows(absmax, *blocks)
            if nested is not None:
                scales = nested.absmax(scales, blocks[0], quant_map, nested_absmax)
            if not np.isfinite(scales).all():
                raise ModelFormatError(f"{where}: absmax holds NaN or infinity")
            packed = self._stored_rows(name, begin * columns // 2, end * columns // 2)
            return from_bnb_nf4(packed, scales, columns, state.blocksize, where)

        return read

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        quantizes = name in self._linears or name == self.spec.head_name
        if not quantizes or self._stored(name) in FLOATS:
            self._shards.check(name, FLOATS, shape)
        elif self.bnb_config.bits == 4:
            self._check_nf4(name, (shape[0], shape[1]))
        else:
            self._check_int8(name, shape)

    def _check_int8(self, name: str, shape: tuple[int, ...]) -> None:
        stem = name.removesuffix(".weight")
        self._shards.check(name, ("I8", *FLOATS), shape, " for 8 bits")
        self._shards.check(f"{stem}.SCB", ("F32",), shape[:1], " for 8 bits")
        order = f"{stem}.weight_format"
        if order in self._shards:
            self._shards.check(order, ("U8",), (), " for 8 bits")
            found = int(self._shards.raw(order))
            if found:
                raise UnsupportedModelError(
                    f"{self._shards.file(order).where}: {order} is {found}; supported is 0, rows"
                )

    def _check_nf4(self, name: str, shape: tuple[int, int]) -> None:
        shards = self._shards
        where, stored = shards.file(name).where, f"{name}.{STATE}"
        if stored not in shards and f"{name}.{FP4_STATE}" in shards:
            raise UnsupportedModelError(f"{where}: {name} is in FP4; supported is NF4")
        size = shards.file(stored).tensors[stored].size
        if size > MAX_STATE_BYTES:
            raise ModelFormatError(
                f"{where}: tensor {shown(stored)} has {size} bytes; expected at most {MAX_STATE_BYTES}"
            )
        shards.check(stored, ("U8",), (size,))
        state = Nf4State.from_bytes(shards.raw(stored).tobytes(), shape, f"{where}: {name}")
        why = f" for NF4 in blocks of {state.blocksize}"
        shards.check(name, ("U8",), (shape[0] * shape[1] // 2, 1), why)
        shards.check(f"{name}.quant_map", ("F32",), (16,), why)
        if not np.allclose(shards.raw(f"{name}.quant_map"), NF4_CODE_BOOK, rtol=0, atol=1e-6):
            raise UnsupportedModelError(f"{where}: {name}.quant_map is not NF4's code book")
        if state.nested is None:
            shards.check(f"{name}.absmax", ("F32",), (state.blocks,), why)
        else:
            nested = (-(-state.blocks // state.nested.blocksize),)
            shards.check(f"{name}.absmax", ("U8",), (state.blocks,), why)
            shards.check(f"{name}.nested_absmax", ("F32",), nested, why)
            shards.check(f"{name}.nested_quant_map", ("F32",), (256,), why)
        self._states[name] = state
