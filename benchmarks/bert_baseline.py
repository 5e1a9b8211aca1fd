"""A BERT pretrained like a NeoBERT: by the same code, on the same tokens, with the same masks and optimizer."""

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


def pretrain_bert(neobert: Path, flags: list[str]) -> None:
    """Pretrain it in `output_dir`. An interrupted run begins anew.

    Args:
        neobert: model whose width, depth and vocabulary the BERT gets.
        flags: of `examples/pretrain.py`, for the NeoBERT. Their dropout and range of initial weights are the BERT's.
    """
    architecture, settings, arguments = parse_config(ModelArguments, DataArguments, PretrainingArguments, args=flags)
    arguments.gradient_accumulation_steps = settings.accumulation_steps(arguments.world_size)
    data, shape = read_data(settings, arguments), NeoBERTConfig.from_pretrained(neobert)
    config = BertConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        intermediate_size=shape.intermediate_size,
        hidden_dropout_prob=architecture.dropout or 0.0,
        attention_probs_dropout_prob=architecture.dropout or 0.0,
        initializer_range=architecture.decoder_init_range or shape.decoder_init_range,
        pad_token_id=data.tokenizer.pad_token_id,
        attn_implementation="eager",
    )
    stored = checkpoint_settings(architecture, settings, arguments, data.manifests)
    set_seed(arguments.seed)
    model = BertOfLabels(config)
    trainer = MLMTrainer(model, arguments, data, stored)
    trainer.train_to_the_end(None)
    # What is saved is a plain BERT.
    model.__class__ = BertForMaskedLM
    output = Path(arguments.output_dir)
    trainer.save_whole(output / "model")
    write_json(output / "log.json", trainer.state.log_history)
