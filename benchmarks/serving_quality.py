"""What each precision of serving_cpu.py costs in quality, on small trained models. Writes results/serving_quality.json.

    python benchmarks/serving_quality.py --data ../shared/data

For each seed, an embedding model and a classifier are trained from a small pretrained model. Both are scored in every
engine, by retrieval, similarity and accuracy. serving_cpu.py puts the scores beside its times. After an interruption
the same command resumes. OpenVINO is left out if it is not installed.
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from datasets import Dataset
from embedding_report import describe_pairs
from embedding_scores import TestData, evaluate, split_pairs
from pretraining import ROOT, run
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize
from serving_cpu import CALIBRATED, calibrate, multiplies_bfloat16, of_openvino
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.modeling_outputs import BaseModelOutput

from neobert_hf.common.files import write_json
from neobert_hf.common.settings import parse_config
from neobert_hf.hub.export import FILES, ExportSettings, export


# By the engine names of serving_cpu.py: what runs the model, and its precision.
ENGINES = {
    "PyTorch": ("torch", "float32"),
    "PyTorch, bfloat16": ("torch", "bfloat16"),
    "PyTorch, int8": ("torch", "int8"),
    "ONNX Runtime": ("onnx", "float32"),
    "ONNX Runtime, int8": ("onnx", "int8"),
    "ONNX Runtime, int8, calibrated": ("onnx", "calibrated"),
}
if find_spec("openvino"):
    ENGINES |= {"OpenVINO": ("openvino", "float32"), "OpenVINO, int8, calibrated": ("openvino", "calibrated")}
    if multiplies_bfloat16():
        ENGINES["OpenVINO, bfloat16"] = ("openvino", "bfloat16")
BATCH = 32
# For bfloat16, OpenVINO reads the float32 file. The scales of the calibrated file are measured on CALIBRATION_TEXTS of
# the texts that the models are trained on.
ONNX_FILES = FILES | {"bfloat16": FILES["float32"], "calibrated": CALIBRATED}
CALIBRATION_TEXTS = 300


@dataclass
class QualityArguments:
    data: str = field(metadata={"help": "folder with pairs/, the test sets and classification_debian_sections/"})
    start: str = field(default="benchmarks/models/small", metadata={"help": "the pretrained model"})
    output_dir: str = field(default="runs/serving_quality", metadata={"help": "models, their files and scores"})
    results: str = field(default="benchmarks/results", metadata={"help": "where the scores go"})
    seeds: int = field(default=3, metadata={"help": "models of each kind"})
    pairs: str = field(
        default="--only foldoc wordnet_usage --alpha 0 --max_steps 300",
        metadata={"help": "further flags of the embedding models' training"},
    )
    sections: str = field(default="--max_steps 1000", metadata={"help": "further flags of the classifiers' training"})
    test_rows: int | None = field(default=None, metadata={"help": "rows to test on, for a trial"})


class OnnxEncoder(nn.Module):
    """An exported encoder that replaces the PyTorch one in a Sentence Transformers model."""

    def __init__(self, outputs: Callable[[torch.Tensor, torch.Tensor], np.ndarray], config):
        super().__init__()
        self.outputs, self.config = outputs, config

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=torch.from_numpy(self.outputs(input_ids, attention_mask)))


def outputs_of(folder: Path, engine: str, precision: str) -> Callable[[torch.Tensor, torch.Tensor], np.ndarray]:
    """A function that takes ids and mask, and returns the first output of an exported file."""
    if engine == "openvino":
        # A copy, since an engine may write its next output to the same memory.
        run = of_openvino(folder.parent, "bf16" if precision == "bfloat16" else "f32", ONNX_FILES[precision])
        return lambda ids, mask: run(ids, mask).copy()
    session = onnxruntime.InferenceSession(folder / "onnx" / ONNX_FILES[precision], providers=["CPUExecutionProvider"])
    return lambda ids, mask: session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0]


def exported(model: Path, task: str, texts: list[str]) -> Path:
    """The folder of the model's exported files. The scales of the calibrated file are measured on `texts`."""
    folder = model.with_name("exported")
    if not folder.exists():
        export(ExportSettings(str(model), str(folder), task=task, precisions=["float32", "int8"]))
    if not (folder / "onnx" / CALIBRATED).exists():
        tokenizer = AutoTokenizer.from_pretrained(model)
        encoded = (tokenizer(text, truncation=True, max_length=128, return_tensors="np") for text in texts)
        names = ("input_ids", "attention_mask")
        calibrate(folder / "onnx", ({name: one[name].astype(np.int64) for name in names} for one in encoded))
    return folder


def load_encoder(model: Path, engine: str, precision: str, texts: list[str]) -> SentenceTransformer:
    dtype = torch.bfloat16 if (engine, precision) == ("torch", "bfloat16") else torch.float32
    encoder = SentenceTransformer(str(model), device="cpu", model_kwargs={"dtype": dtype})
    transformer = encoder[0]
    if engine == "torch":
        if precision == "int8":
            transformer.model.prepare_for_inference(int8=True)
        return encoder
    folder = exported(model, "feature-extraction", texts)
    transformer.model = OnnxEncoder(outputs_of(folder, engine, precision), transformer.model.config)
    # Linear layers after the pooling are inside the exported file.
    modules = [transformer, encoder[1], Normalize()]
    return SentenceTransformer(modules=modules, prompts=encoder.prompts, device="cpu")


