"""Embeddings, classes and mask filling from an exported folder, without torch: `pip install onnxruntime tokenizers`.

    neobert-hf export runs/embeddings/model exported
    python examples/onnx_inference.py exported --query "a query" "a document" "another document"

For an embedding model this prints the cosine similarities of the texts. With `--query`, the model's own prompts are put
before the query and the documents; without it, no text gets a prompt. For a classifier it prints each text's labels.
For a masked language model, write the mask token into the texts: the most likely tokens in its place are printed. With
`--engine openvino` (`pip install openvino`) OpenVINO runs the same files.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer


FILES = {"float32": "model.onnx", "float16": "model_fp16.onnx", "int8": "model_quantized.onnx"}
ENGINES = ("onnxruntime", "openvino")
# What `neobert-hf export` accepts: the mean of the states of all tokens, that of the first, or that of the last.
POOLINGS = ("mean", "cls", "lasttoken")


class OnnxModel:
    """An exported encoder, classifier or masked language model with its tokenizer.

    Args:
        folder: the folder that `neobert-hf export` wrote.
        precision: `float32`, `float16` or `int8`.
        engine: `onnxruntime` or `openvino`.

    Raises:
        ValueError: if there is no such precision.
        FileNotFoundError: if the folder holds no such file.
    """

    def __init__(self, folder: str | Path, precision: str = "float32", engine: str = "onnxruntime"):
        # 1. Settings
        folder = Path(folder)
        if precision not in FILES:
            raise ValueError(f"`precision` is {precision!r}; it must be one of {', '.join(FILES)}.")
        if not (folder / "onnx" / FILES[precision]).exists():
            found = f"which holds no onnx/{FILES[precision]}" if folder.is_dir() else "but there is no such folder"
            raise FileNotFoundError(f"`folder` is {str(folder)!r}, {found}: `neobert-hf export` writes it.")
        self.config = read_json(folder / "config.json")
        settings = read_json(folder / "tokenizer_config.json")
        self.pooling = read_json(folder / "1_Pooling" / "config.json", {"pooling_mode": "mean"})
        modules = read_json(folder / "modules.json", [])
        self.normalize = any(module["type"].endswith(".Normalize") for module in modules)
        sentences = read_json(folder / "config_sentence_transformers.json", {})
        # Sentence Transformers also defines these two names, with empty prompts.
        self.prompts = {"query": "", "document": ""} | sentences.get("prompts", {})
        self.default_prompt_name = sentences.get("default_prompt_name")
        self.dimensions = sentences.get("truncate_dim") or self.config["hidden_size"]

        # 2. Tokenizer
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.mask_token = settings.get("mask_token")
        self.tokenizer.enable_padding(pad_id=self.config["pad_token_id"], pad_token=settings["pad_token"])
        # Transformers writes 1e30 as the tokenizer's `model_max_length` if there is no limit.
        limit = min(settings["model_max_length"], self.config["max_length"])
        limit = read_json(folder / "sentence_bert_config.json", {}).get("max_seq_length") or limit
        self.tokenizer.enable_truncation(limit, direction=settings.get("truncation_side", "right"))

        # 3. Model
        self.session = open_session(folder / "onnx" / FILES[precision], engine)

    def run(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids, attention mask and the model's output, for each token or, of a classifier, for each text."""
        encodings = self.tokenizer.encode_batch(texts)
        ids = np.array([encoding.ids for encoding in encodings], dtype=np.int64)
        mask = np.array([encoding.attention_mask for encoding in encodings], dtype=np.int64)
        (output,) = self.session.run(None, {"input_ids": ids, "attention_mask": mask})
        return ids, mask, output

    def encode(
        self,
        texts: str | list[str],
        batch_size: int = 32,
        prompt: str | None = None,
        prompt_name: str | None = None,
        normalize_embeddings: bool = False,
    ) -> np.ndarray:
        """The embeddings that `SentenceTransformer.encode` gives: (texts, width) float32, or (width,) for one text.

        Args:
            prompt: text that is put before each text.
            prompt_name: one of the model's own prompts, used if `prompt` is None. If both are None, the model's default
                prompt is used, if it has one.
            normalize_embeddings: return vectors of length 1, even if the model itself does not normalise.

        Raises:
            ValueError: if the model has no such prompt, or another pooling than `POOLINGS`.
        """
        self.check_pooling()
        if prompt is None:
            prompt = self.find_prompt(prompt_name)
        prompted = [prompt + text for text in ([texts] if isinstance(texts, str) else texts)]
        # Texts of similar length share a batch. In the given order, 256 docstrings took 3.1 times as long.
        order = np.argsort([-len(text) for text in prompted], kind="stable")
        embeddings = np.empty((len(prompted), self.dimensions), dtype=np.float32)
        for start in range(0, len(order), batch_size):
            places = order[start : start + batch_size]
            _, mask, states = self.run([prompted[place] for place in places])
            mode, lengths = self.pooling["pooling_mode"], mask.sum(1)
            if mode == "mean":
                # The output is zero at padding, so a sum over all positions is a sum over the real tokens.
                pooled = states.sum(1) / np.maximum(lengths[:, None], 1)
            else:
                pooled = states[np.arange(len(states)), 0 if mode == "cls" else lengths - 1]
            # As in Sentence Transformers, the vector is normalised before it is truncated.
            embeddings[places] = (unit(pooled) if self.normalize else pooled)[:, : self.dimensions]
        embeddings = unit(embeddings) if normalize_embeddings else embeddings
        return embeddings[0] if isinstance(texts, str) else embeddings

    def encode_query(self, texts: str | list[str], prompt_name: str = "query", **options: Any) -> np.ndarray:
        """`encode` with the model's prompt for queries, if it has one."""
        return self.encode(texts, prompt_name=prompt_name, **options)

    def encode_document(self, texts: str | list[str], prompt_name: str = "document", **options: Any) -> np.ndarray:
        """`encode` with the model's prompt for documents, if it has one."""
        return self.encode(texts, prompt_name=prompt_name, **options)

    def find_prompt(self, name: str | None) -> str:
        name = name or self.default_prompt_name
        if name is not None and name not in self.prompts:
            raise ValueError(f"The model has no prompt {name!r}; it has {', '.join(self.prompts)}.")
        return self.prompts.get(name) or ""

    def check_pooling(self) -> None:
        mode = self.pooling.get("pooling_mode")
        if mode not in POOLINGS:
            raise ValueError(
                f"1_Pooling/config.json has the `pooling_mode` {mode!r}; it must be one of {', '.join(POOLINGS)}. If "
                "there is none, export the model again."
            )

    def fill_mask(self, text: str, top: int = 5) -> list[tuple[str, float]]:
        """The most likely tokens at the text's one mask token, with their probabilities."""
        ids, _, logits = self.run([text])
        (masked,) = np.nonzero(ids[0] == self.tokenizer.token_to_id(self.mask_token))
        if len(masked) != 1:
            raise ValueError(f"{text!r} has {len(masked)} mask tokens; it must have one.")
        scores = softmax(logits[0, masked[0]])
        return [(self.tokenizer.id_to_token(int(best)), float(scores[best])) for best in np.argsort(-scores)[:top]]

    def classify(self, text: str) -> list[tuple[str, float]]:
        """The labels of a text, the likeliest first, with their probabilities; of a regression, the numbers."""
        _, _, logits = self.run([text])
        kind, scores = self.config.get("problem_type"), logits[0]
        if kind == "multi_label_classification" or (kind != "regression" and len(scores) == 1):
            scores = 1 / (1 + np.exp(-scores))
        elif kind != "regression":
            scores = softmax(scores)
        return [(self.config["id2label"][str(best)], float(scores[best])) for best in np.argsort(-scores)]


