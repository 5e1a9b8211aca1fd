"""Promise 6: Transformers' own tests of a model, applied to ours: run by test_suite_of_transformers.py.

Or by hand, with one of them: `TRANSFORMERS_SUITE=<folder> pytest tests/model/suite_of_transformers.py -k resize`.
"""

import os
import unittest
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

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
from tests.helpers.transformers_suite import load_module, load_suite


modeling_common = load_suite(Path(os.environ["TRANSFORMERS_SUITE"]))
ConfigTester = load_module("test_configuration_common").ConfigTester
TensorParallelTesterMixin = load_module("test_tensor_parallel_mixin").TensorParallelTesterMixin

ALL_CLASSES = (
    NeoBERTModel,
    NeoBERTForMaskedLM,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTForQuestionAnswering,
    NeoBERTForMultipleChoice,
)

# Which labels a head takes the suite looks up by the names of its classes, in the lists of the models inside.
TASKS = ("MASKED_LM", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING", "MULTIPLE_CHOICE")
for cls, mapping in zip(ALL_CLASSES, ("MODEL", *(f"MODEL_FOR_{task}" for task in TASKS))):
    getattr(modeling_auto, f"{mapping}_MAPPING_NAMES")["neobert"] = cls.__name__


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


@dataclass(frozen=True)
class Departure:
    """Where NeoBERT does something else than a test of the suite wants: it refuses what the test does.

    Without the check of what was loaded, every class passes.

    Args:
        classes: that refuse it.
        says: what is in their error. It is looked for, so that no departure outlives its reason.
        reason: why that is meant.
    """

    classes: tuple[type, ...]
    says: str
    reason: str


MISSING_DECODER = (
    (NeoBERTForMaskedLM,),
    "missing: decoder.bias, decoder.weight",
    "A masked language model with a random decoder predicts noise: loading one is an error here, and not a warning.",
)
DEPARTURES = {
    "test_correct_missing_keys": Departure(*MISSING_DECODER),
    "test_base_model_prefix_loads_base_weights": Departure(*MISSING_DECODER),
    "test_can_init_all_missing_weights": Departure(
        ALL_CLASSES,
        "missing: ",
        "The test loads no tensor at all, to see how missing ones start. A model with random parts is an error here.",
    ),
    "test_model_weights_reload_no_missing_tied_weights": Departure(
        ALL_CLASSES,
        "missing: ",
        "The test puts one tensor of two numbers in place of all weights and wants a random model; that is an error.",
    ),
    "test_load_with_mismatched_shapes": Departure(
        (NeoBERTForSequenceClassification,),
        "of another shape: .*encoder.weight",
        "With `ignore_mismatched_sizes=True` a head for other labels starts anew, as the test wants. Embeddings of "
        "another vocabulary would be random as well, below blocks that were trained with others: an error.",
    ),
}


class NeoBERTModelTest(modeling_common.ModelTesterMixin, TensorParallelTesterMixin, unittest.TestCase):
    all_model_classes = ALL_CLASSES
    model_tester = None
    # Of models without a copyright line the suite does not know the year.
    test_can_init_all_missing_weights_before_2023 = True
    _torch_compile_train_cls = NeoBERTForMaskedLM

    def setUp(self):
        torch.manual_seed(0)
        self.model_tester = NeoBERTModelTester(self)
        self.config_tester = ConfigTester(self, config_class=NeoBERTConfig, hidden_size=48)

    def test_config(self):
        self.config_tester.run_common_tests()


def _depart(name: str, departure: Departure) -> Callable:
    original = getattr(NeoBERTModelTest, name)

    def test(self):
        self.all_model_classes = departure.classes
        # A subtest would keep the error to itself.
        with mock.patch.object(self, "subTest", lambda **_: nullcontext()):
            with self.assertRaisesRegex(ValueError, departure.says):
                original(self)
        self.all_model_classes = ALL_CLASSES
        with mock.patch("neobert_hf.modeling_neobert.NeoBERTPreTrainedModel._check_loaded"):
            original(self)

    return test


for name, departure in DEPARTURES.items():
    setattr(NeoBERTModelTest, name, _depart(name, departure))
