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

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM, NeoBERTModel  # noqa: E402


ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared"

# Varlen and masked backends that run on a CPU. Flash kernels need a GPU; test_flash.py has a stand-in for them.
CPU_BACKENDS = ("sdpa", "eager", "flex_attention")

transformers.utils.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def shared() -> Path:
    if not (SHARED / "reference").is_dir():
        pytest.skip("the material in ../shared is not on this machine")
    return SHARED


def small_config(**changes) -> NeoBERTConfig:
    sizes = dict(
        vocab_size=100,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_length=64,
        # Wide enough that attention is far from uniform and a wrong mask or rotation shows.
        embedding_init_range=1.0,
        decoder_init_range=0.2,
    )
    return NeoBERTConfig(**(sizes | changes))


def small_model(cls=NeoBERTModel, attn_implementation: str = "sdpa", **changes):
    """The same weights for the same class and sizes, whatever the backend."""
    torch.manual_seed(1)
    return cls._from_config(small_config(**changes), attn_implementation=attn_implementation).eval()


def ragged_batch(lengths=(13, 7, 1, 10), side: str = "right", vocab_size: int = 100):
    """Ids (batch, longest) and their mask; padding holds random ids, so that reading it shows."""
    generator = torch.Generator().manual_seed(2)
    longest = max(lengths)
    ids = torch.randint(1, vocab_size, (len(lengths), longest), generator=generator)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        if side == "right":
            mask[row, :length] = 1
        elif side == "left":
            mask[row, longest - length :] = 1
        else:
            mask[row, torch.randperm(longest, generator=generator)[:length]] = 1
    return ids, mask


def packed_batch(lengths=(13, 7, 1, 10), vocab_size: int = 100):
    """One row of documents, with the keyword arguments that DataCollatorWithFlattening gives."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, vocab_size, (1, sum(lengths)), generator=generator)
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return ids, {
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def positions_of(lengths) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)


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
    sys.path.insert(0, str(ROOT / "examples"))
    import prepare_data

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
    from pretraining_runs import SMALL, to_flags

    def build(**changes) -> list[str]:
        settings = {"output_dir": tmp_path / "run", "train_data": prepared / "train"} | SMALL | changes
        return to_flags(settings)

    return build
