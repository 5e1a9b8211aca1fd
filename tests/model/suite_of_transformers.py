"""Promise 6: Transformers' own tests of a model, applied to ours: run by test_suite_of_transformers.py.

Or by hand, with one of them: `TRANSFORMERS_SUITE=<folder> pytest tests/model/suite_of_transformers.py -k resize`.

The source distribution of Transformers holds the files `tests/test_*.py`, with the mixins of which every model's tests
are made, but not the folders below `tests/` that they import a little from. For these there are empty stand-ins, so
that the parts which need them are left out: exporters, pipelines with models from the Hub, generation.
"""

import importlib
import os
import sys
import types
import unittest
from pathlib import Path
from unittest import mock

import torch
from transformers.models.auto import modeling_auto

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM
from tests.helpers.models import CLASSES


FOLDER = Path(os.environ["TRANSFORMERS_SUITE"])
# Its own name, `tests`, is that of ours.
PACKAGE = "transformers_tests"


def module(name: str, **contents) -> None:
    """Make a module with these contents, unless the folder has such a file."""
    if FOLDER.joinpath(*name.split(".")).with_suffix(".py").is_file():
        return
    path = PACKAGE
    for part in name.split("."):
        path = f"{path}.{part}"
        sys.modules.setdefault(path, types.ModuleType(path)).__path__ = []
    vars(sys.modules[path]).update(contents)


sys.modules[PACKAGE] = types.ModuleType(PACKAGE)
sys.modules[PACKAGE].__path__ = [str(FOLDER)]
module("exporters.test_export", ExportTesterMixin=type("ExportTesterMixin", (), {}))
module("generation.test_utils", GenerationTesterMixin=type("GenerationTesterMixin", (), {}))
module("utils.test_configuration_utils", config_common_kwargs={"return_dict": False})
modeling_common = importlib.import_module(f"{PACKAGE}.test_modeling_common")
configuration_common = importlib.import_module(f"{PACKAGE}.test_configuration_common")

# Which labels a head takes the suite looks up by the names of its classes, in the lists of the models inside.
TASKS = ("MASKED_LM", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING", "MULTIPLE_CHOICE")
for cls, mapping in zip(CLASSES, ("MODEL", *(f"MODEL_FOR_{task}" for task in TASKS))):
    getattr(modeling_auto, f"{mapping}_MAPPING_NAMES")["neobert"] = cls.__name__


class NeoBERTModelTester:
    """The small model and batch on which the suite works; attributes have the names by which it reads them."""

    batch_size, seq_length, num_choices, num_labels = 13, 7, 4, 3
    is_training = True
    hidden_size, num_hidden_layers, num_attention_heads, vocab_size = 32, 2, 4, 99

    def __init__(self, parent: unittest.TestCase):
        self.parent = parent

    def get_config(self) -> NeoBERTConfig:
        names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_labels")
        sizes = {name: getattr(self, name) for name in names}
        return NeoBERTConfig(**sizes, intermediate_size=48, max_length=512)

    def prepare_config_and_inputs_for_common(self) -> tuple[NeoBERTConfig, dict]:
        shape = [self.batch_size, self.seq_length]
        ids = modeling_common.ids_tensor(shape, self.vocab_size)
        return self.get_config(), {"input_ids": ids, "attention_mask": modeling_common.random_attention_mask(shape)}


# Where NeoBERT refuses what a test of the suite does, and why. Without the check of what was loaded, it passes.
DECODER = "A masked language model with a random decoder predicts noise: loading one is an error here, not a warning."
DEPARTURES = {
    "test_correct_missing_keys": DECODER,
    "test_base_model_prefix_loads_base_weights": DECODER,
    "test_can_init_all_missing_weights": "It loads no tensor at all. A model with random parts is an error here.",
    "test_model_weights_reload_no_missing_tied_weights": "It puts one tensor of two numbers in place of all weights.",
    "test_load_with_mismatched_shapes": "With `ignore_mismatched_sizes=True` a head starts anew, as the test wants. "
    "Embeddings of another vocabulary would be random, below blocks that were trained with others: an error.",
}


class NeoBERTModelTest(modeling_common.ModelTesterMixin, unittest.TestCase):
    all_model_classes = CLASSES
    model_tester = None
    # Of models without a copyright line the suite does not know the year.
    test_can_init_all_missing_weights_before_2023 = True
    _torch_compile_train_cls = NeoBERTForMaskedLM

    def setUp(self):
        torch.manual_seed(0)
        self.model_tester = NeoBERTModelTester(self)
        self.config_tester = configuration_common.ConfigTester(self, config_class=NeoBERTConfig, hidden_size=48)

    def test_config(self):
        self.config_tester.run_common_tests()


for name in DEPARTURES:
    unchecked = mock.patch("neobert_hf.modeling_neobert.NeoBERTPreTrainedModel._check_loaded", lambda *_: None)
    setattr(NeoBERTModelTest, name, unchecked(getattr(NeoBERTModelTest, name)))
