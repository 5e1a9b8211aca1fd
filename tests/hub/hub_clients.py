"""What test_publish.py runs in fresh processes against a small Hub: `python hub_clients.py NAME FOLDER`.

`HF_ENDPOINT` must be set before huggingface_hub is imported. Results go to FOLDER/NAME.pt.
"""

import importlib.util
import sys
from pathlib import Path

import torch


TEXTS = ["one text", "another, much longer text"]


def outputs(model, tokenizer) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**tokenizer(TEXTS, padding=True, return_tensors="pt"))[0]


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


def both_stages(model) -> torch.Tensor:
    """Of a contextual model: the context, queries and documents with it, and without one; (8, width)."""
    context = model.encode(TEXTS, convert_to_tensor=True)
    options = {"convert_to_tensor": True}
    queries = model.encode_query(TEXTS, dataset_embeddings=context, **options)
    documents = model.encode_document(TEXTS, dataset_embeddings=context, **options)
    return torch.cat([context, queries, documents, model.encode(TEXTS, dataset_embeddings=context[:0], **options)])


def user(folder: Path) -> dict:
    """Somebody who has the package, with and without trust in the code on the Hub."""
    from neobert_hf.cli import main

    return {"doctor": main(["doctor", "me/mlm"]), "trusted": load_all(trust_remote_code=True)} | load_all()


def stranger(folder: Path) -> dict:
    """Somebody without the package, who also saves the models and loads them again."""
    from sentence_transformers import SentenceTransformer
    from transformers import AutoModelForMaskedLM, AutoModelForTokenClassification, AutoTokenizer

    results = {"spec": importlib.util.find_spec("neobert_hf")}
    try:
        AutoModelForMaskedLM.from_pretrained("me/mlm", trust_remote_code=False)
    except ValueError as error:
        results["untrusted"] = str(error)
    results |= load_all(trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained("me/mlm", trust_remote_code=True)
    model = AutoModelForMaskedLM.from_pretrained("me/mlm", trust_remote_code=True)
    model.save_pretrained(folder / "again")
    # Another class of the same folder: what one save leaves must do for all.
    AutoModelForTokenClassification.from_pretrained(folder / "again", trust_remote_code=True)
    model = AutoModelForMaskedLM.from_pretrained(folder / "again", trust_remote_code=True)
    model.save_pretrained(folder / "again_and_again")
    model = AutoModelForMaskedLM.from_pretrained(folder / "again_and_again", trust_remote_code=True)
    SentenceTransformer("me/embedder", trust_remote_code=True).save_pretrained(str(folder / "embedder_again"))
    embedder = SentenceTransformer(str(folder / "embedder_again"), device="cpu", trust_remote_code=True)
    again = {"again": outputs(model, tokenizer)}
    return results | again | {"embeddings again": embedder.encode_query(TEXTS, convert_to_tensor=True)}


if __name__ == "__main__":
    name, folder = sys.argv[1], Path(sys.argv[2])
    torch.save({"user": user, "stranger": stranger}[name](folder), folder / f"{name}.pt")
