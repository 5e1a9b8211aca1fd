"""Files for llama.cpp, run in llama.cpp itself (`xllamacpp`): the tokens and embeddings of PyTorch."""

import json
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np
import pytest
from gguf import GGUFReader
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer

from neobert_hf import NeoBERTForMaskedLM
from neobert_hf.data.tokenizer import train_bpe
from tests.helpers.examples import status_of
from tests.helpers.models import ROOT, save_checkpoint, small_model
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


def export(model: Path, output: Path, *options: str) -> int | str:
    return status_of(["export", str(model), str(output), "--gguf", *options])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The trained model in Sentence Transformers, and the folder of its files."""
    folder = tmp_path_factory.mktemp("trained") / "gguf"
    assert export(TRAINED, folder, "--task", "feature-extraction") == 0
    return SentenceTransformer(str(TRAINED), device="cpu", model_kwargs={"dtype": "float32"}), folder


@pytest.mark.parametrize(
    "name, largest, cosine", [("F32", 1e-5, 0.999999), ("F16", 1e-3, 0.9999), ("Q8_0", 2e-2, 0.999)]
)
def test_tokens_and_embeddings_are_pytorchs(trained, name, largest, cosine):
    model, folder = trained
    server = Server(folder / f"model-{name}.gguf")
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
    save_checkpoint(tmp_path / "encoder", rope_parameters=rope, norm_eps=1e-2, **sizes)
    modules = [Transformer(str(tmp_path / "encoder")), Pooling(48, pooling)]
    model = SentenceTransformer(modules=modules, device="cpu", prompts={"query": "query: "})
    model.max_seq_length = 32
    model.save(str(tmp_path / "model"))
    assert export(tmp_path / "model", tmp_path / "gguf", "--precisions", "float32", "int8") == 0
    exact, rounded = tmp_path / "gguf/model-F32.gguf", tmp_path / "gguf/model-Q8_0.gguf"
    assert sorted((tmp_path / "gguf").iterdir()) == [exact, rounded]
    texts = ["a cat, a dog", "x", "0123 abc " * 3]
    expected = model.encode(texts, normalize_embeddings=True)
    assert np.abs(Server(exact).embed(texts) - expected).max() <= 1e-5
    assert (Server(rounded).embed(texts) * expected).sum(-1).min() >= 0.999
    fields = GGUFReader(exact).fields
    assert fields["prompts.query"].contents() == "query: "
    assert fields["neo-bert.context_length"].contents() == 32


def checkpoint(tokenizer=small_tokenizer, **changes):
    def save(folder: Path) -> None:
        small_model(**changes).save_pretrained(folder)
        tokenizer().save_pretrained(folder)

    return save


def with_a_layer(folder: Path) -> None:
    model = SentenceTransformer(str(save_checkpoint(folder.with_name("encoder"))), device="cpu")
    model.append(Dense(64, 64))
    model.save(str(folder))


YARN = {"rope_type": "yarn", "factor": 2.0}
# What llama.cpp would compute differently, without an error, and the name that is said.
REFUSED = {
    "yarn": (checkpoint(rope_parameters=YARN), "yarn"),
    "positions": (checkpoint(rope=False), "rope"),
    "norm": (checkpoint(rms_norm=False), "rms_norm"),
    "activation": (checkpoint(hidden_act="gelu"), "gelu"),
    "head": (lambda folder: save_checkpoint(folder, NeoBERTForMaskedLM), "NeoBERTForMaskedLM"),
    "layer behind the pooling": (with_a_layer, "Dense"),
    "byte pairs": (checkpoint(lambda: train_bpe(iter(["a b"] * 9), 400, 64), vocab_size=400), "BPE"),
    "cased": (checkpoint(lambda: small_tokenizer(do_lower_case=False)), "WordPiece"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_cannot_compute_is_refused(case, tmp_path):
    save, name = REFUSED[case]
    save(tmp_path / "model")
    assert name in export(tmp_path / "model", tmp_path / "gguf")
    assert not (tmp_path / "gguf").exists()
