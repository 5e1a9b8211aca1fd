"""Small encoders of other architectures, for recipes that work for any."""

from pathlib import Path

from transformers import (
    MODEL_MAPPING,
    BertConfig,
    DebertaV2Config,
    ModernBertConfig,
    PreTrainedTokenizerBase,
    RobertaConfig,
)


ENCODERS = {"bert": BertConfig, "roberta": RobertaConfig, "deberta_v3": DebertaV2Config, "modernbert": ModernBertConfig}


def save_other_encoder(name: str, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    config = ENCODERS[name](
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        pad_token_id=tokenizer.pad_token_id,
    )
    # As DeBERTa-v3 is stored, in 16 bits.
    MODEL_MAPPING[ENCODERS[name]](config).half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
