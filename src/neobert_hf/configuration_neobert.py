"""NeoBERT configuration.

This file is also served from the Hub as remote code, so it imports nothing from the package.
"""

import difflib
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import logging


logger = logging.get_logger(__name__)

# The class behind each Auto class.
MODEL_CLASSES = {
    "AutoModel": "NeoBERTModel",
    "AutoModelForMaskedLM": "NeoBERTForMaskedLM",
    "AutoModelForSequenceClassification": "NeoBERTForSequenceClassification",
    "AutoModelForTokenClassification": "NeoBERTForTokenClassification",
    "AutoModelForQuestionAnswering": "NeoBERTForQuestionAnswering",
    "AutoModelForMultipleChoice": "NeoBERTForMultipleChoice",
}
AUTO_MAP = {"AutoConfig": "configuration_neobert.NeoBERTConfig"} | {
    auto_class: f"modeling_neobert.{name}" for auto_class, name in MODEL_CLASSES.items()
}

# Written by the original training script into the published config.json; none of them describes the model.
ORIGINAL_JUNK_KEYS = {"kwargs", "trust_remote_code", "pretrained_model_name_or_path"}

# Keys that tools write into a config although no config class declares them, and one that Transformers 4 declared and
# that looks like a misspelt `is_encoder_decoder`. `transformers_keys` derives the others.
KEYS_OF_TOOLS = {
    "auto_map",
    "custom_pipelines",
    "quantization_config",
    "sentence_transformers",
    "tie_encoder_decoder",
    "transformers.js_config",
}

# A key is taken for a misspelt one of ours from this similarity (of difflib) on. `dropuot` has 0.857; `sep_token_id`
# and `cls_token_id`, which are other keys than `pad_token_id` and `eos_token_id`, have 0.833.
MISSPELT = 0.85

# Rotary parameters that older configs hold beside `rope_scaling`, the older name of `rope_parameters`.
ROPE_KEYS_OF_OLDER_CONFIGS = ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor")

# Per RoPE type: the keys that must be given, and those that may be. Transformers only warns about wrong ones.
ROPE_KEYS = {
    # `default` reads no length, but Transformers' own tests leave it there when they change the type.
    "default": (set(), {"original_max_position_embeddings"}),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, set()),
    "yarn": (
        {"factor"},
        {
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        },
    ),
    "longrope": (
        {"short_factor", "long_factor"},
        {"original_max_position_embeddings", "attention_factor", "factor"},
    ),
}


