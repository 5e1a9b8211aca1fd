"""RoPE scaling by name, such as `yarn:4`, without editing a checkpoint."""

from transformers import PreTrainedConfig


TYPES = ("linear", "dynamic", "yarn")


def parse_rope(setting: str) -> tuple[str, float] | None:
    """Type and factor of a setting; None for `native`."""
    if setting == "native":
        return None
    kind, _, number = setting.partition(":")
    try:
        factor = float(number)
    except ValueError:
        factor = 0.0
    if kind not in TYPES or not 1 < factor < float("inf"):
        raise ValueError(
            f"Unknown RoPE setting {setting!r}; allowed are native and {', '.join(f'{name}:FACTOR' for name in TYPES)} "
            "with a factor above 1, such as yarn:4."
        )
    return kind, factor


def scale_rope(config: PreTrainedConfig, setting: str) -> None:
    """Set the scaling in a config, relative to the length that the model was pretrained with.

    That length is `max_position_embeddings` (`max_length` of NeoBERT). Local layers with a RoPE of their own
    (ModernBERT) keep it: they never attend farther than in pretraining.

    Args:
        config: config of a model; changed in place.
        setting: `native`, which changes nothing, or type and factor: `linear:2` (positions divided, Chen et al., 2023,
            arXiv 2306.15595), `dynamic:8` (NTK-aware, by the sequence's length), `yarn:4` (Peng et al., 2023, arXiv
            2309.00071).
    """
    parsed = parse_rope(setting)
    if parsed is None:
        return
    kind, factor = parsed
    parameters = getattr(config, "rope_parameters", None)
    if not parameters or not getattr(config, "rope", True):
        raise ValueError(f"RoPE setting {setting!r}: this {config.model_type} has no RoPE to scale. Use native.")
    nested = "full_attention" in parameters
    stored = parameters["full_attention"] if nested else parameters
    if stored["rope_type"] != "default":
        raise ValueError(
            f"RoPE setting {setting!r}: the RoPE of this checkpoint is scaled already, {stored}. Use native, or the "
            "checkpoint without scaling."
        )
    scaled = stored | {"rope_type": kind, "factor": factor}
    config.rope_parameters = parameters | {"full_attention": scaled} if nested else scaled
    config.standardize_rope_params()
