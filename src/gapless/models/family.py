"""The definition of a family, and the keys of config.json that mean the same in all families.

Refuses what would be computed wrongly without an error. Knows no weights and no torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gapless.errors import CorruptModel, UnsupportedModel
from gapless.models.config import ModelConfig, check_num_layers, repeated
from gapless.models.files import shown
from gapless.models.keys import Keys
from gapless.models.names import GGUF_NAMES, WeightNames
from gapless.models.quantized import read_quantization
from gapless.models.rope_config import hf_rope
from gapless.models.spec import Activation, AttentionSpec, ExpertSpec, LayerSpec, MlpSpec, NormSpec

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class GGUFForm:
    """How GGUF files hold a family."""

    architecture: str  # general.architecture
    names: WeightNames = GGUF_NAMES
    keys: Mapping[str, str] = field(default_factory=dict)  # of config.json: their names in the metadata
    mark: str = ""  # a key that tells the family from others of the same architecture; it is there and not 0


@dataclass(frozen=True, slots=True)
class Family:
    """Models that one function can describe."""

    architecture: str  # in `architectures` of a config.json
    model_type: str  # in its `model_type`
    from_hf: Callable[[Keys], ModelConfig]  # end tokens aside
    gguf: GGUFForm | None = None  # None: a different family reads GGUF files of this one
    models: str = ""  # names by which people know them
    gguf_name: str = ""  # what a different family calls them


def hf_model(
    keys: Keys, architecture: str, layers: LayerSpec | Sequence[LayerSpec], *, allowed: str = "", **more: Any
) -> ModelConfig:
    """A model of these layers, or of one that is repeated; `more` are fields of the config that differ from others'.

    The last norm is like that of the layers, unless it is one of them. allowed: a quantization that weights may have.
    """
    if isinstance(layers, LayerSpec):
        layers = repeated(layers, keys.size("num_hidden_layers"))
    fields: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": keys.size("vocab_size"),
        "hidden_size": keys.size("hidden_size"),
        "layers": tuple(layers),
        "last_norm": replace(layers[0].norm, place="before"),
        "max_position_embeddings": keys.size("max_position_embeddings"),
        "tie_embeddings": keys.flag("tie_word_embeddings"),
        "fp8": read_quantization(keys, allowed),
    }
    return ModelConfig(**fields | more)


def hf_head_dim(keys: Keys, default: int | None = None) -> int:
    """default: where the config has none, instead of hidden_size / num_heads."""
    return keys.size("head_dim", default or keys.size("hidden_size") // keys.size("num_attention_heads") or 1)


def hf_attention(keys: Keys, *, head_dim: int | None = None, theta: float = 10000.0, **more: Any) -> AttentionSpec:
    """Attention to the whole context; `more` are fields that differ from others'.

    head_dim: see `hf_head_dim`. theta: of the rope, where the config has none.
    """
    num_heads, head_dim = keys.size("num_attention_heads"), hf_head_dim(keys, head_dim)
    if "rope" not in more:
        more["rope"] = hf_rope(keys, head_dim, theta=theta)
    fields: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": keys.size("num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
    }
    return AttentionSpec(**fields | more)


def hf_mlp(keys: Keys, *, key: str = "hidden_act", default: str = "silu", **more: Any) -> MlpSpec:
    """The gated one, unless `more` says otherwise. key, default: of the activation."""
    name = keys.string(key, default)
    if name not in ACTIVATIONS:
        raise UnsupportedModel(f"{key} {shown(name)} is not supported; Gapless has {', '.join(ACTIVATIONS)}")
    more = {"activation": ACTIVATIONS[name]} | more
    return MlpSpec(**more) if "size" in more else MlpSpec(keys.size("intermediate_size"), **more)


def hf_experts(
    keys: Keys,
    *,
    size: int,
    is_normalized: bool = True,
    router_bias: bool = False,
    shared_size: int = 0,
    **more: Any,
) -> MlpSpec:
    """Experts of this size. shared_size: that of a shared one; 0: there is none.

    Two keys say how many there are, and different versions of transformers write either.
    """
    is_old = keys.get("num_local_experts") is None
    number, chosen = keys.size("num_experts" if is_old else "num_local_experts"), keys.size("num_experts_per_tok")
    if chosen > number:
        raise CorruptModel(f"{keys.where}: num_experts_per_tok is {chosen}, there are {number} experts")
    experts = ExpertSpec(number, chosen, is_normalized, router_bias, shared_size)
    return hf_mlp(keys, size=size, kind="experts", experts=experts, **more)


def hf_norm(keys: Keys, *, default: float = 1e-6, **more: Any) -> NormSpec:
    """RMS norms; default: their epsilon."""
    return NormSpec(keys.number("rms_norm_eps", default), **more)


def hf_layer_norm(keys: Keys, key: str = "layer_norm_eps", *, bias: bool = True) -> NormSpec:
    return NormSpec(keys.number(key, 1e-5), kind="layer", bias=bias)


def hf_layers(
    keys: Keys,
    layer: LayerSpec,
    *,
    local: LayerSpec | None = None,
    default: int | None = 4096,
    always: bool = False,
    is_local: Callable[[int], bool] = lambda index: True,
) -> list[LayerSpec]:
    """Every layer: `layer` where it sees the whole context, `local` with a window where not.

    local: what it is but for its window, where it differs from `layer`. default: the window where the config has no
    key for it. always: it counts even without use_sliding_window. is_local: which layers have it where the config does
    not list them. A window as long as the context is none.
    """
    window, local = _hf_window(keys, default, always=always), local or layer
    kinds = _hf_layer_types(keys)
    if window is None and "sliding_attention" in kinds:
        raise UnsupportedModel("layer_types has sliding_attention, but there is no sliding_window in use")
    if window is not None and window < keys.size("max_position_embeddings"):
        local = replace(local, attention=replace(local.attention, window=window))
    num_layers = keys.size("num_hidden_layers")
    are_local = [kind == "sliding_attention" for kind in kinds] or [is_local(index) for index in range(num_layers)]
    return [local if is_here else layer for is_here in are_local]


def _hf_window(keys: Keys, default: int | None, *, always: bool) -> int | None:
    in_use = (always or keys.flag("use_sliding_window")) and not keys.is_null("sliding_window")
    return keys.size("sliding_window", default) if in_use and (default or keys.get("sliding_window")) else None


def _hf_layer_types(keys: Keys) -> list[str]:
    kinds, num_layers = keys.strings("layer_types"), keys.size("num_hidden_layers")
    check_num_layers(num_layers)
    if kinds and len(kinds) != num_layers:
        raise CorruptModel(f"{keys.where}: layer_types lists {len(kinds)} layers, num_hidden_layers is {num_layers}")
    if other := set(kinds) - {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(f"layer_types {shown(sorted(other))} are not supported")
    return kinds


def all_but(step: int) -> Callable[[int], bool]:
    """Local layers, where every layer whose number is a multiple of the step sees the whole context, counted from 1."""
    return lambda index: (index + 1) % step != 0
