"""Small encoders of other architectures, for recipes that work for any."""

from pathlib import Path

from transformers import (
    MODEL_MAPPING,
    BertConfig,
    DebertaV2Config,
    GteConfig,
    ModernBertConfig,
    NomicBertConfig,
    PreTrainedTokenizerBase,
    RobertaConfig,
)


ENCODERS = {
    "bert": BertConfig,
    "roberta": RobertaConfig,
    "deberta_v3": DebertaV2Config,
    "nomicbert": NomicBertConfig,
    "modernbert": ModernBertConfig,
    "gte": GteConfig,
}


def save_other_encoder(name: str, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    # Fewer positions than the texts have tokens. RoBERTa leaves one more out, that of the padding id.
    positions = {"max_position_embeddings": 24} if name == "roberta" else {}
    config = ENCODERS[name](
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        pad_token_id=tokenizer.pad_token_id,
        **positions,
    )
    # As DeBERTa-v3 is stored, in 16 bits.
    MODEL_MAPPING[ENCODERS[name]](config).half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