def load_classifier(
    model: Path, engine: str, precision: str, texts: list[str]
) -> Callable[[torch.Tensor, torch.Tensor], np.ndarray]:
    """A function that takes ids and mask, and returns the logits."""
    if engine in ("onnx", "openvino"):
        return outputs_of(exported(model, "text-classification", texts), engine, precision)
    dtype = torch.bfloat16 if (engine, precision) == ("torch", "bfloat16") else torch.float32
    classifier = AutoModelForSequenceClassification.from_pretrained(model, dtype=dtype).eval()
    if (engine, precision) == ("torch", "int8"):
        classifier.prepare_for_inference(int8=True)

    @torch.no_grad()
    def logits(ids: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
        return classifier(ids, attention_mask=mask).logits.float().numpy()

    return logits


def accuracy(model: Path, logits: Callable, rows: Dataset) -> float:
    """Share of right predictions, in batches of texts of similar length, as a server would make them."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    names = {
        label: number
        for number, label in enumerate(json.loads((model / "config.json").read_text())["id2label"].values())
    }
    rows = rows.map(lambda row: {"characters": len(row["sentence"])}).sort("characters")
    right = 0
    for batch in rows.iter(BATCH):
        encoded = tokenizer(batch["sentence"], padding=True, truncation=True, max_length=128, return_tensors="pt")
        found = logits(encoded["input_ids"], encoded["attention_mask"]).argmax(-1)
        right += sum(number == names[label] for number, label in zip(found, batch["label_text"]))
    return float(right / len(rows))


def train(settings: QualityArguments, split: Path, seed: int) -> tuple[Path, Path]:
    """Train an embedding model and a classifier with this seed, unless they exist. Returns their folders."""
    output, data = Path(settings.output_dir).resolve(), Path(settings.data).resolve()
    threads = int(os.environ.get("OMP_NUM_THREADS", 2))
    common = f"--model {Path(settings.start).resolve()} --learning_rate 1e-3 --seed {seed}"
    common += " --report_to none --use_cpu true --bf16 false"
    datasets = describe_pairs("small_datasets.yaml", settings.data, split)
    sections = data / "classification_debian_sections"
    runs = {
        "finetune_embeddings.py": f"--config {ROOT}/configs/embeddings/small.yaml --datasets {datasets} "
        f"--max_length 64 --eval_strategy no {settings.pairs}",
        "run_classification.py": f"--config {ROOT}/configs/tasks/classification.yaml --data {sections} "
        f"--text_columns sentence --label_column label_text --pooling mean --max_length 128 {settings.sections}",
    }
    models = []
    for script, flags in runs.items():
        folder = output / f"{Path(script).stem}_{seed}"
        if not (folder / "model").exists():
            folder.mkdir(parents=True, exist_ok=True)
            run(script, f"{common} {flags} --output_dir {folder}", folder / "output.txt", threads)
        models.append(folder / "model")
    return tuple(models)


def calibration_texts(settings: QualityArguments, split: Path) -> tuple[list[str], list[str]]:
    """Training texts of the embedding models, and training texts of the classifiers."""
    pairs = Dataset.from_parquet(str(split / "foldoc.parquet"))
    sections = Dataset.from_parquet(str(Path(settings.data) / "classification_debian_sections/train.parquet"))
    return tuple(
        rows.shuffle(seed=0).select(range(CALIBRATION_TEXTS))[column][:]
        for rows, column in ((pairs, "positive"), (sections, "sentence"))
    )


def score(
    models: tuple[Path, Path], name: str, tests: TestData, sections: Dataset, texts: tuple[list[str], list[str]]
) -> dict[str, float]:
    """All scores of an engine, which are stored next to the models."""
    embeddings, classifier = models
    file = embeddings.with_name(f"scores {name}.json")
    if not file.exists():
        found = evaluate(load_encoder(embeddings, *ENGINES[name], texts[0]), tests)
        found["accuracy"] = accuracy(classifier, load_classifier(classifier, *ENGINES[name], texts[1]), sections)
        write_json(file, found)
    return json.loads(file.read_text())


def main(args: list[str] | None = None) -> None:
    (settings,) = parse_config(QualityArguments, args=args)

    # 1. Rows to train on, and others to test on
    split = Path(settings.output_dir) / "data"
    tests = split_pairs(Path(settings.data), split, settings.test_rows)
    sections = Dataset.from_parquet(str(Path(settings.data) / "classification_debian_sections/validation.parquet"))
    if settings.test_rows:
        sections = sections.select(range(settings.test_rows))
        tests.similarity = tests.similarity.select(range(settings.test_rows))

    # 2. Models, and their scores in every engine
    scores: dict[str, list[dict[str, float]]] = {name: [] for name in ENGINES}
    for seed in range(settings.seeds):
        models, texts = train(settings, split, seed), calibration_texts(settings, split)
        for name in ENGINES:
            scores[name].append(score(models, name, tests, sections, texts))
            print(seed, name, {key: round(value, 4) for key, value in scores[name][-1].items()}, flush=True)

    # 3. The file
    results = Path(settings.results)
    results.mkdir(parents=True, exist_ok=True)
    write_json(results / "serving_quality.json", {"settings": asdict(settings), "scores": scores})


if __name__ == "__main__":
    main()