@strict
class NeoBERTConfig(PreTrainedConfig):
    r"""Configuration of every NeoBERT model. The defaults are the published architecture.

    Args:
        vocab_size (`int`): WordPiece entries; ids run from 0 to `vocab_size - 1`.
        hidden_size (`int`): Width of the residual stream.
        num_hidden_layers (`int`): Encoder blocks.
        num_attention_heads (`int`): Heads; must divide `hidden_size`.
        intermediate_size (`int`): Width of the MLP. SwiGLU uses two thirds of it, rounded up to a multiple of 8
            (3,072 -> 2,048), so that both activations cost the same number of parameters (paper, section 3.1).
        hidden_act (`"swiglu"` or `"gelu"`): MLP activation; `"gelu"` is the ablation before M1.
        rope (`bool`): Rotary positions; `False` is the ablation with learned absolute positions.
        rms_norm (`bool`): RMSNorm; `False` is the ablation with LayerNorm.
        norm_eps (`float`): Epsilon of the norms.
        dropout (`float`): Dropout on attention weights and on the output of both sub-layers, in training only.
        max_length (`int`, defaults to 4096): Longest sequence seen in training, in tokens; the stored name of
            `max_position_embeddings`. A model with RoPE runs beyond it, with a warning.
        dim_head (`int`): Width of one head; the stored name of `head_dim`. Always `hidden_size / num_attention_heads`.
        pad_token_id (`int`): Id of the padding token.
        embedding_init_range (`float`): Embeddings start uniform in +- this.
        decoder_init_range (`float`): Linear layers start uniform in +- this.
        classifier_init_range (`float`): Standard deviation of the normal initialisation of the task heads.
        classifier_dropout (`float`): Dropout of the task heads.
        classifier_pooling (`"cls"` or `"mean"`): Sequence representation that the classification head reads: the first
            real token (original) or the mean of the real tokens.
        rope_parameters (`dict`): `{"rope_type": ..., "rope_theta": 10000.0, ...}` with type `default`, `linear`,
            `dynamic`, `yarn` or `longrope`; keys as in Transformers. `rope_scaling` and `rope_theta` of older
            configs are read as well.
        sparse_prediction (`bool`): When labels are given, `NeoBERTForMaskedLM` runs its decoder on the labelled
            positions only: same loss, a fifth of the decoder's work at 20% masking, logits of those positions only.
        tie_word_embeddings (`bool`): Share the decoder's weight with the embeddings. Off, as published; the original
            code cannot read a tied checkpoint.

    Other keys, such as a note of yours or a key of a newer Transformers, are kept, saved and named in a warning.

    Raises:
        ValueError: on a misspelt key, two names of one setting with different values, an unknown option or sizes that
            do not fit together.

    Example:

    ```python
    >>> from neobert_hf import NeoBERTConfig, NeoBERTModel
    >>> model = NeoBERTModel(NeoBERTConfig())
    >>> long_model = NeoBERTModel(NeoBERTConfig(rope_parameters={"rope_type": "yarn", "factor": 4.0}))
    ```
    """

    model_type = "neobert"
    attribute_map = {"max_position_embeddings": "max_length", "head_dim": "dim_head"}
    base_model_fsdp_plan: ClassVar[dict[Any, str]] = {
        "encoder": "free_full_weight",
        "transformer_encoder.*": "free_full_weight",
        "layer_norm": "keep_full_weight",
    }

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 28
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "swiglu"
    rope: bool = True
    rms_norm: bool = True
    norm_eps: float | int = 1e-5
    dropout: float | int = 0.0
    max_length: int | None = None
    dim_head: int | None = None
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    embedding_init_range: float | int = 0.02
    decoder_init_range: float | int = 0.02
    classifier_init_range: float | int = 0.02
    classifier_dropout: float | int = 0.1
    classifier_pooling: Literal["cls", "mean"] = "cls"
    rope_parameters: dict | None = None
    sparse_prediction: bool = False
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs):
        given = {name: value for name, value in kwargs.items() if name not in ORIGINAL_JUNK_KEYS}
        # Of the fields, those that have other names too. Transformers derives RoPE defaults from them in super().
        renamed = {*self.attribute_map.values(), "rope_parameters"}
        given = self._use_stored_names({name: getattr(self, name) for name in renamed} | given)
        for name in renamed:
            setattr(self, name, given.pop(name))
        self._refuse_misspelt_keys(given)
        if given.get("per_layer_config"):
            raise ValueError("`per_layer_config` is set, it must be empty: all layers of NeoBERT are alike.")
        self._warn_about_notes(given)
        self.hidden_act = self.hidden_act.lower()
        if self.max_length is None:
            self.max_length = 4096
        if self.dim_head is None and self.num_attention_heads > 0:
            self.dim_head = self.hidden_size // self.num_attention_heads
        super().__post_init__(**given)
        # `strict` runs these too, but wraps what they raise in an exception that is no ValueError.
        self.validate_architecture()
        self.validate_rope()

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        # Transformers sets overrides on the finished object, where neither the derived fields nor the checks see them:
        # from_pretrained(path, rope_parameters={"rope_type": "yarn", "factor": 2.0}) would run without a rope_theta.
        stored = cls._use_stored_names(config_dict)
        given = {key: kwargs.pop(key) for key in cls._known_keys() & (set(kwargs) - {"dtype"})}
        overrides = cls._use_stored_names(given)
        rope = overrides.pop("rope_parameters", None)
        if rope:
            earlier = dict(stored.get("rope_parameters") or {})
            if given.get("rope_parameters") or given.get("rope_scaling"):
                # Another scaling replaces the stored one and keeps its base.
                earlier = {key: value for key, value in earlier.items() if key == "rope_theta"}
            overrides["rope_parameters"] = earlier | rope
        # What is left goes on to the model, which refuses it, but nobody refuses it where only a config is loaded. Not
        # all of it is wrong there: AutoTokenizer passes its own arguments.
        cls._refuse_misspelt_keys(kwargs)
        return super().from_dict(stored | overrides, **kwargs)

    @classmethod
    def _use_stored_names(cls, values: dict[str, Any]) -> dict[str, Any]:
        """A copy of `values` in which every setting has one name, the one under which it is saved.

        Raises:
            ValueError: if two names of a setting are given with different values.
        """
        values = dict(values)
        for alias, name in cls.attribute_map.items():
            value = values.pop(alias, None)
            if value is not None:
                _set_once(values, name, value, f"`{alias}`", f"`{name}`")
        rope = dict(values.pop("rope_parameters", None) or {})
        for key, value in (values.pop("rope_scaling", None) or {}).items():
            _set_once(rope, key, value, f"`rope_scaling[{key!r}]`", f"`rope_parameters[{key!r}]`")
        for key in ROPE_KEYS_OF_OLDER_CONFIGS:
            value = values.pop(key, None)
            if value is not None:
                _set_once(rope, key, value, f"`{key}`", f"`rope_parameters[{key!r}]`")
        return values | {"rope_parameters": rope or None}

    def to_diff_dict(self) -> dict[str, Any]:
        config = super().to_diff_dict()
        if "dtype" in config:
            # The original code's Transformers 4 reads only this name.
            config["torch_dtype"] = config["dtype"]
        return config

    def save_pretrained(self, save_directory, *args, **kwargs):
        # Transformers adds the class that is saved, and keeps what another config named: the original's `model.*`.
        self.auto_map = dict(AUTO_MAP)
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def _known_keys(cls) -> set[str]:
        return {field.name for field in fields(cls)} | set(cls.attribute_map) | {"rope_theta", "rope_scaling"}

    @classmethod
    def _refuse_misspelt_keys(cls, keys: Iterable[str]) -> None:
        """A misspelt setting would leave its default in force, and nobody would notice."""
        known = cls._known_keys()
        hints = []
        for key in sorted(set(keys) - known - transformers_keys()):
            nearest = difflib.get_close_matches(key.lower(), known, n=1, cutoff=MISSPELT)
            if nearest and not key.startswith("_"):
                hints.append(f"`{key}` (did you mean `{nearest[0]}`?)")
        if hints:
            raise ValueError(f"NeoBERTConfig has no {', '.join(hints)}. Known keys: {', '.join(sorted(known))}.")

    @classmethod
    def _warn_about_notes(cls, keys: Iterable[str]) -> None:
        """Other keys are kept as attributes: notes of a user or a tool, or settings of a newer Transformers."""
        notes = sorted(set(keys) - cls._known_keys() - transformers_keys())
        # Transformers itself tells tokens apart by this ending.
        notes = [f"`{key}`" for key in notes if not key.startswith("_") and not key.endswith("_token_id")]
        if notes:
            logger.warning_once(f"The config holds {', '.join(notes)}: kept and saved, but NeoBERT does not read it.")

    def validate_architecture(self):
        """Sizes fit together and options exist; also run when a model is built and when the config is saved."""
        for name in ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}, it must be at least 1.")
        if self.num_hidden_layers < 0:
            raise ValueError(f"`num_hidden_layers` is {self.num_hidden_layers}, it must not be negative.")
        if self.hidden_size % self.num_attention_heads or self.dim_head * self.num_attention_heads != self.hidden_size:
            raise ValueError(
                f"`hidden_size` ({self.hidden_size}) must be `num_attention_heads` ({self.num_attention_heads}) x "
                f"`dim_head` ({self.dim_head}): choose heads that divide the width, and leave `dim_head` out."
            )
        if self.rope and self.dim_head % 2:
            raise ValueError(f"RoPE rotates pairs: `dim_head` must be even, it is {self.dim_head}.")
        if self.hidden_act not in ("swiglu", "gelu"):
            raise ValueError(f"`hidden_act` is {self.hidden_act!r}, it must be 'swiglu' or 'gelu'.")
        for name in ("dropout", "classifier_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}, it must be in [0, 1).")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(f"`pad_token_id` is {self.pad_token_id}, it must be in [0, {self.vocab_size - 1}].")

    def validate_rope(self):
        """Stricter than Transformers, which warns about most wrong RoPE parameters and goes on."""
        parameters = self.rope_parameters
        # Parameters assigned to a finished config are completed by nobody else.
        parameters.setdefault("rope_theta", self.default_theta)
        self.standardize_rope_params()
        rope_type = parameters["rope_type"]
        if parameters.get("type", rope_type) != rope_type:
            raise ValueError(
                f"`rope_parameters` has type {parameters['type']!r} and rope_type {rope_type!r}: give one."
            )
        self._check_rope_keys(rope_type, set(parameters) - {"rope_type", "type", "rope_theta"})
        if not self.rope and rope_type != "default":
            raise ValueError(f"`rope_parameters` of type {rope_type!r} has no effect with `rope=False`.")
        factor = parameters.get("factor", 1.0)
        if not isinstance(factor, (int, float)) or factor < 1:
            raise ValueError(f"`rope_parameters['factor']` is {factor!r}, it must be a number of at least 1.")
        theta = parameters["rope_theta"]
        if not isinstance(theta, (int, float)) or theta <= 0:
            raise ValueError(f"`rope_parameters['rope_theta']` is {theta!r}, it must be a positive number.")
        for name in ("short_factor", "long_factor"):
            if name in parameters and len(parameters[name]) != self.dim_head // 2:
                raise ValueError(
                    f"`rope_parameters[{name!r}]` has {len(parameters[name])} entries, "
                    f"it must have `dim_head / 2` = {self.dim_head // 2}."
                )
        if rope_type != "default":  # where Transformers would warn about the length that its tests leave there
            super().validate_rope()

    @staticmethod
    def _check_rope_keys(rope_type: str, given: set[str]) -> None:
        if rope_type not in ROPE_KEYS:
            raise ValueError(f"`rope_type` is {rope_type!r}, it must be one of {', '.join(map(repr, ROPE_KEYS))}.")
        required, optional = ROPE_KEYS[rope_type]
        if missing := required - given:
            raise ValueError(f"`rope_parameters` of type {rope_type!r} lacks {sorted(missing)}.")
        if unknown := given - required - optional:
            allowed = sorted(required | optional | {"rope_type", "rope_theta"})
            raise ValueError(
                f"`rope_parameters` of type {rope_type!r} does not know {sorted(unknown)}; allowed: {allowed}."
            )


@cache
def transformers_keys() -> set[str]:
    """Keys that Transformers, as it is installed, declares, sets or moves to the config of generation.

    Properties with a leading underscore are passed and stored without it: `attn_implementation`.
    """
    names = {field.name for field in fields(PreTrainedConfig)} | set(GenerationConfig().to_dict())
    names |= {name for name in dir(PreTrainedConfig) if not callable(getattr(PreTrainedConfig, name, None))}
    return {name.removeprefix("_") for name in names} | KEYS_OF_TOOLS


def _set_once(values: dict[str, Any], name: str, value: Any, alias: str, stored: str) -> None:
    """Set `values[name]`, unless it has another value already: `alias` and `stored` then contradict each other."""
    earlier = values.get(name)
    if earlier is not None and earlier != value:
        raise ValueError(f"{alias} is {value!r} and {stored} is {earlier!r}: two names of one setting, give one.")
    values[name] = value


# The code is saved with the model, for those who load it without the package.
NeoBERTConfig.register_for_auto_class()

__all__ = ["NeoBERTConfig"]
