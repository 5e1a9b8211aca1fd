"""What contrastive fine-tuning makes of a small NeoBERT on a CPU. Rewrites benchmarks/results/embeddings.md.

    python benchmarks/embeddings.py --data ../shared/data

NeoBERT's pretraining is the first stage of benchmarks/pretraining.py; a BERT of the same size has the same data, masks
and optimizer. Every fine-tuning is `examples/finetune_embeddings.py` with the shipped configuration. Interrupted, the
same command goes on.
"""

import json
import os
import platform
import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path

import bm25s
import numpy as np
import torch.nn.functional as F
from datasets import Dataset, load_dataset
from matplotlib.figure import Figure
from pretraining import BFLOAT16, ROOT, prepare, run, save_random, train
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from transformers import BertConfig, BertForMaskedLM, set_seed
from transformers.modeling_outputs import MaskedLMOutput

from neobert_hf import NeoBERTConfig
from neobert_hf.common.atomic_writes import write_json, write_png, write_text
from neobert_hf.common.report import markdown_table
from neobert_hf.common.settings import parse_config
from neobert_hf.embeddings.descriptions import read_descriptions
from neobert_hf.embeddings.models import build_encoder
from neobert_hf.pretraining.arguments import DataArguments, ModelArguments, PretrainingArguments
from neobert_hf.pretraining.recipe import checkpoint_settings, read_data
from neobert_hf.pretraining.trainer import MLMTrainer
from neobert_hf.training.run_checkpoints import newest_checkpoint, step_of


# Shorter than the shipped configuration; and two runs at a time, of one thread each.
FINETUNING = "--max_steps 600 --max_length 64 --eval_strategy no --save_steps 200"

TUNED = "pretrained, fine-tuned"
COLUMNS = {
    "ndcg_at_10": "nDCG@10, FOLDOC retrieval",
    "accuracy": "accuracy, Debian sections",
    "spearman": "Spearman, Lee's news",
}
EXPECTED = [(TUNED, "fine-tuned from random weights"), (TUNED, "pretrained"), ("pretrained", "random weights")]


@dataclass
class BenchmarkArguments:
    data: str = field(metadata={"help": "folder with text/, pairs/ and the test sets"})
    output_dir: str = field(default="runs/embeddings_benchmark", metadata={"help": "data, runs and logs"})
    pretraining_dir: str = field(
        default="runs/pretraining_benchmark", metadata={"help": "`output_dir` of benchmarks/pretraining.py"}
    )
    results: str = field(default="benchmarks/results", metadata={"help": "where the report goes"})
    bf16: bool = field(
        default=False, metadata={"help": "both pretrainings in bfloat16 autocast, for a CPU with AVX512-BF16"}
    )
    pretraining_limit: str = field(default="", metadata={"help": "further flags of the pretraining, for a trial"})
    limit: str = field(default="", metadata={"help": "further flags of every fine-tuning, for a trial"})
    test_rows: int | None = field(default=None, metadata={"help": "rows of every test set, for a trial"})


class BertOfLabels(BertForMaskedLM):
    """BERT whose decoder runs on the labelled tokens only, as NeoBERT's does in pretraining."""

    accepts_loss_kwargs = True

    def forward(self, input_ids, attention_mask, labels, num_items_in_batch=None):
        labelled = labels != -100
        logits = self.cls(self.bert(input_ids, attention_mask).last_hidden_state[labelled])
        loss = F.cross_entropy(logits, labels[labelled], reduction="sum")
        return MaskedLMOutput(loss=loss / (num_items_in_batch or labelled.sum()), logits=logits)


