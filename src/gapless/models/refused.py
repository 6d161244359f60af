"""Models that no family will describe as they are: why they are refused, by what their config.json says.

A decoder keeps keys and values of every position. What keeps a state instead, or reads a second sequence, does not fit.
"""

from gapless.models.keys import Keys

RECURRENT = frozenset(
    (
        *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear"),
        *("lfm2", "lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h"),
        *("olmo_hybrid", "plamo2", "qwen3_5", "qwen3_5_moe", "qwen3_next", "recurrent_gemma"),
        *("rwkv", "xlstm", "zamba", "zamba2"),
    )
)
ENCODER_DECODERS = frozenset(
    (
        *("bart", "bigbird_pegasus", "blenderbot", "encoder-decoder", "led", "longt5"),
        *("m2m_100", "marian", "mbart", "mt5", "nllb-moe", "pegasus"),
        *("prophetnet", "speech_to_text", "switch_transformers", "t5", "t5gemma", "udop"),
        *("umt5", "whisper"),
    )
)
STATES = frozenset({"linear_attention", "mamba", "mamba2", "recurrent", "conv", "gated_delta"})


def why_refused(keys: Keys) -> str | None:
    """Why no decoder can run the model, or None."""
    model_type = keys.string("model_type", "")
    kinds = {kind for key in ("layer_types", "layers_block_type") for kind in keys.strings(key)}
    if model_type in RECURRENT or kinds & STATES:
        return "it has layers with a recurrent state (state space, gated delta), which Gapless does not keep"
    if model_type in ENCODER_DECODERS or keys.get("is_encoder_decoder") is True:
        return "it is an encoder-decoder, and Gapless runs decoders"
    return None
