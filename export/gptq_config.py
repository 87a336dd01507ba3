"""`quantization_config`, as transformers, GPTQModel and vLLM read it, and as they write it."""

from typing import Any

from ..errors import ModelFormatError, UnsupportedModelError
from ..models.config_reader import shown
from ..models.spec import ModelSpec
from ..quant.packing import CheckpointFormat
from ..quant.recipe import Recipe
from ..records import dataclass
from .layer_overrides import LayerOverride, StoredFormat, format_of, read_overrides

# Loaders that refuse a group size which does not divide a layer's input size, by name and reason.
REFUSES_SHORT_GROUPS = ("vLLM", "SGLang")


@dataclass(frozen=True)
class GptqConfig:
    """The fields a reader needs; `group_size` is −1 for one group per row, `lm_head` says whether the head is
    quantized, too, and `dynamic` has what differs in single layers."""

    bits: int
    group_size: int
    desc_act: bool
    sym: bool
    checkpoint_format: CheckpointFormat
    lm_head: bool = False
    dynamic: tuple[LayerOverride, ...] = ()

    def format_of(self, name: str) -> StoredFormat | None:
        """How a layer is stored, by its name without `.weight`; None where it is not quantized."""
        return format_of(name, StoredFormat(self.bits, self.group_size), self.dynamic)

    @classmethod
    def from_recipe(
        cls, recipe: Recipe, spec: ModelSpec, checkpoint_format: CheckpointFormat = "gptq"
    ) -> "GptqConfig":
        """Of the checkpoint of a model; layers' names are the checkpoint's."""
        symmetric = all(form.symmetric for form in recipe.all_formats)
        stored = [x for layer in range(spec.num_layers) for x in spec.stored_linears(layer)]
        formats = [(x.linear.name, recipe.format_of(x.parts[0].name)) for x in stored]
        dynamic = tuple(
            LayerOverride.of(name.removesuffix(".weight"), form.bits, form.group_size)
            for name, form in formats
            if form != recipe.format
        )
        return cls(
            recipe.bits, recipe.group_size, recipe.desc_act, symmetric, checkpoint_format, dynamic=dynamic
        )

    @classmethod
    def from_json(cls, data: object, where: str) -> "GptqConfig":
        """Checks a `quantization_config`; `where` names its file in messages. Raises `ModelFormatError` for a
        field that is missing or of the wrong type, `UnsupportedModelError` for what Nybble does not read."""
        if not isinstance(data, dict):
            raise ModelFormatError(f"{where}: quantization_config is {shown(data)}; expected an object")

        def field(name: str, kind: type, default: object = None) -> Any:
            value = data.get(name, default)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                found = shown(value) if name in data else "missing"
                raise ModelFormatError(f"{where}: {name} is {found}; expected a {kind.__name__}")
            return value

        def supported(name: str, value: object, *expected: object) -> None:
            if value not in expected:
                options = " or ".join(map(str, expected))
                raise UnsupportedModelError(f"{where}: {name} is {shown(value)}; supported is {options}")

        method = data.get("quant_method", data.get("method", "gptq"))
        supported("quant_method", method, "gptq")
        bits, group_size = field("bits", int), field("group_size", int)
        dynamic = read_overrides(data.get("dynamic"), where)
        for of_layer in (bits, *(x.bits for x in dynamic if x.bits is not None)):
            supported("bits", of_layer, 2, 3, 4, 8)
        for size in (group_size, *(x.group_size for x in dynamic if x.group_size is not None)):
            if size != -1 and not 1 <= size < 1 << 31:
                raise ModelFormatError(
                    f"{where}: group_size is {shown(size)}; expected -1 or a positive size"
                )
        key = "checkpoint_format" if "checkpoint_format" in data else "format"
        checkpoint_format = field(key, str, "gptq")
        supported(key, checkpoint_format, "gptq", "gptq_v2")
        supported("pack_dtype", data.get("pack_dtype", "int32"), "int32")
        desc_act, sym = field("desc_act", bool, False), field("sym", bool, True)
        return cls(bits, group_size, desc_act, sym, checkpoint_format, field("lm_head", bool, False), dynamic)

    def to_json(self, recipe: Recipe, version: str) -> dict[str, Any]:
        """What `config.json` (as `quantization_config`) and `quantize_config.json` hold."""
        settings: dict[str, Any] = {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group_size,
            "desc_act": self.desc_act,
            "sym": self.sym,
            "checkpoint_format": self.checkpoint_format,
            "pack_dtype": "int32",
            "lm_head": False,
            "damp_percent": recipe.damp,
            "static_groups": recipe.method == "gptq" and recipe.act_order == "static",
            "true_sequential": True,
            "meta": {"quantizer": [f"nybble:{version}"]},
        }
        if self.dynamic:
            settings["dynamic"] = {
                f"+:{x.pattern}": {"bits": x.bits, "group_size": x.group_size} for x in self.dynamic
            }
        return settings
