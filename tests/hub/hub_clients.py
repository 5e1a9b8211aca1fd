"""What test_publish.py runs in fresh processes against the small Hub: `python hub_clients.py NAME FOLDER`.

`HF_ENDPOINT` must be set before huggingface_hub is imported. Results go to FOLDER/NAME.pt.
"""

import importlib.util
import os
import sys
from pathlib import Path

import torch


# Of the package, for the cards.
ADDRESS = "https://github.com/me/neobert_hf"
TEXTS = ["one text", "another, much longer text"]


def outputs(model, tokenizer) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**tokenizer(TEXTS, padding=True, return_tensors="pt"))[0]


def publisher(folder: Path) -> dict:
    """Publish a model, again without a change, as dry run, as a pull request; a page; and what stops before work.

    Then load what was published, as a user does who has the package.
    """
    from neobert_hf.cli import main

    address = ["--package_url", ADDRESS]
    mlm = ["publish", str(folder / "mlm"), "me/mlm", "--card", str(folder / "card.yaml"), *address]
    steps = {
        "dry run": [*mlm, "--dry_run"],
        "first": mlm,
        "unchanged": mlm,
        "embedder": ["publish", str(folder / "embedder"), "me/embedder", *address, "--public"],
        "other model": ["publish", str(folder / "mlm"), "me/embedder", *address, "--pr"],
        "page": ["publish", str(folder / "page"), "me/page"],
        "doctor": ["doctor", "me/mlm"],
        "no address": mlm[:3],
    }
    results = {"before": requests()}
    for name, arguments in steps.items():
        results[name] = (main(arguments), requests())
    token = os.environ["HF_TOKEN"]
    os.environ["HF_TOKEN"] = "hf_wrong"
    results["wrong token"] = (main([*mlm[:2], "me/other", *address]), requests())
    os.environ["HF_TOKEN"] = token
    return {"steps": results} | load_all() | {"trusted": load_all(trust_remote_code=True)}


def requests() -> int:
    """How many requests the server has seen; it counts this one not."""
    import httpx

    return int(httpx.get(f"{os.environ['HF_ENDPOINT']}/requests").text)


def stranger(folder: Path) -> dict:
    """Load what was published, save and load it again: in an environment without the package."""
    from sentence_transformers import SentenceTransformer
    from transformers import AutoModelForMaskedLM, AutoModelForTokenClassification, AutoTokenizer, pipeline

    results = {"spec": importlib.util.find_spec("neobert_hf")}
    try:
        AutoModelForMaskedLM.from_pretrained("me/mlm", trust_remote_code=False)
    except ValueError as error:
        results["untrusted"] = str(error)
    results |= load_all(trust_remote_code=True)
    AutoModelForMaskedLM.from_pretrained("me/mlm", trust_remote_code=True).save_pretrained(folder / "again")
    tokenizer = AutoTokenizer.from_pretrained("me/mlm", trust_remote_code=True)
    tokenizer.save_pretrained(folder / "again")
    # Another class of the same folder: what one save leaves must do for all.
    AutoModelForTokenClassification.from_pretrained(folder / "again", trust_remote_code=True)
    model = AutoModelForMaskedLM.from_pretrained(folder / "again", trust_remote_code=True)
    model.save_pretrained(folder / "again_and_again")
    results["again"] = outputs(
        AutoModelForMaskedLM.from_pretrained(folder / "again_and_again", trust_remote_code=True), tokenizer
    )
    fill = pipeline("fill-mask", "me/mlm", trust_remote_code=True)
    results["fill"] = fill("one [MASK]")[0]["token"]
    SentenceTransformer("me/embedder", trust_remote_code=True).save_pretrained(str(folder / "embedder_again"))
    again = SentenceTransformer(str(folder / "embedder_again"), trust_remote_code=True)
    results["embeddings again"] = again.encode(TEXTS, convert_to_tensor=True)
    return results


def load_all(**trust) -> dict:
    from huggingface_hub import ModelCard, snapshot_download
    from sentence_transformers import SentenceTransformer
    from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("me/mlm", **trust)
    model = AutoModelForMaskedLM.from_pretrained("me/mlm", **trust)
    return {
        "module": type(model).__module__,
        "logits": outputs(model, tokenizer),
        "states": outputs(AutoModel.from_pretrained("me/mlm", **trust), tokenizer),
        "embeddings": SentenceTransformer("me/embedder", **trust).encode(TEXTS, convert_to_tensor=True),
        "snapshot": snapshot_download("me/mlm"),
        "license": ModelCard.load("me/mlm").data.license,
    }


if __name__ == "__main__":
    name, folder = sys.argv[1], Path(sys.argv[2])
    torch.save({"publisher": publisher, "stranger": stranger}[name](folder), folder / f"{name}.pt")
