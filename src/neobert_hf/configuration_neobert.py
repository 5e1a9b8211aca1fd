"""Configuration of NeoBERT (Le Breton et al., 2025, arXiv 2502.19587).

This file is also served from the Hub as remote code, so it imports nothing from the package.
"""

import difflib
from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.utils import logging


logger = logging.get_logger(__name__)

# Written into config.json by the original training script; they say nothing about the model.
ORIGINAL_JUNK_KEYS = ("kwargs", "trust_remote_code", "pretrained_model_name_or_path")

# RoPE types that stretch the positions by a fixed factor. `dynamic` instead starts from the length of training.
STRETCHED = ("linear", "yarn", "longrope", "llama3")
TRAINED_LENGTH = "original_max_position_embeddings"


@strict
class NeoBERTConfig(PreTrainedConfig):
    r"""Configuration of every NeoBERT model. The defaults are the published architecture.

    Args:
        vocab_size (`int`): entries of the vocabulary; ids run from 0 to `vocab_size - 1`.
        hidden_size (`int`): width of the residual stream.
        num_hidden_layers (`int`): encoder blocks.
        num_attention_heads (`int`): heads; must divide `hidden_size`.
        intermediate_size (`int`): width of the MLP. SwiGLU uses two thirds of it, rounded up to a multiple of 8 (3,072
            -> 2,048), so that both activations cost the same number of parameters (paper, section 3.1).
        hidden_act (`"swiglu"` or `"gelu"`): activation of the MLP; `"gelu"` is the ablation before M1.
        rope (`bool`): rotary positions; `False` is the ablation with learned absolute positions.
        rms_norm (`bool`): RMSNorm; `False` is the ablation with LayerNorm.
        norm_eps (`float`): epsilon of the norms.
        dropout (`float`): on attention weights and on the output of both sub-layers, in training only.
        max_length (`int`, defaults to 4096): how many tokens the model reads; the stored name of
            `max_position_embeddings`. Given together with a stretched RoPE whose `original_max_position_embeddings` is
            missing or the same, it is the length of training, and becomes `factor` times as long.
        dim_head (`int`): width of a head; the stored name of `head_dim`.
        embedding_init_range, decoder_init_range (`float`): embeddings and linear layers start uniformly in +- this.
        classifier_init_range (`float`): standard deviation with which task heads start.
        classifier_dropout (`float`): dropout of the task heads.
        classifier_pooling (`"cls"` or `"mean"`): what the heads for whole sequences read: the first real token (the
            original) or the mean of all real tokens.
        rope_parameters (`dict`): `{"rope_type": ..., "rope_theta": 10000.0, ...}`, types and keys as in Transformers.
        sparse_prediction (`bool`): with labels, `NeoBERTForMaskedLM` decodes the labelled positions only, a fifth of
            the work at 20% masks with the same loss. Its logits are then those of the labelled positions.
        unpad (`bool`): compute no padding: real tokens are laid end to end in one row. `False` keeps every row, for
            tools that look at the rows of a batch inside the model (PEFT's `adapter_names`, Opacus).

    Raises:
        ValueError: on a misspelt key. Other unknown keys are kept and saved, as in Transformers.

    Example:

    ```python
    >>> from neobert_hf import NeoBERTConfig, NeoBERTModel
    >>> model = NeoBERTModel(NeoBERTConfig())
    >>> NeoBERTConfig(rope_parameters={"rope_type": "yarn", "factor": 4.0}).max_length
    16384
    ```
    """

    model_type = "neobert"
    attribute_map = {"max_position_embeddings": "max_length", "head_dim": "dim_head"}
    # Saved with every model, whichever class it is saved from, so that all classes load without the package.
    auto_classes: ClassVar[dict[str, str]] = {
        "AutoConfig": "configuration_neobert.NeoBERTConfig",
        "AutoModel": "modeling_neobert.NeoBERTModel",
        "AutoModelForMaskedLM": "modeling_neobert.NeoBERTForMaskedLM",
        "AutoModelForSequenceClassification": "modeling_neobert.NeoBERTForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_neobert.NeoBERTForTokenClassification",
        "AutoModelForQuestionAnswering": "modeling_neobert.NeoBERTForQuestionAnswering",
        "AutoModelForMultipleChoice": "modeling_neobert.NeoBERTForMultipleChoice",
    }

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 28
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: Literal["swiglu", "gelu"] = "swiglu"
    rope: bool = True
    rms_norm: bool = True
    norm_eps: float | int = 1e-5
    dropout: float | int = 0.0
    max_length: int = 4096
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
    unpad: bool = True
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any):
        kwargs = {name: value for name, value in kwargs.items() if name not in ORIGINAL_JUNK_KEYS}
        for alias, name in self.attribute_map.items():
            if (value := kwargs.pop(alias, None)) is not None:
                setattr(self, name, value)
        self._refuse_misspelt_keys(kwargs)
        if self.dim_head is None:
            self.dim_head = self.hidden_size // self.num_attention_heads
        self._check_heads()
        rope = kwargs.pop("rope_scaling", None) or self.rope_parameters
        if rope:
            self.rope_parameters = rope = dict(rope)
            rope_type = rope.get("rope_type", rope.get("type"))
            if rope_type == "linear":
                # Kept by us in every stretched RoPE, so that loading does not stretch it again; others require it.
                self.ignore_keys_at_rope_validation = {TRAINED_LENGTH}
            # A config that was saved with a stretched RoPE has both lengths.
            if rope_type in STRETCHED and rope.setdefault(TRAINED_LENGTH, self.max_length) == self.max_length:
                self.max_length = int(self.max_length * (rope.get("factor") or 1))
        kwargs["auto_map"] = dict(self.auto_classes)
        super().__post_init__(**kwargs)

    def _check_heads(self) -> None:
        if self.dim_head * self.num_attention_heads != self.hidden_size:
            raise ValueError(
                f"`hidden_size` is {self.hidden_size}; it must be `num_attention_heads`, {self.num_attention_heads}, "
                f"times `dim_head`, {self.dim_head}."
            )

    def to_diff_dict(self) -> dict[str, Any]:
        config = super().to_diff_dict()
        if TRAINED_LENGTH in (self.rope_parameters or {}):
            # The Trainer loads a checkpoint's config as a generic one, whose check of YaRN needs this name.
            config["max_position_embeddings"] = self.max_length
        return config

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any):
        # Transformers sets arguments of `from_pretrained` on the finished config. A new RoPE must reach it earlier: it
        # keeps the stored `rope_theta`, and stretches the length of training.
        rope = kwargs.pop("rope_parameters", None) or kwargs.pop("rope_scaling", None)
        if rope:
            stored = config_dict.get("rope_parameters") or config_dict.get("rope_scaling") or {}
            length = config_dict.get("max_length", config_dict.get("max_position_embeddings", 4096))
            trained = stored.get(TRAINED_LENGTH, length)
            if rope.get("rope_type", rope.get("type")) in STRETCHED:
                trained = rope.get(TRAINED_LENGTH, trained)
            theta = {"rope_theta": stored.get("rope_theta", config_dict.get("rope_theta", cls.default_theta))}
            config_dict = config_dict | {"rope_parameters": theta | rope, "max_length": trained}
            config_dict.pop("rope_scaling", None)
            config_dict.pop("max_position_embeddings", None)
        cls._refuse_misspelt_keys(kwargs)
        loaded = super().from_dict(config_dict, **kwargs)
        config = loaded[0] if isinstance(loaded, tuple) else loaded
        config._check_heads()
        if rope and config.max_length != trained:
            logger.warning_once(
                f"The model now reads {config.max_length} tokens. Its tokenizer may still cut texts at {trained}: load "
                f"it with `model_max_length={config.max_length}` before you save it or use it with `truncation=True`."
            )
        return loaded

    @classmethod
    def _refuse_misspelt_keys(cls, keys) -> None:
        """A misspelt setting would leave the default in force without a word."""
        own = {*NeoBERTConfig.__annotations__, *cls.__annotations__, *cls.attribute_map}
        for key in keys:
            # `dropuot` has a similarity of 0.857 to `dropout`, `sep_token_id` one of 0.833 to `pad_token_id`.
            nearest = difflib.get_close_matches(key, own, n=1, cutoff=0.85)
            if key not in own and nearest and not hasattr(PreTrainedConfig, key) and not key.startswith("_"):
                raise ValueError(f"NeoBERTConfig has no `{key}`; did you mean `{nearest[0]}`?")


NeoBERTConfig.register_for_auto_class()

__all__ = ["NeoBERTConfig"]
