"""Models of known shapes with seeded random weights: memory and speed depend on a model's shape alone, so
that none needs to be downloaded. Their tokenizer is SmolLM2's, whatever their vocabulary; `write_tokenizer`
takes it out of the GGUF file, which as a file of its own it would not come from."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nybble.devices import ResidencyPlan
from nybble.export.weights import LogicalTensor
from nybble.models.open import open_source
from nybble.models.spec import MixtureSpec, ModelSpec, RopeSpec
from nybble.quant.packing import QuantizedTensor
from nybble.quant.packing_rows import ROW_STEP, MatrixKind, MatrixRows
from nybble.quant.recipe import Recipe
from nybble.runtime.packed_cache import load_packed
from nybble.runtime.packed_weights import PackedSource

TOKENIZER_TOKENS = 49152
ROUTER_SKEW = 0.5


@dataclass(frozen=True)
class SeededModel:
    """A `nybble.runnable.Runnable`: what `LLM` opens in an artifact's place."""

    name: str
    spec: ModelSpec
    recipe: Recipe
    tokenizer: Path | None = None  # the folder with its files

    half: Literal["gptq"] = "gptq"
    linear_bytes: None = None

    @property
    def config(self) -> dict[str, Any]:
        return {"eos_token_id": 2}

    @property
    def generation_config(self) -> dict[str, Any]:
        return {}

    @property
    def tokenizer_files(self) -> Mapping[str, bytes]:
        assert self.tokenizer is not None
        return {file.name: file.read_bytes() for file in self.tokenizer.iterdir()}

    @property
    def digest(self) -> str:
        return sha256(repr((self.spec, self.recipe)).encode()).hexdigest()

    def packed(self, cache: bool, residency: ResidencyPlan, scratch: Path) -> PackedSource:
        """From a file of packed weights in the user's cache folder, whatever `cache` says."""
        return load_packed(None, self.digest, self.spec, lambda: self, residency)

    def tensor(self, name: str) -> LogicalTensor:
        """`LogicalWeights`: seeded by the tensor's name, and of a size that keeps activations ordinary."""
        if (matrix := self.matrix(name)) is not None:
            whole = matrix.whole()
            assert isinstance(whole, QuantizedTensor)
            return whole
        shape = self.spec.tensors()[name]
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        random = np.random.default_rng(list(name.encode()))  # a router or gate
        gates = random.normal(size=shape, scale=shape[1] ** -0.5)
        # Some experts of a mixture are chosen more than others: those whose logits vary more.
        skew = random.permutation(np.arange(1, shape[0] + 1) ** -ROUTER_SKEW)
        return np.asarray(2 * gates * skew[:, None], np.float32)

    def matrix(self, name: str) -> MatrixRows | None:
        """A quantized weight, made some rows at a time: whole, the largest would take more memory than a
        run of it."""
        shape = self.spec.tensors()[name]
        if len(shape) == 1 or name in self.spec.float_names:
            return None
        rows, columns = shape
        ends = name in (self.spec.embedding_name, self.spec.head_name)
        bits = 8 if ends else self.recipe.bits
        group = 32 if ends else columns if self.recipe.group_size == -1 else self.recipe.group_size
        groups = -(-columns // group)
        symmetric = ends or self.recipe.symmetric
        scale = np.float16(1 / (2 ** (bits - 1) * columns**0.5))

        def read(begin: int, end: int) -> QuantizedTensor:
            packed = np.empty((end - begin, columns * bits // 8), np.uint8)
            zeros = np.empty((end - begin, groups), np.uint8)
            for first in range(begin, end, ROW_STEP):
                random = np.random.default_rng([*name.encode(), first])
                some = slice(first - begin, min(first + ROW_STEP, end) - begin)
                packed[some] = random.integers(0, 256, packed[some].shape, dtype=np.uint8)
                zeros[some] = random.integers(6, 10, zeros[some].shape, dtype=np.uint8) << (bits - 4)
            scales = np.full((end - begin, groups), scale)
            return QuantizedTensor(packed, scales, None if symmetric else zeros, bits, group, columns)

        kind: MatrixKind = "symmetric" if symmetric else "zeros"
        return MatrixRows(rows, columns, bits, group, kind, None, read)

    def close(self) -> None:
        pass


def write_tokenizer(folder: Path) -> None:
    """SmolLM2's tokenizer files, in a folder that is made."""
    folder.mkdir(parents=True, exist_ok=True)
    with closing(open_source("smollm2")) as source:
        for name, content in source.tokenizer_files.items():
            (folder / name).write_bytes(content)


def _spec(
    vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head: int, **more: Any
) -> ModelSpec:
    return ModelSpec(
        "llama", vocab, hidden, inner, layers, heads, kv_heads, head, 8192, 1e-5, RopeSpec(1e5, head), **more
    )


# After SmolLM2-360M, a Llama of 2023 with a head of its own, Qwen2.5-0.5B and Qwen2.5-1.5B; and a mixture of
# 1.5 billion weights, of which a token goes through 0.3 billion.
MODELS = {
    model.name: model
    for model in (
        SeededModel(
            "seeded-360m",
            _spec(49152, 960, 2560, 32, 15, 5, 64, tied_embeddings=True),
            Recipe(bits=4, group_size=32),
        ),
        SeededModel(
            "seeded-untied",
            _spec(32000, 1024, 2816, 16, 16, 4, 64),
            Recipe(bits=8, group_size=64),
        ),
        SeededModel(
            "seeded-0.5b",
            _spec(151936, 896, 4864, 24, 14, 2, 64, tied_embeddings=True, qkv_bias=True),
            Recipe(bits=4, group_size=128, symmetric=False),
        ),
        SeededModel(
            "seeded-1.5b",
            _spec(151936, 1536, 8960, 28, 12, 2, 128, tied_embeddings=True, qkv_bias=True),
            Recipe(bits=4, group_size=64),
        ),
        SeededModel(
            "seeded-experts",
            _spec(
                49152,
                1024,
                1792,
                16,
                16,
                4,
                64,
                tied_embeddings=True,
                mixture=MixtureSpec(tuple(range(16)), 16, 2, 1792, True),
            ),
            # Zero points are where codes are on average: else all tokens would come to the same experts.
            Recipe(bits=4, group_size=64, symmetric=False),
        ),
    )
}
