import gc
import json
import os
import tempfile
from pathlib import Path
from pydoc_data.topics import topics


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("NEOBERT_HF_CACHE", os.path.join(tempfile.gettempdir(), "neobert_hf_tests"))
# Such small models lose time with more threads, and very much of it beside another busy process. Also of subprocesses.
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}

import pytest  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from neobert_hf import NeoBERTForMaskedLM  # noqa: E402
from tests.helpers.examples import load_example, to_flags  # noqa: E402
from tests.helpers.models import SHARED, small_model  # noqa: E402
from tests.helpers.small_tokenizer import word_tokenizer  # noqa: E402


transformers.utils.logging.disable_progress_bar()
# The Trainer collects garbage before each training: 0.3 s for what the imports have made, unless that is set apart.
gc.freeze()


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


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder with `tokenizer`, and paragraphs as JSON lines: `train.jsonl` and `validation.jsonl`."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [" ".join(text.split()) for _, text in sorted(topics.items())]
    documents = [text[start : start + 600] for text in texts for start in range(0, len(text), 600)]
    word_tokenizer("\n".join(documents).lower(), 600, 128).save_pretrained(folder / "tokenizer")
    for name, part in (("train", documents[:500]), ("validation", documents[500:560])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    return folder


@pytest.fixture(scope="session")
def prepared(corpus) -> Path:
    """The folder `corpus` with the shards of both files: `train` (5 of them) and `validation`."""
    prepare_data = load_example("prepare_data")
    for name in ("train", "validation"):
        flags = {"source": f"{corpus / name}.jsonl", "tokenizer": corpus / "tokenizer", "output_dir": corpus / name}
        prepare_data.main(to_flags(flags | {"documents_per_shard": 100}))
    return corpus
