"""Random settings of search and what brute force finds."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

from neobert_hf.search.encoder import EmbeddingSettings, PassageEncoder
from neobert_hf.search.index import Passage
from tests.helpers.examples import load_example
from tests.helpers.properties import reproducible
from tests.helpers.search_encoder import save_search_encoder


lancedb_index = pytest.importorskip("neobert_hf.search.lancedb_index", exc_type=ImportError)
QuerySettings = load_example("semantic_search").QuerySettings


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """Sentence Transformers adds mean pooling."""
    folder = tmp_path_factory.mktemp("encoder")
    SentenceTransformer(save_search_encoder(folder), device="cpu").save(str(folder))
    return str(folder)


def cut_by_words(words: list[str], lengths: list[int], size: int, overlap: int) -> list[str]:
    """Passages of as many whole words as fit, each from the last word with `overlap` tokens up to the end before."""
    passages, start = [], 0
    while sum(lengths[start:]) > size:
        end = max(end for end in range(start + 1, len(words) + 1) if sum(lengths[start:end]) <= size)
        passages.append(" ".join(words[start:end]))
        again = [word for word in range(start + 1, end + 1) if sum(lengths[word:end]) >= overlap]
        start = max(again, default=start + 1)
    return [*passages, " ".join(words[start:])]


def embed_by_hand(folder: str, texts: list[str], dimensions: int) -> np.ndarray:
    """Mean of the hidden states, the first dimensions, of length 1; a text at a time."""
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    vectors = []
    for text in texts:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            states = model(ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
        vectors.append(states.double().mean(0)[:dimensions])
    return torch.nn.functional.normalize(torch.stack(vectors), dim=1).numpy()


# Words of one to eight tokens.
words = st.lists(st.sampled_from("the value of a qq xyzq zqqqqqqx print 17 is".split()), min_size=1, max_size=90)
sizes = {"passage_tokens": st.integers(20, 64), "overlap": st.integers(0, 5), "truncate_dim": st.integers(1, 32)}


def test_passages_and_their_vectors(model):
    tokenizer = AutoTokenizer.from_pretrained(model)

    @reproducible(15)
    @given(st.fixed_dictionaries(sizes), words, st.sampled_from(["", "text: "]))
    def check(values, words, prompt):
        settings = EmbeddingSettings(model=model, document_prompt=prompt, **values)
        encoder = PassageEncoder(settings, "cpu")
        passages = encoder.split(" ".join(words))
        lengths = [len(tokenizer(word, add_special_tokens=False)["input_ids"]) for word in words]
        prompt_tokens = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        size = values["passage_tokens"] - 2 - prompt_tokens
        if max(lengths) <= size:
            assert passages == cut_by_words(words, lengths, size, values["overlap"])
        vectors = encoder.embed("document", passages)
        expected = embed_by_hand(model, [prompt + passage for passage in passages], values["truncate_dim"])
        assert vectors.shape == expected.shape and np.abs(vectors - expected).max() < 1e-5

    check()


def test_the_nearest_passages(tmp_path):
    draw = np.random.default_rng(0)
    vectors = draw.normal(size=(60, 4)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    index = lancedb_index.LanceDBIndex(tmp_path)
    index.create({"dimension": 4})
    index.add([Passage("s", f"d{row}", 0, 1, "h", f"text {row}") for row in range(60)], vectors)

    @reproducible(40)
    @given(st.fixed_dictionaries({"top_k": st.integers(1, 80)}), st.integers(0, 2**32 - 1))
    def check(values, seed):
        limit = QuerySettings(text=["text"], **values).top_k
        query = np.random.default_rng(seed).normal(size=4).astype(np.float32)
        hits = index.search(query, limit)
        cosines = vectors @ query / np.linalg.norm(query)
        assert [hit.document for hit in hits] == [f"d{row}" for row in np.argsort(-cosines)[:limit]]
        assert [hit.score for hit in hits] == pytest.approx(-np.sort(-cosines)[:limit], abs=1e-5)

    check()