def softmax(logits: np.ndarray) -> np.ndarray:
    scores = np.exp(logits - logits.max())
    return scores / scores.sum()


def unit(vectors: np.ndarray) -> np.ndarray:
    """Vectors (rows, width) of length 1."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


class OpenVinoSession:
    """OpenVINO with the interface of the one method of ONNX Runtime that is used here."""

    def __init__(self, file: Path):
        import openvino

        # Without the first option, OpenVINO rounds float32 to bfloat16 on CPUs that can multiply bfloat16.
        options = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
        self.model = openvino.Core().compile_model(file, "CPU", options)

    def run(self, names: None, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        return list(self.model(inputs).values())


def open_session(file: Path, engine: str) -> Any:
    if engine not in ENGINES:
        raise ValueError(f"The engine is {engine!r}; it must be one of {', '.join(ENGINES)}.")
    if engine == "openvino":
        return OpenVinoSession(file)
    import onnxruntime

    return onnxruntime.InferenceSession(file)


def read_json(path: Path, missing: Any = None) -> Any:
    """The content of a JSON file; if there is no file and `missing` is given, `missing`."""
    if missing is not None and not path.exists():
        return missing
    return json.loads(path.read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--query", help="a query for an embedding model; the texts are then its documents")
    parser.add_argument("--precision", choices=FILES, default="float32")
    parser.add_argument("--engine", choices=ENGINES, default="onnxruntime")
    arguments = parser.parse_args()

    model = OnnxModel(arguments.folder, arguments.precision, arguments.engine)
    (architecture,) = model.config["architectures"]
    if arguments.query and architecture != "NeoBERTModel":
        parser.error(f"--query is for embedding models; {arguments.folder} holds a {architecture}.")
    if architecture == "NeoBERTForMaskedLM":
        for text in arguments.texts:
            print(text, *(f"  {probability:.3f}  {token}" for token, probability in model.fill_mask(text)), sep="\n")
    elif architecture == "NeoBERTForSequenceClassification":
        for text in arguments.texts:
            print(text, *(f"  {score:.3f}  {label}" for label, score in model.classify(text)), sep="\n")
    elif architecture == "NeoBERTModel":
        texts, unit = arguments.texts, {"normalize_embeddings": True}
        if arguments.query:
            query, documents = model.encode_query([arguments.query], **unit), model.encode_document(texts, **unit)
            texts, embeddings = [arguments.query, *texts], np.vstack([query, documents])
        else:
            # An empty prompt, so that the model's default prompt is not used either.
            embeddings = model.encode(texts, prompt="", **unit)
        for text, similarities in zip(texts, embeddings @ embeddings.T):
            print(*(f"{similarity:6.3f}" for similarity in similarities), text)
    else:
        parser.error(
            f"{arguments.folder} holds a {architecture}; allowed are NeoBERTModel, NeoBERTForMaskedLM and "
            "NeoBERTForSequenceClassification."
        )


if __name__ == "__main__":
    try:
        main()
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:  # About an argument: the message says all.
        sys.exit(f"{Path(__file__).name}: {error}")
