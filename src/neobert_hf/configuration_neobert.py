"""NeoBERT configuration.

This file is also served from the Hub as remote code, so it imports nothing from the package.
"""

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
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

# Keys that the original training script wrote into the published config.json; none of them describes the model.
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

# A key with at least this similarity (of difflib) to one of ours is treated as a misspelling of it. `dropuot` has
# 0.857. `sep_token_id` and `cls_token_id` have 0.833, and are not misspellings of `pad_token_id` and `eos_token_id`.
MISSPELT = 0.85

# Rotary parameters that older configs hold outside `rope_scaling`, the older name of `rope_parameters`.
ROPE_KEYS_OF_OLDER_CONFIGS = ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor")

# Positions become float32, which cannot distinguish neighbouring integers above this.
MOST_POSITIONS = 2**24
MOST_LABELS = 10**6
# 400 GB in float32: nobody has such a NeoBERT, but a damaged or hostile config may ask for more memory than there is.
MOST_PARAMETERS = 10**11
DTYPES = ("float32", "float16", "bfloat16", "float64")
PROBLEM_TYPES = (None, "regression", "single_label_classification", "multi_label_classification")


@dataclass(frozen=True)
class Interval:
    """The numbers that a key allows; `(` and `)` in `brackets` exclude the limit itself."""

    low: float
    high: float
    brackets: str = "[]"

    def __contains__(self, number: Any) -> bool:
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            return False
        # Every comparison with NaN is false.
        above = number > self.low if self.brackets[0] == "(" else number >= self.low
        return above and (number < self.high if self.brackets[1] == ")" else number <= self.high)

    def __str__(self) -> str:
        return f"{self.brackets[0]}{self.low:,}, {self.high:,}{self.brackets[1]}"


def bounded(default: float | None, low: float, high: float, brackets: str = "[]") -> Any:
    """A field of the config, with the numbers that it allows."""
    return field(default=default, metadata={"allowed": Interval(low, high, brackets)})


# The numbers that `rope_parameters` allows. A factor divides the angles; below 1 it would shorten the model's range.
ROPE_NUMBERS = {
    "rope_theta": Interval(1, 1e30, "(]"),
    "factor": Interval(1, MOST_POSITIONS),
    "original_max_position_embeddings": Interval(2, MOST_POSITIONS),
    "attention_factor": Interval(0, 1000, "(]"),
    "beta_fast": Interval(0, MOST_POSITIONS, "(]"),
    "beta_slow": Interval(0, MOST_POSITIONS, "(]"),
    "mscale": Interval(0, 1000, "(]"),
    "mscale_all_dim": Interval(0, 1000, "(]"),
    "short_factor": Interval(1e-3, MOST_POSITIONS),
    "long_factor": Interval(1e-3, MOST_POSITIONS),
}
ROPE_LISTS = ("short_factor", "long_factor")

