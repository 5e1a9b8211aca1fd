"""What somebody loads from the Hub. `python hub_clients.py FOLDER` is somebody without the package.

It runs offline with a Hub's cache in `HF_HOME`; the results go to FOLDER/results.pt.
"""

import importlib.util
import sys
from pathlib import Path

import torch


TEXTS = ["one text", "another, much longer text"]


def outputs(model, tokenizer) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**tokenizer(TEXTS, padding=True, return_tensors="pt"))[0]


def both_stages(model) -> torch.Tensor:
    """Of a contextual model: the context, queries and documents with it, and without one; (8, width)."""
    context = model.encode(TEXTS, convert_to_tensor=True)
    options = {"convert_to_tensor": True}
    queries = model.encode_query(TEXTS, dataset_embeddings=context, **options)
    documents = model.encode_document(TEXTS, dataset_embeddings=context, **options)
    return torch.cat([context, queries, documents, model.encode(TEXTS, dataset_embeddings=context[:0], **options)])


def load_all(**trust) -> dict:
    """What is loaded from the Hub gives these outputs."""
    from sentence_transformers import SentenceTransformer
    from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("me/mlm", **trust)
    model = AutoModelForMaskedLM.from_pretrained("me/mlm", **trust)
    embedder = SentenceTransformer("me/embedder", device="cpu", **trust)
    return {
        "module": type(model).__module__,
        "logits": outputs(model, tokenizer),
        "states": outputs(AutoModel.from_pretrained("me/mlm", **trust), tokenizer),
        "embeddings": embedder.encode_query(TEXTS, convert_to_tensor=True),
        "contextual": both_stages(SentenceTransformer("me/contextual", device="cpu", **trust)),
    }


def save_again(folder: Path) -> dict:
    """What is loaded from the Hub is saved, loaded and saved again, and gives these outputs."""
    from sentence_transformers import SentenceTransformer
    from transformers import AutoModelForMaskedLM, AutoModelForTokenClassification, AutoTokenizer

    trust = {"trust_remote_code": True}
    AutoModelForMaskedLM.from_pretrained("me/mlm", **trust).save_pretrained(folder / "again")
    # Another class of the same folder: what one save leaves must do for all.
    AutoModelForTokenClassification.from_pretrained(folder / "again", **trust)
    AutoModelForMaskedLM.from_pretrained(folder / "again", **trust).save_pretrained(folder / "again_and_again")
    model = AutoModelForMaskedLM.from_pretrained(folder / "again_and_again", **trust)
    SentenceTransformer("me/embedder", **trust).save_pretrained(str(folder / "embedder_again"))
    embedder = SentenceTransformer(str(folder / "embedder_again"), device="cpu", **trust)
    return {
        "logits again": outputs(model, AutoTokenizer.from_pretrained("me/mlm", **trust)),
        "embeddings again": embedder.encode_query(TEXTS, convert_to_tensor=True),
    }


if __name__ == "__main__":
    assert importlib.util.find_spec("neobert_hf") is None
    folder = Path(sys.argv[1])
    torch.save(load_all(trust_remote_code=True) | save_again(folder), folder / "results.pt")
