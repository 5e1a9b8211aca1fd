import json
import os
import re
import string
import sys
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# Such small models lose time with more threads, and very much of it beside another busy process. Also of subprocesses.
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}

import pytest  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from neobert_hf import NeoBERTForMaskedLM  # noqa: E402
from tests.helpers.examples import load_example  # noqa: E402
from tests.helpers.models import SHARED, small_model  # noqa: E402


transformers.utils.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def shared() -> Path:
    if not (SHARED / "reference").is_dir():
        pytest.skip("the material in ../shared is not on this machine")
    return SHARED


@pytest.fixture
def mlm_checkpoint(tmp_path) -> Path:
    small_model(NeoBERTForMaskedLM).save_pretrained(tmp_path / "mlm")
    return tmp_path / "mlm"


def _tokenizer(text: str, size: int, max_length: int) -> transformers.BertTokenizer:
    """Letters and the commonest words. Training one breaks ties differently in each process: other tests each time."""
    letters = sorted(set(text) - set(string.whitespace))
    words = sorted(Counter(re.findall("[a-z]{2,}", text)).items(), key=lambda item: (-item[1], item[0]))
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    entries = [*special, *letters, *(f"##{letter}" for letter in letters), *(word for word, _ in words)]
    names = ["input_ids", "attention_mask"]
    vocab = {entry: number for number, entry in enumerate(entries[:size])}
    return transformers.BertTokenizer(vocab=vocab, model_max_length=max_length, model_input_names=names)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    """Folders `train` (5 shards) and `validation` of tokenised paragraphs, and the JSONL files they were made from."""
    prepare_data = load_example("prepare_data")
    folder = tmp_path_factory.mktemp("prepared")
    topic = [" ".join(text.split()) for _, text in sorted(topics.items())]
    documents = [words[start : start + 600] for words in topic for start in range(0, len(words), 600)]
    _tokenizer("\n".join(documents).lower(), 600, 128).save_pretrained(folder / "tokenizer")
    for name, part in (("train", documents[:500]), ("validation", documents[500:560])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
        flags = f"--source {folder / name}.jsonl --tokenizer {folder / 'tokenizer'} --output_dir {folder / name}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["prepare_data.py", *flags.split(), "--documents_per_shard", "100"])
            prepare_data.main()
    return folder


@pytest.fixture
def flags(prepared, tmp_path):
    """The command line of a pretraining run in tmp_path / "run", with changes."""
    from tests.helpers.pretraining_runs import SMALL, to_flags

    def build(**changes) -> list[str]:
        settings = {"output_dir": tmp_path / "run", "train_data": prepared / "train"} | SMALL | changes
        return to_flags(settings)

    return build
