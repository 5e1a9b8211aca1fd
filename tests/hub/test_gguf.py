"""Files for llama.cpp, run in llama.cpp itself (`xllamacpp`): the tokens and embeddings of PyTorch."""

import json
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np
import pytest
from gguf import GGUFReader, PoolingType
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer

from neobert_hf import NeoBERTForMaskedLM, NeoBERTModel, cli
from neobert_hf.data.tokenizer import train_bpe
from neobert_hf.hub.gguf import write_gguf
from tests.helpers.models import ROOT, small_model
from tests.helpers.onnx_checkpoints import save_checkpoint
from tests.helpers.small_tokenizer import small_tokenizer


xllamacpp = pytest.importorskip("xllamacpp", reason="pip install 'neobert_hf[dev]'")

# A trained model of four layers, with a vocabulary of words.
TRAINED = ROOT / "benchmarks" / "models" / "small"
TEXTS = [
    "A query about cats!",
    "Straße NAÏVE 東京 foo_bar's état; [MASK] end\nnew $5 – “quoted”",
    "x",
    "the encoder reads a sentence, " * 12,
]


class Server:
    """llama.cpp's server in this process. Its FlashAttention rounds keys and values to float16, so it is off here."""

    def __init__(self, file: Path):
        options = xllamacpp.CommonParams()
        options.model.path = str(file)
        options.embedding = True
        options.warmup = False
        options.verbosity = 0
        options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.server = xllamacpp.Server(options)

    def embed(self, texts: list[str]) -> np.ndarray:
        return np.array([row["embedding"] for row in self.server.handle_embeddings({"input": texts})["data"]])

    def tokenize(self, text: str) -> list[int]:
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(self.server.listening_address + "/tokenize", body, headers)) as answer:
            return json.load(answer)["tokens"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The trained model in Sentence Transformers, and its files by precision."""
    folder = tmp_path_factory.mktemp("trained")
    model = SentenceTransformer(str(TRAINED), device="cpu", model_kwargs={"dtype": "float32"})
    encoder = NeoBERTModel.from_pretrained(TRAINED, dtype="float32")
    return model, write_gguf(encoder, model.tokenizer, folder, ["float32", "float16", "int8"])


@pytest.mark.parametrize(
    "index, largest, cosine", [(0, 1e-5, 0.999999), (1, 1e-3, 0.9999), (2, 2e-2, 0.999)], ids=["F32", "F16", "Q8_0"]
)
def test_tokens_and_embeddings_are_pytorchs(trained, index, largest, cosine):
    model, files = trained
    server = Server(files[index])
    assert [server.tokenize(text) for text in TEXTS] == model.tokenizer(TEXTS)["input_ids"]
    expected = model.encode(TEXTS, normalize_embeddings=True)
    got = server.embed(TEXTS)
    assert np.abs(got - expected).max() <= largest
    assert (got * expected).sum(-1).min() >= cosine


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_settings_of_the_model_reach_llama_cpp(pooling, tmp_path):
    """Another base of RoPE, another epsilon, more rows than tokens, rows that Q8_0 cannot take, and each pooling.

    With three heads, as in the trained model, the order of heads and of query, key and value could be mixed up.
    """
    rope = {"rope_type": "default", "rope_theta": 500.0}
    sizes = {"hidden_size": 48, "num_attention_heads": 2, "intermediate_size": 100, "vocab_size": 130}
    encoder = small_model(rope_parameters=rope, norm_eps=1e-2, **sizes)
    encoder.save_pretrained(tmp_path / "model")
    small_tokenizer(model_max_length=64).save_pretrained(tmp_path / "model")
    transformer = Transformer(str(tmp_path / "model"))
    model = SentenceTransformer(modules=[transformer, Pooling(48, pooling)], device="cpu")
    files = write_gguf(encoder, model.tokenizer, tmp_path, ["float32", "int8"], pooling)
    texts = ["a cat, a dog", "x", "0123 abc " * 6]
    expected = model.encode(texts, normalize_embeddings=True)
    exact, rounded = (Server(file).embed(texts) for file in files)
    assert np.abs(exact - expected).max() <= 1e-5
    assert (rounded * expected).sum(-1).min() >= 0.999


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope": False}, "rope"),
        ({"rms_norm": False}, "rms_norm"),
        ({"hidden_act": "gelu"}, "gelu"),
    ],
)
def test_a_model_that_llama_cpp_cannot_compute_is_refused(changes, name, tmp_path):
    with pytest.raises(ValueError, match=name):
        write_gguf(small_model(**changes), small_tokenizer(), tmp_path, ["float32"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "tokenizer, name",
    [(train_bpe(iter(["a b"] * 9), 400, 64), "BPE"), (small_tokenizer(do_lower_case=False), "WordPiece")],
    ids=["bpe", "cased"],
)
def test_a_tokenizer_that_llama_cpp_does_not_have_is_refused(tokenizer, name, tmp_path):
    with pytest.raises(ValueError, match=name):
        write_gguf(small_model(vocab_size=400), tokenizer, tmp_path, ["float32"])


@pytest.fixture
def folder(tmp_path) -> Path:
    """A saved embedding model with a prompt."""
    save_checkpoint(tmp_path / "encoder")
    model = SentenceTransformer(str(tmp_path / "encoder"), device="cpu", prompts={"query": "query: "})
    model.max_seq_length = 32
    model.save(str(tmp_path / "model"))
    return tmp_path


def test_the_command_writes_the_pooling_prompts_and_length_of_an_embedding_model(folder):
    assert (
        cli.main(["export", f"{folder}/model", f"{folder}/gguf", "--gguf", "--precisions", "float16", "int8"]) is None
    )
    assert sorted(file.name for file in (folder / "gguf").iterdir()) == ["model-F16.gguf", "model-Q8_0.gguf"]
    fields = GGUFReader(folder / "gguf/model-F16.gguf").fields
    assert fields["prompts.query"].contents() == "query: "
    assert fields["neo-bert.context_length"].contents() == 32
    assert fields["neo-bert.pooling_type"].contents() == PoolingType.MEAN


def test_what_lies_behind_the_pooling_and_heads_are_refused(folder):
    model = SentenceTransformer(str(folder / "model"), device="cpu")
    model.append(Dense(64, 64))
    model.save(str(folder / "dense"))
    save_checkpoint(folder / "masked", NeoBERTForMaskedLM)
    for name, word in (("dense", "Dense"), ("masked", "NeoBERTForMaskedLM")):
        assert word in cli.main(["export", f"{folder}/{name}", f"{folder}/gguf", "--gguf"])
        assert not (folder / "gguf").exists()
    assert cli.main(["export", f"{folder}/masked", f"{folder}/gguf", "--gguf", "--task", "feature-extraction"]) is None
