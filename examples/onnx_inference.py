"""Embeddings and mask filling from an exported folder, without torch: `pip install onnxruntime tokenizers`.

    neobert-hf export runs/embeddings/model exported
    python examples/onnx_inference.py exported --query "a query" "a document" "another document"

prints the cosine similarities of the texts for an embedding model. The model's own prompts are put before query and
documents; without `--query` nothing is put before any text. For a masked language model, write the mask token into the
texts: the likeliest tokens in its place are printed.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer


FILES = {"float32": "model.onnx", "float16": "model_fp16.onnx", "int8": "model_quantized.onnx"}


class OnnxModel:
    """An exported encoder or masked language model with its tokenizer.

    Args:
        folder: as `neobert-hf export` writes it.
        precision: `float32`, `float16` or `int8`.
    """

    def __init__(self, folder: Path, precision: str = "float32"):
        # 1. Settings
        self.config = read_json(folder / "config.json")
        settings = read_json(folder / "tokenizer_config.json")
        pooling = folder / "1_Pooling" / "config.json"
        self.pooling = read_json(pooling).get("pooling_mode") if pooling.exists() else "mean"
        prompts = folder / "config_sentence_transformers.json"
        self.prompts = read_json(prompts).get("prompts", {}) if prompts.exists() else {}

        # 2. Tokenizer
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.mask_token = settings.get("mask_token")
        self.tokenizer.enable_padding(pad_id=self.config["pad_token_id"], pad_token=settings["pad_token"])
        if settings["model_max_length"] < 1_000_000:  # Transformers writes 1e30 where there is no limit.
            self.tokenizer.enable_truncation(settings["model_max_length"])

        # 3. Model
        self.session = onnxruntime.InferenceSession(folder / "onnx" / FILES[precision])

    def run(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids, mask and the model's output for each token."""
        encodings = self.tokenizer.encode_batch(texts)
        ids = np.array([encoding.ids for encoding in encodings], dtype=np.int64)
        mask = np.array([encoding.attention_mask for encoding in encodings], dtype=np.int64)
        (output,) = self.session.run(None, {"input_ids": ids, "attention_mask": mask})
        return ids, mask, output

    def embed(self, texts: list[str], kind: str | None = None, batch_size: int = 32) -> np.ndarray:
        """One vector of length 1 for each text: the mean of its tokens, or the first of them if the model says so.

        Args:
            kind: `query` or `document`, to put the model's own prompt for such texts before each; nothing if None.
        """
        prompt = self.prompts.get(kind) or ""
        texts = [prompt + text for text in texts]
        if self.pooling not in ("mean", "cls"):
            raise ValueError(
                f"1_Pooling/config.json has the `pooling_mode` {self.pooling!r}; this example knows 'mean' and 'cls'. "
                "If it has none, load and save the model with a new Sentence Transformers, and export it again."
            )
        embeddings = []
        for start in range(0, len(texts), batch_size):
            _, mask, states = self.run(texts[start : start + batch_size])
            # Padding is zero in the output.
            pooled = states[:, 0] if self.pooling == "cls" else states.sum(1) / mask.sum(1, keepdims=True)
            embeddings.append(pooled / np.linalg.norm(pooled, axis=1, keepdims=True))
        return np.concatenate(embeddings)

    def fill_mask(self, text: str, top: int = 5) -> list[tuple[str, float]]:
        """The likeliest tokens at the text's one mask token, with their probabilities."""
        ids, _, logits = self.run([text])
        (masked,) = np.nonzero(ids[0] == self.tokenizer.token_to_id(self.mask_token))
        if len(masked) != 1:
            raise ValueError(f"{text!r} has {len(masked)} mask tokens; it must have one.")
        scores = np.exp(logits[0, masked[0]] - logits[0, masked[0]].max())
        scores /= scores.sum()
        return [(self.tokenizer.id_to_token(int(best)), float(scores[best])) for best in np.argsort(-scores)[:top]]


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--query", help="of an embedding model; the texts are documents then")
    parser.add_argument("--precision", choices=FILES, default="float32")
    arguments = parser.parse_args()

    model = OnnxModel(arguments.folder, arguments.precision)
    (architecture,) = model.config["architectures"]
    if arguments.query and architecture != "NeoBERTModel":
        parser.error(f"--query is for embedding models; {arguments.folder} holds a {architecture}.")
    if architecture == "NeoBERTForMaskedLM":
        for text in arguments.texts:
            print(text, *(f"  {probability:.3f}  {token}" for token, probability in model.fill_mask(text)), sep="\n")
    elif architecture == "NeoBERTModel":
        texts, embeddings = arguments.texts, model.embed(arguments.texts, "document" if arguments.query else None)
        if arguments.query:
            texts = [arguments.query, *texts]
            embeddings = np.vstack([model.embed([arguments.query], "query"), embeddings])
        for text, similarities in zip(texts, embeddings @ embeddings.T):
            print(*(f"{similarity:6.3f}" for similarity in similarities), text)
    else:
        parser.error(f"{arguments.folder} holds a {architecture}; allowed are NeoBERTModel and NeoBERTForMaskedLM.")


if __name__ == "__main__":
    main()
