"""Transformers' own tests of a model, applied to ours: run by test_suite_of_transformers.py.

Or by hand, with one of them: `TRANSFORMERS_SUITE=<folder> pytest tests/model/suite_of_transformers.py -k resize`.
"""

import os
import unittest
from pathlib import Path

import torch
from transformers.models.auto import modeling_auto

from neobert_hf import (
    NeoBERTConfig,
    NeoBERTForMaskedLM,
    NeoBERTForMultipleChoice,
    NeoBERTForQuestionAnswering,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTModel,
)
from neobert_hf.configuration_neobert import MODEL_CLASSES
from tests.helpers.transformers_suite import load_module, load_suite


modeling_common = load_suite(Path(os.environ["TRANSFORMERS_SUITE"]))
ConfigTester = load_module("test_configuration_common").ConfigTester

# Which labels a head takes the suite looks up by the names of its classes, in the lists of the models inside.
MAPPINGS = {
    "AutoModel": "MODEL_MAPPING_NAMES",
    "AutoModelForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "AutoModelForMultipleChoice": "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES",
}
for auto_class, mapping in MAPPINGS.items():
    getattr(modeling_auto, mapping)["neobert"] = MODEL_CLASSES[auto_class]


class NeoBERTModelTester:
    """The small model and batch on which the suite works; attributes have the names by which it reads them."""

    batch_size, seq_length, num_choices, num_labels = 13, 7, 4, 3
    is_training = True
    hidden_size, num_hidden_layers, num_attention_heads, vocab_size = 32, 2, 4, 99

    def __init__(self, parent: unittest.TestCase):
        self.parent = parent

    def get_config(self) -> NeoBERTConfig:
        return NeoBERTConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            intermediate_size=48,
            max_length=512,
            num_labels=self.num_labels,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[NeoBERTConfig, dict]:
        shape = [self.batch_size, self.seq_length]
        ids = modeling_common.ids_tensor(shape, self.vocab_size)
        return self.get_config(), {"input_ids": ids, "attention_mask": modeling_common.random_attention_mask(shape)}


class NeoBERTModelTest(modeling_common.ModelTesterMixin, unittest.TestCase):
    all_model_classes = (
        NeoBERTModel,
        NeoBERTForMaskedLM,
        NeoBERTForSequenceClassification,
        NeoBERTForTokenClassification,
        NeoBERTForQuestionAnswering,
        NeoBERTForMultipleChoice,
    )

    def setUp(self):
        torch.manual_seed(0)
        self.model_tester = NeoBERTModelTester(self)
        self.config_tester = ConfigTester(self, config_class=NeoBERTConfig, hidden_size=48)

    def test_config(self):
        self.config_tester.run_common_tests()
