"""What a model is: the numbers that fix its shapes and its arithmetic.

Read from a Hugging Face config.json and written back to one.  Knows no arrays and no device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.models.rope import RopeConfig, parse_rope, rope_to_hf

__all__ = ["ARCHITECTURES", "ModelConfig", "RopeConfig"]

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Supported `model_type`s, and the class names Hugging Face gives them."""

_DEFAULT_HEAD_DIM = {"qwen3": 128}
_DEFAULT_MAX_POSITION = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer of the Llama family.

    Raises:
        ValueError: sizes that do not fit together.
    """

    architecture: str
    """llama | mistral | qwen2 | qwen3."""
    vocab_size: int
    """Rows of the embedding; may exceed the tokenizer's vocabulary."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    head_dim: int
    """Not always hidden_size / num_heads."""
    max_position: int
    """Context length in tokens."""
    rms_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    """The output head is the embedding."""
    qkv_bias: bool
    qk_norm: bool
    """RMSNorm over head_dim on queries and keys, before the rotation."""
    sliding_windows: tuple[int | None, ...]
    """Per layer: how many of the latest tokens a query sees, itself among them; None is all."""
    eos_token_ids: tuple[int, ...]
    """End tokens the model names; the tokenizer may add its own."""
    bos_token_id: int | None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_heads} is not a multiple of "
                f"num_key_value_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embedding needs pairs")
        if len(self.sliding_windows) != self.num_layers:
            raise ValueError(
                f"{len(self.sliding_windows)} sliding windows were given for "
                f"{self.num_layers} layers"
            )
        for token in self.eos_token_ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"eos_token_id {token} is outside the vocabulary of {self.vocab_size}; "
                    "correct it in config.json or generation_config.json"
                )

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Read a Hugging Face configuration.

        Args:
            config: the contents of config.json.
            generation_config: the contents of generation_config.json, whose end tokens take
                precedence.

        Raises:
            ValueError: an architecture or option that is not supported, or a field that is
                missing or no number; the message names it.
        """
        architecture = _architecture(config)
        _refuse_unsupported(config, architecture)
        heads = _positive(config, "num_attention_heads")
        hidden = _positive(config, "hidden_size")
        layers = _positive(config, "num_hidden_layers")
        max_position = _positive(
            config, "max_position_embeddings", _DEFAULT_MAX_POSITION[architecture]
        )
        return cls(
            architecture=architecture,
            vocab_size=_positive(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_positive(config, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=_positive(config, "num_key_value_heads", heads),
            head_dim=_positive(config, "head_dim", _head_dim(architecture, config, hidden, heads)),
            max_position=max_position,
            rms_eps=_rms_eps(config),
            rope=parse_rope(config, max_position),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            sliding_windows=_sliding_windows(architecture, config, layers),
            eos_token_ids=_eos_ids(config, generation_config or {}),
            bos_token_id=_token_id(config, "bos_token_id"),
        )

    def to_hf(self) -> dict[str, Any]:
        """The same as a config.json; `from_hf` of it gives this object back.

        Raises:
            ValueError: sliding windows that Hugging Face cannot express for the architecture.
        """
        eos: int | list[int] | None = list(self.eos_token_ids) or None
        if eos is not None and len(self.eos_token_ids) == 1:
            eos = self.eos_token_ids[0]
        return {
            "architectures": [ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position,
            "rms_norm_eps": self.rms_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "eos_token_id": eos,
            "bos_token_id": self.bos_token_id,
            **rope_to_hf(self.rope),
            **_sliding_to_hf(self),
        }


def _architecture(config: Mapping[str, Any]) -> str:
    if not isinstance(config, Mapping):
        raise ValueError("config.json must hold one JSON object")
    model_type = config.get("model_type")
    if model_type is None:
        by_class = {name: kind for kind, name in ARCHITECTURES.items()}
        classes = config.get("architectures") or [None]
        model_type = by_class.get(classes[0], classes[0])
    if model_type not in ARCHITECTURES:
        raise ValueError(
            f"model architecture {model_type!r} is not supported; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    return str(model_type)


def _refuse_unsupported(config: Mapping[str, Any], architecture: str) -> None:
    """Options that would change the arithmetic must never be passed over."""
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"hidden_act={activation!r} is not supported; it must be 'silu'")
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name) and not (architecture == "qwen2" and name == "attention_bias"):
            raise ValueError(f"{name}={config[name]!r} is not supported for {architecture}")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ValueError(
            f"weights quantised by {method!r} are not supported; use the unquantised model or "
            "a GGUF file"
        )


def _positive(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"config.json has no {key!r}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json has {key}={value!r}; it must be a positive integer")
    return value


def _head_dim(architecture: str, config: Mapping[str, Any], hidden: int, heads: int) -> int | None:
    """The head size where the configuration gives none."""
    if architecture in _DEFAULT_HEAD_DIM and "head_dim" not in config:
        return _DEFAULT_HEAD_DIM[architecture]
    if config.get("head_dim") is None and hidden % heads:
        raise ValueError(
            f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}, and "
            "config.json gives no head_dim"
        )
    return hidden // heads


def _rms_eps(config: Mapping[str, Any]) -> float:
    value = config.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise ValueError(f"config.json has rms_norm_eps={value!r}; it must be in (0, 1)")
    return float(value)


def _sliding_windows(
    architecture: str, config: Mapping[str, Any], layers: int
) -> tuple[int | None, ...]:
    full: tuple[int | None, ...] = (None,) * layers
    if architecture == "llama" or config.get("sliding_window", 4096) is None:
        return full
    if architecture == "mistral":
        return (_positive(config, "sliding_window", 4096),) * layers
    if not config.get("use_sliding_window", False):
        return full
    window = _positive(config, "sliding_window", 4096)
    return tuple(
        window if kind == "sliding_attention" else None for kind in _layer_types(config, layers)
    )


def _layer_types(config: Mapping[str, Any], layers: int) -> list[str]:
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", 28)
        return ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    unknown = sorted({str(kind) for kind in types} - {"sliding_attention", "full_attention"})
    if unknown or len(types) != layers:
        raise ValueError(
            f"layer_types must be {layers} times 'full_attention' or 'sliding_attention'; "
            f"it has {len(types)} entries and unknown {unknown}"
        )
    return list(types)


def _sliding_to_hf(config: ModelConfig) -> dict[str, Any]:
    windows = set(config.sliding_windows) - {None}
    if config.architecture == "mistral" and len(set(config.sliding_windows)) == 1:
        return {"sliding_window": config.sliding_windows[0]}
    if not windows:
        return {}
    if config.architecture not in ("qwen2", "qwen3") or len(windows) != 1:
        raise ValueError(
            f"sliding windows {sorted(w for w in windows if w is not None)} on some layers "
            f"cannot be written for architecture {config.architecture!r}"
        )
    return {
        "use_sliding_window": True,
        "sliding_window": windows.pop(),
        "layer_types": [
            "full_attention" if window is None else "sliding_attention"
            for window in config.sliding_windows
        ],
    }


def _eos_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> tuple[int, ...]:
    for source in (generation_config, config):
        value = source.get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
                raise ValueError(f"eos_token_id={value!r} must be a token id or a list of them")
            return tuple(dict.fromkeys(ids))
    return ()


def _token_id(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError(f"{key}={value!r} must be a token id or null")
    return value