def pretrain_bert(neobert: Path, output: Path, flags: str) -> Path:
    """Train a BERT as configs/pretrain/small.yaml trains NeoBERT, by the same code, unless that is done.

    Args:
        neobert: the trained NeoBERT, whose width, depth and vocabulary the BERT gets.
        output: where checkpoints and the model go.
        flags: those of NeoBERT's training.

    Returns:
        The folder of the model.
    """
    flags = f"--config {ROOT}/configs/pretrain/small.yaml --output_dir {output} --report_to none {flags}"
    flags = f"{flags} --eval_strategy no".split()
    architecture, settings, arguments = parse_config(ModelArguments, DataArguments, PretrainingArguments, args=flags)
    arguments.gradient_accumulation_steps = settings.accumulation_steps(arguments.world_size)
    data = read_data(settings, arguments)
    # The documents of each of NeoBERT's packs, which BERT cannot take, in a row of their own.
    data.train.collator = replace(data.train.collator, layout="padded")
    config = bert_config(neobert, architecture.dropout, data.tokenizer.pad_token_id)
    stored = checkpoint_settings(architecture, settings, arguments, data.manifest)
    stored |= {"bert": json.loads(config.to_json_string())}
    resume, progress = newest_checkpoint(output, stored)
    if (output / "log.json").exists():
        return output / "model"
    if progress is not None:
        data.train.sampler.cursor = progress.cursor
    set_seed(arguments.seed)
    if resume is not None and step_of(resume) == arguments.max_steps:
        # Nothing is left to train, so the trainer does not load the weights.
        model = BertOfLabels.from_pretrained(resume, attn_implementation="eager")
    else:
        model = BertOfLabels(config)
    trainer = MLMTrainer(model, arguments, data, stored)
    trainer.train_to_the_end(resume)
    # As a plain BERT.
    model.__class__ = BertForMaskedLM
    trainer.save_whole(output / "model")
    write_json(output / "log.json", trainer.state.log_history)
    return output / "model"


def bert_config(neobert: Path, dropout: float, pad_token_id: int) -> BertConfig:
    """A BERT as wide and deep as a NeoBERT, with the same vocabulary."""
    shape = NeoBERTConfig.from_pretrained(neobert)
    return BertConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        intermediate_size=shape.intermediate_size,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        pad_token_id=pad_token_id,
        attn_implementation="eager",
    )


def finetune(model: Path, output: Path, data: Path, limit: str) -> Path:
    """Fine-tune with configs/embeddings/small.yaml unless that is done, and return the folder of the model."""
    if not (output / "log.json").exists():
        output.mkdir(parents=True, exist_ok=True)
        datasets = output / "datasets.yaml"
        shipped = (ROOT / "configs/embeddings/small_datasets.yaml").read_text()
        write_text(datasets, shipped.replace("../shared/data", str(data)))
        flags = f"--config {ROOT}/configs/embeddings/small.yaml {FINETUNING} --model {model} --output_dir {output}"
        flags += f" --datasets {datasets} --report_to none {limit}"
        run("finetune_embeddings.py", flags, output / "output.txt", threads=1)
    return output / "model"


def ndcg_at_10(ranks: np.ndarray) -> float:
    """Of queries with one relevant document each, at this rank (from 0)."""
    return float(np.where(ranks < 10, 1 / np.log2(ranks + 2), 0).mean())


def bm25_ranks(queries: list[str], documents: list[str]) -> np.ndarray:
    retriever = bm25s.BM25()
    retriever.index(bm25s.tokenize(documents, stopwords="en", show_progress=False), show_progress=False)
    tokens = bm25s.tokenize(queries, stopwords="en", show_progress=False)
    found, scores = retriever.retrieve(tokens, k=len(documents), show_progress=False)
    ranks = (found == np.arange(len(queries))[:, None]).argmax(1)
    # A document without a word in common with the query is not found.
    return np.where(np.take_along_axis(scores, ranks[:, None], 1)[:, 0] > 0, ranks, len(documents))


def is_constant(pairs: Dataset) -> bool:
    return len(set(pairs["score"])) == 1


def spearman(encoder: SentenceTransformer, pairs: Dataset) -> float | None:
    """Of the cosine similarity with the score; None where all scores are equal, since it is not defined there."""
    if is_constant(pairs):
        return None
    evaluator = EmbeddingSimilarityEvaluator(pairs["sentence1"][:], pairs["sentence2"][:], pairs["score"][:])
    return float(evaluator(encoder)["spearman_cosine"])


def retrieval_ranks(encoder: SentenceTransformer, query_prompt: str, pairs: Dataset) -> np.ndarray:
    """The rank (from 0) of each query's document among the documents of all queries."""
    options = {"convert_to_tensor": True, "normalize_embeddings": True}
    queries = encoder.encode(pairs["query"], prompt=query_prompt, **options)
    documents = encoder.encode(pairs["document"], prompt="", **options)
    scores = queries @ documents.T
    if not scores.isfinite().all():
        raise ValueError("The embeddings of the test set for retrieval are not all finite.")
    # Where others have the same score the right one comes last: embeddings that are all alike find nothing.
    return (scores >= scores.diagonal()[:, None]).sum(1).cpu().numpy() - 1


