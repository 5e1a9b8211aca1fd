"""A BERT pretrained like a NeoBERT: by the same code, on the same tokens, with the same masks and optimizer."""

import json
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import BertConfig, BertForMaskedLM, set_seed
from transformers.modeling_outputs import MaskedLMOutput

from neobert_hf import NeoBERTConfig
from neobert_hf.common.files import write_json
from neobert_hf.common.settings import parse_config
from neobert_hf.data.batches import DataArguments
from neobert_hf.training.pretraining import ModelArguments, PretrainingArguments, checkpoint_settings, read_data
from neobert_hf.training.pretraining_trainer import MLMTrainer


class BertOfLabels(BertForMaskedLM):
    """BERT for the batches of NeoBERT's pretraining: packed documents, and a decoder on the labelled tokens only."""

    accepts_loss_kwargs = True

    def forward(self, input_ids, labels, cu_seq_lens_q, num_items_in_batch=None, **others):
        # BERT cannot tell packed documents apart, so each gets a row of its own.
        lengths = cu_seq_lens_q.diff().tolist()
        rows = pad_sequence(input_ids[0].split(lengths), batch_first=True)
        mask = pad_sequence([torch.ones(length) for length in lengths], batch_first=True)
        labels = pad_sequence(labels[0].split(lengths), batch_first=True, padding_value=-100)
        labelled = labels != -100
        logits = self.cls(self.bert(rows, mask).last_hidden_state[labelled])
        loss = F.cross_entropy(logits, labels[labelled], reduction="sum")
        return MaskedLMOutput(loss=loss / (num_items_in_batch or labelled.sum()), logits=logits)


def bert_config(neobert: Path, architecture: ModelArguments, pad_token_id: int) -> BertConfig:
    """The shape is NeoBERT's; the dropout and the range of initial weights are those of its training."""
    shape = NeoBERTConfig.from_pretrained(neobert)
    dropout = architecture.dropout or 0.0
    return BertConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        intermediate_size=shape.intermediate_size,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        initializer_range=architecture.decoder_init_range or shape.decoder_init_range,
        pad_token_id=pad_token_id,
        attn_implementation="eager",
    )


def pretrain_bert(neobert: Path, flags: list[str]) -> None:
    """Pretrain it, in `output_dir`, unless this has been done. An interrupted run begins anew.

    Args:
        neobert: model whose width, depth and vocabulary the BERT gets.
        flags: of `examples/pretrain.py`, for the NeoBERT.
    """
    architecture, settings, arguments = parse_config(ModelArguments, DataArguments, PretrainingArguments, args=flags)
    output = Path(arguments.output_dir)
    if (output / "log.json").exists():
        return
    arguments.gradient_accumulation_steps = settings.accumulation_steps(arguments.world_size)
    data = read_data(settings, arguments)
    config = bert_config(neobert, architecture, data.tokenizer.pad_token_id)
    stored = checkpoint_settings(architecture, settings, arguments, data.manifests)
    stored |= {"bert": json.loads(config.to_json_string())}
    set_seed(arguments.seed)
    model = BertOfLabels(config)
    trainer = MLMTrainer(model, arguments, data, stored)
    trainer.train_to_the_end(None)
    # What is saved is a plain BERT.
    model.__class__ = BertForMaskedLM
    trainer.save_whole(output / "model")
    write_json(output / "log.json", trainer.state.log_history)