# Per RoPE type: the keys that must be given, and those that may be given. Transformers only warns about wrong ones.
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
        embedding_init_range (`float`): Embeddings are initialised uniformly in +- this.
        decoder_init_range (`float`): Linear layers are initialised uniformly in +- this.
        classifier_init_range (`float`): Standard deviation of the normal initialisation of the task heads.
        classifier_dropout (`float`): Dropout of the task heads.
        classifier_pooling (`"cls"` or `"mean"`): Input of the classification head: the hidden state of the first real
            token (original) or the mean over the real tokens.
        rope_parameters (`dict`): `{"rope_type": ..., "rope_theta": 10000.0, ...}` with type `default`, `linear`,
            `dynamic`, `yarn` or `longrope`; keys as in Transformers. `rope_scaling` and `rope_theta` of older
            configs are read as well.
        sparse_prediction (`bool`): When labels are given, `NeoBERTForMaskedLM` runs its decoder on the labelled
            positions only: same loss, a fifth of the decoder's work at 20% masking, logits for those positions only. A
            plain `Trainer` truncates such logits to the number of rows when it evaluates: do not use `compute_metrics`.
        tie_word_embeddings (`bool`): Share the decoder's weight with the embeddings. Off, as published; the original
            code cannot read a tied checkpoint.

    Other keys, such as a note of yours or a key of a newer Transformers, are kept, saved and named in a warning.

    Raises:
        ValueError: on a misspelt key, two names of one setting with different values, an unknown option, a number out
            of its range, sizes that do not fit together, or names of labels that contradict each other.

    Example:

    ```python
    >>> from neobert_hf import NeoBERTConfig, NeoBERTModel
    >>> model = NeoBERTModel(NeoBERTConfig())
    >>> long_model = NeoBERTModel(NeoBERTConfig(rope_parameters={"rope_type": "yarn", "factor": 4.0}))
    ```
    """

    model_type = "neobert"
    # The `auto_map` that is saved with a model, by which it can be loaded without the package.
    auto_classes: ClassVar[dict[str, str]] = AUTO_MAP
    attribute_map = {"max_position_embeddings": "max_length", "head_dim": "dim_head"}
    base_model_fsdp_plan: ClassVar[dict[Any, str]] = {
        "encoder": "free_full_weight",
        "transformer_encoder.*": "free_full_weight",
        "layer_norm": "keep_full_weight",
    }
    # The rows of `qkv` are ordered by head, so equal parts of them are whole heads, the same as in the columns of `wo`.
    # The rows of `w12` are first the gate and then the input: each process takes a part of both. The modules of the
    # GELU ablation's MLP have no distinct names for a plan (`ffn.*`), so every process computes the whole MLP.
    base_model_tp_plan: ClassVar[dict[str, str]] = {
        "encoder": "embedding_rowwise",
        "transformer_encoder.*.qkv": "colwise",
        "transformer_encoder.*.wo": "rowwise",
        "transformer_encoder.*.ffn.w12": "packed_colwise",
        "transformer_encoder.*.ffn.w3": "rowwise",
    }
    base_model_pp_plan: ClassVar[dict[str, tuple[list[str], list[str]]]] = {
        "encoder": (["input_ids"], ["inputs_embeds"]),
        "transformer_encoder": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "layer_norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = bounded(30522, 1, MOST_PARAMETERS)
    hidden_size: int = bounded(768, 1, MOST_PARAMETERS)
    num_hidden_layers: int = bounded(28, 0, 10_000)
    num_attention_heads: int = bounded(12, 1, MOST_PARAMETERS)
    intermediate_size: int = bounded(3072, 1, MOST_PARAMETERS)
    hidden_act: str = "swiglu"
    rope: bool = True
    rms_norm: bool = True
    # Numbers much smaller than the lower limit cannot be represented in float32.
    norm_eps: float | int = bounded(1e-5, 1e-30, 1)
    dropout: float | int = bounded(0.0, 0, 1, "[)")
    max_length: int | None = bounded(None, 1, MOST_POSITIONS)
    dim_head: int | None = bounded(None, 1, MOST_PARAMETERS)
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    embedding_init_range: float | int = bounded(0.02, 0, 100)
    decoder_init_range: float | int = bounded(0.02, 0, 100)
    classifier_init_range: float | int = bounded(0.02, 0, 100)
    classifier_dropout: float | int = bounded(0.1, 0, 1, "[)")
    classifier_pooling: Literal["cls", "mean"] = "cls"
    rope_parameters: dict | None = None
    sparse_prediction: bool = False
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs):
        given = {name: value for name, value in kwargs.items() if name not in ORIGINAL_JUNK_KEYS}
        # The fields that have alternative names. `super().__post_init__` derives RoPE defaults from them.
        renamed = {*self.attribute_map.values(), "rope_parameters"}
        given = self._use_stored_names({name: getattr(self, name) for name in renamed} | given)
        for name in renamed:
            setattr(self, name, given.pop(name))
        self._refuse_misspelt_keys(given)
        if given.get("per_layer_config"):
            raise ValueError("`per_layer_config` is set, it must be empty: all layers of NeoBERT are alike.")
        self._warn_about_notes(given)
        if given.get("model_type", self.model_type) != self.model_type:
            raise ValueError(f"`model_type` is {given['model_type']!r}, it must be {self.model_type!r}.")
        for dtype in (self.dtype, given.get("torch_dtype")):
            name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
            if dtype is not None and name not in DTYPES:
                raise ValueError(f"`dtype` is {name!r}, it must be one of {', '.join(DTYPES)}.")
        # Done before Transformers invents a name for each label.
        self.id2label, self.label2id = agreed_labels(self.id2label, self.label2id, given.get("num_labels"))
        self.hidden_act = self.hidden_act.lower()
        if self.max_length is None:
            self.max_length = 4096
        if self.dim_head is None and self.num_attention_heads > 0:
            self.dim_head = self.hidden_size // self.num_attention_heads
        super().__post_init__(**given)
        # `strict` also runs these, but wraps their errors in an exception that is not a ValueError.
        self.validate_architecture()
        self.validate_rope()

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        # Transformers sets overrides on the finished object, where they reach neither derived fields nor checks:
        # from_pretrained(path, rope_parameters={"rope_type": "yarn", "factor": 2.0}) would run without a rope_theta.
        stored = cls._use_stored_names(config_dict)
        given = {key: kwargs.pop(key) for key in cls._known_keys() & (set(kwargs) - {"dtype"})}
        overrides = cls._use_stored_names(given)
        rope = overrides.pop("rope_parameters", None)
        if rope:
            earlier = dict(stored.get("rope_parameters") or {})
            if given.get("rope_parameters") or given.get("rope_scaling"):
                # A new scaling replaces the stored one, but keeps its `rope_theta`.
                trained = earlier.get("original_max_position_embeddings", stored.get("max_length"))
                earlier = {key: value for key, value in earlier.items() if key == "rope_theta"}
                if trained and rope.get("rope_type", rope.get("type")) in ("yarn", "longrope"):
                    # Otherwise a new `max_length` given with it would be taken for the length of training.
                    earlier["original_max_position_embeddings"] = trained
            overrides["rope_parameters"] = earlier | rope
        cls._check_length_of_dynamic(stored, overrides)
        # What is left goes on to the model, which refuses it, but nobody refuses it where only a config is loaded. Not
        # all of it is wrong there: AutoTokenizer passes its own arguments.
        cls._refuse_misspelt_keys(kwargs)
        labels = {"num_labels", "id2label", "label2id"}
        new = {name: value for name, value in (overrides | kwargs).items() if name in labels}
        if new and new != {"num_labels": len(stored.get("id2label") or ())}:
            # Other labels replace the stored ones, names and all.
            stored = {name: value for name, value in stored.items() if name not in labels}
        try:
            return super().from_dict(stored | overrides, **kwargs)
        except StrictDataclassError as error:
            raise ValueError(f"{error}".replace("\n", " ")) from error

    @staticmethod
    def _check_length_of_dynamic(stored: dict[str, Any], overrides: dict[str, Any]) -> None:
        """RoPE of type 'dynamic' scales texts longer than `max_length`, which therefore must be the trained length."""
        rope = overrides.get("rope_parameters") or stored.get("rope_parameters") or {}
        trained, length = stored.get("max_length", 4096), overrides.get("max_length")
        if rope.get("rope_type", rope.get("type")) == "dynamic" and length not in (None, trained):
            raise ValueError(
                f"`max_length` is {length}, but that of the stored model is {trained}. RoPE of type 'dynamic' scales "
                "texts longer than `max_length`, which must stay the length of training: leave `max_length` out."
            )

    @classmethod
    def _use_stored_names(cls, values: dict[str, Any]) -> dict[str, Any]:
        """A copy of `values` in which every setting has only the name under which it is saved.

        Raises:
            ValueError: if two names of a setting are given with different values.
        """
        values = dict(values)
        for alias, name in cls.attribute_map.items():
            value = values.pop(alias, None)
            if value is not None:
                _set_once(values, name, value, f"`{alias}`", f"`{name}`")
        for name in ("rope_parameters", "rope_scaling"):
            if values.get(name) and not isinstance(values[name], dict):
                raise ValueError(f"`{name}` is {values[name]!r}, it must be a mapping with a `rope_type`.")
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
            # Transformers 4, which the original code uses, reads only this name.
            config["torch_dtype"] = config["dtype"]
        if "original_max_position_embeddings" in (self.rope_parameters or {}):
            # The Trainer loads a checkpoint's config as a generic one, whose check of YaRN needs this name.
            config["max_position_embeddings"] = self.max_length
        return config

    def as_loaded(self) -> "NeoBERTConfig":
        """The config that saving and loading this one would give. Assignments to a finished config are not checked.

        Raises:
            ValueError: as when a config is created.
        """
        return type(self).from_dict(json.loads(json.dumps(self.to_diff_dict())))

    def save_pretrained(self, save_directory, *args, **kwargs):
        """As in Transformers, but a config that could not be loaded again is not written.

        Raises:
            ValueError: as when a config is created.
        """
        self.as_loaded()
        # Transformers adds only the saved class, and keeps other entries, such as the original's `model.*`.
        self.auto_map = dict(self.auto_classes)
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def _known_keys(cls) -> set[str]:
        return {field.name for field in fields(cls)} | set(cls.attribute_map) | {"rope_theta", "rope_scaling"}

    @classmethod
    def _refuse_misspelt_keys(cls, keys: Iterable[str]) -> None:
        """Raise an error, since with a misspelt setting the default would be used unnoticed."""
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
        """Warn about other keys, which are kept: notes of a user or a tool, or settings of a newer Transformers."""
        notes = sorted(set(keys) - cls._known_keys() - transformers_keys())
        # By the ending `_token_id`, Transformers itself recognises special tokens.
        notes = [f"`{key}`" for key in notes if not key.startswith("_") and not key.endswith("_token_id")]
        if notes:
            logger.warning_once(f"The config holds {', '.join(notes)}: kept and saved, but not used by NeoBERT.")

    def validate_architecture(self):
        """Check that sizes fit together and options exist; also run when a model is built and the config is saved."""
        for setting in fields(self):
            value, allowed = getattr(self, setting.name), setting.metadata.get("allowed")
            if allowed is not None and value is not None and value not in allowed:
                raise ValueError(f"`{setting.name}` is {value}, it must be in {allowed}.")
        for name in ("is_decoder", "is_encoder_decoder", "add_cross_attention", "pruned_heads"):
            if getattr(self, name, None):
                raise ValueError(f"`{name}` is {getattr(self, name)!r}, but NeoBERT is a plain encoder: leave it out.")
        self.id2label, self.label2id = agreed_labels(self.id2label, self.label2id)
        if self.hidden_size % self.num_attention_heads or self.dim_head * self.num_attention_heads != self.hidden_size:
            raise ValueError(
                f"`hidden_size` ({self.hidden_size}) must be `num_attention_heads` ({self.num_attention_heads}) x "
                f"`dim_head` ({self.dim_head}): choose heads that divide the width, and leave `dim_head` out."
            )
        if self.rope and self.dim_head % 2:
            raise ValueError(f"RoPE rotates pairs: `dim_head` must be even, but is {self.dim_head}.")
        # Transformers does not check the types of its own fields.
        for name, options in (("hidden_act", ("swiglu", "gelu")), ("problem_type", PROBLEM_TYPES)):
            if getattr(self, name) not in options:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}, it must be one of {options}.")
        if self.hidden_act == "swiglu" and self.intermediate_size < 2:
            raise ValueError(
                f"`intermediate_size` is {self.intermediate_size}, it must be 2 or more: SwiGLU uses two thirds of it."
            )
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(f"`pad_token_id` is {self.pad_token_id}, it must be in [0, {self.vocab_size - 1}].")
        if (parameters := self._estimate_parameters()) > MOST_PARAMETERS:
            raise ValueError(
                f"The sizes ask for about {parameters:,} parameters (`vocab_size` {self.vocab_size:,}, `hidden_size` "
                f"{self.hidden_size:,}, `intermediate_size` {self.intermediate_size:,}, `num_hidden_layers` "
                f"{self.num_hidden_layers:,}); at most {MOST_PARAMETERS:,} are allowed."
            )

    def _estimate_parameters(self) -> int:
        """The number of parameters in matrices, without biases and norms."""
        mlp = 2 * self.intermediate_size * self.hidden_size
        positions = 0 if self.rope else self.max_length
        rows = 2 * self.vocab_size + positions + self.hidden_size + len(self.id2label or ())
        return rows * self.hidden_size + self.num_hidden_layers * (4 * self.hidden_size**2 + mlp)

    def validate_rope(self):
        """Stricter than Transformers, which only warns about most wrong RoPE parameters."""
        # Parameters that were assigned to a finished config are completed only here.
        self.rope_parameters = parameters = {} if self.rope_parameters is None else self.rope_parameters
        for key in ROPE_KEYS_OF_OLDER_CONFIGS:
            # The parameter may have been assigned to a finished config under its older name, which is read only here.
            value = vars(self).get(key)
            if value is not None:
                _set_once(parameters, key, value, f"`{key}`", f"`rope_parameters[{key!r}]`")
        if parameters.get("rope_theta") is None:  # as after `config.rope_scaling = {...}` in Transformers
            parameters["rope_theta"] = self.default_theta
        self.standardize_rope_params()
        rope_type = parameters["rope_type"]
        if parameters.get("type", rope_type) != rope_type:
            raise ValueError(
                f"`rope_parameters` has type {parameters['type']!r} and rope_type {rope_type!r}: give only one of them."
            )
        self._check_rope_keys(rope_type, set(parameters) - {"rope_type", "type", "rope_theta"})
        if not self.rope and rope_type != "default":
            raise ValueError(f"`rope_parameters` of type {rope_type!r} has no effect with `rope=False`.")
        self._check_rope_numbers(parameters)
        if rope_type != "default":  # There it would warn about the length that Transformers' own tests leave behind.
            super().validate_rope()

    def _check_rope_numbers(self, parameters: dict[str, Any]) -> None:
        rope_type = parameters["rope_type"]
        # None means that an optional parameter is left out.
        required = ROPE_KEYS[rope_type][0] | {"rope_theta"}
        given = {name: value for name, value in parameters.items() if value is not None or name in required}
        for name in [name for name in given if name in ROPE_NUMBERS]:
            value, needed = given[name], f"a number in {ROPE_NUMBERS[name]}"
            items = [value]
            if name in ROPE_LISTS:
                needed = f"a list of `dim_head / 2` = {self.dim_head // 2} numbers in {ROPE_NUMBERS[name]}"
                items = value if isinstance(value, (list, tuple)) and len(value) == self.dim_head // 2 else [None]
            if any(item not in ROPE_NUMBERS[name] for item in items):
                raise ValueError(f"`rope_parameters[{name!r}]` is {value!r:.80}, it must be {needed}.")
        # The defaults, 32 and 1, are those of Transformers.
        if given.get("beta_fast", 32) < given.get("beta_slow", 1):
            raise ValueError(
                f"`rope_parameters` is {given}: `beta_fast` (default 32) must not be below `beta_slow` (default 1)."
            )
        if ("mscale" in given) != ("mscale_all_dim" in given):
            raise ValueError(
                "`rope_parameters` has only one of `mscale` and `mscale_all_dim`, which have an effect only together."
            )
        if not isinstance(given.get("truncate", True), bool):
            raise ValueError(f"`rope_parameters['truncate']` is {given['truncate']!r}, it must be true or false.")
        if rope_type == "dynamic" and self.dim_head < 4:
            raise ValueError(f"RoPE of type 'dynamic' needs a `dim_head` of 4 or more, but it is {self.dim_head}.")

    @staticmethod
    def _check_rope_keys(rope_type: str, given: set[str]) -> None:
        if not isinstance(rope_type, str) or rope_type not in ROPE_KEYS:
            raise ValueError(f"`rope_type` is {rope_type!r}, it must be one of {', '.join(map(repr, ROPE_KEYS))}.")
        required, optional = ROPE_KEYS[rope_type]
        if missing := required - given:
            raise ValueError(f"`rope_parameters` of type {rope_type!r} lacks {sorted(missing)}.")
        if unknown := given - required - optional:
            allowed = sorted(required | optional | {"rope_type", "rope_theta"})
            raise ValueError(
                f"`rope_parameters` of type {rope_type!r} does not have {sorted(unknown)}; allowed: {allowed}."
            )


@cache
def transformers_keys() -> set[str]:
    """Keys that the installed Transformers declares, sets or moves to the generation config.

    Properties with a leading underscore are passed and stored without it, such as `attn_implementation`.
    """
    names = {field.name for field in fields(PreTrainedConfig)} | set(GenerationConfig().to_dict())
    names |= {name for name in dir(PreTrainedConfig) if not callable(getattr(PreTrainedConfig, name, None))}
    return {name.removeprefix("_") for name in names} | KEYS_OF_TOOLS


def agreed_labels(id2label: Any, label2id: Any, num_labels: Any = None) -> tuple[dict | None, dict | None]:
    """Both mappings between ids and names of labels, from one mapping or from two that agree; None twice without any.

    Raises:
        ValueError: if they contradict each other or `num_labels`, or if ids are not 0, 1, 2 and so on.
    """
    if num_labels is not None and (not isinstance(num_labels, int) or num_labels not in Interval(1, MOST_LABELS)):
        raise ValueError(f"`num_labels` is {num_labels!r}, it must be a whole number in {Interval(1, MOST_LABELS)}.")
    try:
        names = None if id2label is None else {int(number): name for number, name in id2label.items()}
        back = None if label2id is None else {int(number): name for name, number in label2id.items()}
    except (AttributeError, TypeError, ValueError):
        found = f"`id2label` is {id2label!r:.80} and `label2id` {label2id!r:.80}"
        raise ValueError(f"{found}, they must map ids to names and names to ids.") from None
    if names is None and back is None:
        return None, None
    # Names invented by Transformers remain in `label2id` if a user gave names in `id2label` only.
    made_up = back is not None and all(name == f"LABEL_{number}" for number, name in back.items())
    if names is None:
        names = back
    elif back not in (None, names) and not made_up:
        raise ValueError(f"`id2label` is {id2label!r:.80} and `label2id` is {label2id!r:.80}: they must agree.")
    unique = len(set(names.values())) == len(names) and all(isinstance(name, str) for name in names.values())
    if sorted(names) != list(range(len(names))) or len(names) not in Interval(1, MOST_LABELS) or not unique:
        found = f"`id2label`, or `label2id` inverted, is {names!r:.80}"
        raise ValueError(f"{found}, it must give the ids 0, 1, 2 and so on different names.")
    if num_labels not in (None, len(names)):
        raise ValueError(f"`num_labels` is {num_labels}, but `id2label` has {len(names)} names: give only one of them.")
    return names, {name: number for number, name in names.items()}


def _set_once(values: dict[str, Any], name: str, value: Any, alias: str, stored: str) -> None:
    """Set `values[name]`; ValueError if it has another value already: `alias` and `stored` are the same setting."""
    earlier = values.get(name)
    if earlier is not None and earlier != value:
        raise ValueError(
            f"{alias} is {value!r} and {stored} is {earlier!r}: these are two names of one setting, give only one."
        )
    values[name] = value


# The code is saved with the model, so that it can be loaded without the package.
NeoBERTConfig.register_for_auto_class()

__all__ = ["NeoBERTConfig"]