def evaluate(model: Path, encoder: SentenceTransformer, query_prompt: str, tests: dict) -> dict[str, float | None]:
    """nDCG@10 of retrieval, accuracy of a logistic regression, Spearman coefficient; kept in a file by the model."""
    file = model.parent / "scores.json"
    if file.exists():
        return json.loads(file.read_text())
    ranks = retrieval_ranks(encoder, query_prompt, tests["retrieval"])
    train_texts, test_texts = (encoder.encode(tests[part]["sentence"]) for part in ("train", "validation"))
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=300))
    classifier.fit(train_texts, tests["train"]["label"])
    accuracy = classifier.score(test_texts, tests["validation"]["label"])
    scores = {
        "ndcg_at_10": ndcg_at_10(ranks),
        "accuracy": float(accuracy),
        "spearman": spearman(encoder, tests["sts"]),
    }
    write_json(file, scores)
    return scores


def judge(scores: dict[str, dict], better: str, worse: str) -> str:
    """Whether the first has more nDCG@10 than the second, in words."""
    first, second = scores[better]["ndcg_at_10"], scores[worse]["ndcg_at_10"]
    verdict = "holds" if first > second else "does not hold"
    return f'"{better}" before "{worse}" {verdict} ({first:.3f}, {second:.3f})'


def report(scores: dict[str, dict], settings: dict, notes: str, bf16: bool) -> str:
    versions = ", ".join(
        f"{name} {version(name)}"
        for name in ("torch", "transformers", "sentence-transformers", "bm25s", "scikit-learn")
    )
    rows = [
        [name, *("-" if row.get(key) is None else f"{row[key]:.3f}" for key in COLUMNS)] for name, row in scores.items()
    ]
    similarity = f"Spearman's coefficient of the cosine with the score of {settings['pairs']:,} pairs."
    if settings["constant"]:
        similarity += " All of them have the same score here, and with a constant no correlation is defined."
    expected = "; ".join(judge(scores, *pair) for pair in EXPECTED)
    sections = (
        "# Embeddings of a small NeoBERT on a CPU",
        f"{date.today()}; {os.cpu_count()} cores ({platform.machine()}), float32"
        f"{', both pretrainings in bfloat16 autocast' if bf16 else ''}; Python {platform.python_version()}, {versions}."
        " Not measured on GPU.\n\nCommand: `python benchmarks/embeddings.py --data ../shared/data"
        f"{' --bf16 true' if bf16 else ''}`.",
        "\n".join(markdown_table(["", *COLUMNS.values()], rows)),
        "![scores](embeddings.png)",
        f"Retrieval: {settings['queries']:,} terms, each against {settings['documents']:,} dictionary entries, one of "
        "them right. Fine-tuned models get the instruction they were trained with before the term, the others nothing. "
        f"Classification: logistic regression on the embeddings of {settings['train']:,} one-line descriptions of "
        f"software, tested on {settings['test']:,}, {settings['labels']} sections. One run each.",
        f"Fine-tuning: `configs/embeddings/small.yaml` with `{FINETUNING}`. BERT was pretrained by NeoBERT's recipe "
        "and code: data, seed, masks, dropout (none), optimizer, steps and precision; its weights start as BERT's do, "
        "and its decoder is tied to its embeddings.",
        f"Similarity: {similarity}",
        f"Expected of nDCG@10: {expected}. [NOTES.md](../NOTES.md) has what is known of the reasons.",
        notes,
    )
    return "\n\n".join(sections) + "\n"


def training_notes(logs: dict[str, list[dict]]) -> str:
    """The loss at the end of each training."""
    parts = []
    for name, log in logs.items():
        losses = [entry["loss"] for entry in log if "loss" in entry and entry["step"] > log[-1]["step"] - 100]
        parts.append(f"{name} {statistics.mean(losses):.3f}" if losses else f"{name} none")
    return "Training loss over the last 100 steps: " + "; ".join(parts) + "."


def plot(scores: dict[str, dict], file: Path) -> None:
    figure = Figure(figsize=(13, 3.5), layout="constrained")
    measured = [key for key in COLUMNS if any(row.get(key) is not None for row in scores.values())]
    for axes, key in zip(figure.subplots(1, len(measured)), measured):
        values = {name: row[key] for name, row in scores.items() if row.get(key) is not None}
        axes.barh(list(values)[::-1], list(values.values())[::-1])
        axes.set_xlabel(COLUMNS[key])
    write_png(file, figure)


