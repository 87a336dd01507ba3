"""`adapter_config.json` of PEFT (https://huggingface.co/docs/peft/package_reference/lora), as far as merging
a LoRA needs it. What would change the merged weights and is not known here is refused."""

import math
import re
from collections.abc import Mapping
from typing import Any

from ..errors import UnsupportedModelError
from ..records import dataclass
from .config_reader import ConfigReader, shown

MAX_RANK = 1 << 16

# Keys that say how an adapter was made, or which modules have one: its tensors say that, too.
IGNORED = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
        "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config",
        "lora_dropout", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision",
        "runtime_config", "target_modules", "task_type",
    }
)  # fmt: skip
READ = frozenset(
    {
        "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias",
        "init_lora_weights",
    }
)  # fmt: skip
# Other ways to begin change the base model's weights, and the adapter is to what they left.
BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")
PATTERN = re.compile(r"\^?[A-Za-z0-9_.]+")


@dataclass(frozen=True)
class AdapterConfig:
    """Ranks and weights of a LoRA's modules; the patterns are of single modules, in order."""

    rank: int
    alpha: float
    rank_stabilized: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    @classmethod
    def from_json(cls, config: Mapping[str, Any], where: str) -> "AdapterConfig":
        """Checks a parsed file; `where` names it in messages. Raises `ModelFormatError`, and
        `UnsupportedModelError` for another kind of adapter or a feature that is not supported."""
        reader = ConfigReader(config, where)
        kind = reader.string("peft_type")
        if kind != "LORA":
            raise reader.unsupported("peft_type", kind, "LORA")
        bias = reader.config.get("bias", "none")
        if bias != "none":
            raise reader.unsupported("bias", bias, "none")
        beginning = reader.config.get("init_lora_weights", True)
        if beginning not in BEGINNINGS:
            raise reader.unsupported("init_lora_weights", beginning, "true, false, gaussian, eva, orthogonal")
        for key, value in config.items():
            # Unknown ones are of newer versions; null, false and empty is not using what they bring.
            if key not in IGNORED | READ and value not in (None, False, [], {}):
                raise UnsupportedModelError(f"{where}: {key} is {shown(value)}, which is not supported")
        return cls(
            rank=reader.integer("r", 8, high=MAX_RANK),
            alpha=reader.number("lora_alpha", 8, above=-1e30),
            rank_stabilized=reader.flag("use_rslora", False),
            rank_pattern=_pattern(reader, "rank_pattern", lambda x, key: x.integer(key, high=MAX_RANK)),
            alpha_pattern=_pattern(reader, "alpha_pattern", lambda x, key: x.number(key, above=-1e30)),
        )

    def rank_of(self, module: str) -> int:
        rank: int = _matching(self.rank_pattern, module, self.rank)
        return rank

    def scale_of(self, module: str) -> float:
        """What multiplies B A of a module, named without `.weight`."""
        rank = self.rank_of(module)
        alpha: float = _matching(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.rank_stabilized else alpha / rank


def _pattern(reader: ConfigReader, key: str, read: Any) -> dict[str, Any]:
    section = reader.section(key)
    if section is None:
        return {}
    for pattern in section.config:
        # PEFT takes regular expressions; from a file they might be matched for ever.
        if not PATTERN.fullmatch(pattern):
            raise UnsupportedModelError(
                f"{reader.where}: {key} has {shown(pattern)}; supported are names of modules and their ends"
            )
    return {pattern: read(section, pattern) for pattern in section.config}


def _matching(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Of the first pattern that is the module's name or, without ^, its end from a dot on."""
    for pattern, value in patterns.items():
        name = pattern.removeprefix("^")
        if module == name or (name == pattern and module.endswith("." + name)):
            return value
    return default
