"""RoPE scaling by name, such as `yarn:4`, without editing a checkpoint."""

import re

from transformers import PreTrainedConfig


def scale_rope(config: PreTrainedConfig, setting: str) -> None:
    """Set the scaling in a config, relative to the length that the model was pretrained with.

    That length is `max_position_embeddings` (`max_length` of NeoBERT). Local layers with a RoPE of their own
    (ModernBERT) keep it: they never attend farther than in pretraining.

    Args:
        config: config of a model; changed in place.
        setting: `native`, which changes nothing, or type and factor: `linear:2` (positions divided, Chen et al., 2023,
            arXiv 2306.15595), `dynamic:8` (NTK-aware, by the sequence's length), `yarn:4` (Peng et al., 2023, arXiv
            2309.00071).

    Raises:
        ValueError: if there is no such setting, or the model has no RoPE, or one that is scaled already.
    """
    if setting == "native":
        return
    match = re.fullmatch(r"(linear|dynamic|yarn):(\d+\.?\d*)", setting)
    if not match or float(match[2]) <= 1:
        raise ValueError(
            f"`rope` holds {setting!r}; give native, or linear, dynamic or yarn with a factor above 1, such as yarn:4."
        )
    parameters = getattr(config, "rope_parameters", None)
    if not parameters or not getattr(config, "rope", True):
        raise ValueError(f"`rope` holds {setting!r}, but this {config.model_type} has no RoPE to scale. Use native.")
    nested = "full_attention" in parameters
    stored = parameters["full_attention"] if nested else parameters
    if stored["rope_type"] != "default":
        raise ValueError(f"`rope` holds {setting!r}, but the RoPE of this checkpoint is scaled already: {stored}.")
    scaled = stored | {"rope_type": match[1], "factor": float(match[2])}
    config.rope_parameters = parameters | {"full_attention": scaled} if nested else scaled
    config.standardize_rope_params()