def read_tests(data: Path, rows: int | None) -> dict:
    files = {"retrieval": "retrieval_foldoc_test.parquet", "sts": "sts_lee.parquet"}
    files |= {part: f"classification_debian_sections/{part}.parquet" for part in ("train", "validation")}
    tests = {name: load_dataset("parquet", data_files=str(data / file), split="train") for name, file in files.items()}
    return {name: test.shuffle(seed=0).select(range(min(rows or len(test), len(test)))) for name, test in tests.items()}


def pretrain(settings: BenchmarkArguments, data: Path) -> tuple[dict[str, Path], dict[str, list[dict]]]:
    """The models that fine-tuning starts from, and the logs of their pretraining, by name."""
    pretraining, output = Path(settings.pretraining_dir), Path(settings.output_dir)
    prepare(data / "text", pretraining / "data")
    flags = f"--train_data {pretraining}/data/train --validation_data {pretraining}/data/validation "
    flags += f"{BFLOAT16 if settings.bf16 else ''} {settings.pretraining_limit}"
    neobert_log = train(pretraining, "small.yaml", "stage_1", flags, 2)
    neobert = pretraining / "stage_1" / "model"
    bert = pretrain_bert(neobert, output / "bert", flags)
    random = output / "random" / "model"
    save_random(neobert, random)
    models = {"random weights": random, "pretrained": neobert, "BERT of the same size, pretrained": bert}
    bert_log = json.loads((output / "bert/log.json").read_text())
    return models, {"NeoBERT, masked": neobert_log, "BERT, masked": bert_log}


def finetune_all(settings: BenchmarkArguments, data: Path, plain: dict[str, Path]) -> dict[str, Path]:
    """Fine-tune the pretrained models, two at a time. Returns the folders of the models by name."""
    output = Path(settings.output_dir)
    starts = {
        TUNED: (plain["pretrained"], output / "from_pretrained"),
        "fine-tuned from random weights": (plain["random weights"], output / "from_random"),
        "BERT of the same size, pretrained, fine-tuned": (
            plain["BERT of the same size, pretrained"],
            output / "from_bert",
        ),
    }
    with ThreadPoolExecutor(2) as executor:
        models = executor.map(lambda start: finetune(*start, data, settings.limit), starts.values())
        return dict(zip(starts, models))


def main() -> None:
    (settings,) = parse_config(BenchmarkArguments)
    data = Path(settings.data).resolve()
    tests = read_tests(data, settings.test_rows)

    # 1. Pretraining and fine-tuning
    plain, logs = pretrain(settings, data)
    tuned = finetune_all(settings, data, plain)
    logs |= {name: json.loads((model.parent / "log.json").read_text()) for name, model in tuned.items()}

    # 2. Evaluation
    _, evaluation = read_descriptions(str(ROOT / "configs/embeddings/small_datasets.yaml"))
    prompt = evaluation["retrieval"].prompt
    scores = {}
    for name, model in plain.items():
        scores[name] = evaluate(model, build_encoder(str(model), 128), "", tests)
    for name, model in tuned.items():
        scores[name] = evaluate(model, SentenceTransformer(str(model)), prompt, tests)
    ranks = bm25_ranks(tests["retrieval"]["query"][:], tests["retrieval"]["document"][:])
    scores["BM25"] = {"ndcg_at_10": ndcg_at_10(ranks)}

    # 3. Report
    sizes = {
        "queries": len(tests["retrieval"]),
        "documents": len(tests["retrieval"]),
        "train": len(tests["train"]),
        "test": len(tests["validation"]),
        "labels": len(set(tests["train"]["label"])),
        "pairs": len(tests["sts"]),
        "constant": is_constant(tests["sts"]),
    }
    results = Path(settings.results)
    results.mkdir(parents=True, exist_ok=True)
    plot(scores, results / "embeddings.png")
    write_json(results / "embeddings.json", {"scores": scores, "sizes": sizes, "logs": logs})
    write_text(results / "embeddings.md", report(scores, sizes, training_notes(logs), settings.bf16))


if __name__ == "__main__":
    main()
