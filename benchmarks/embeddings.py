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
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path

import bm25s
import numpy as np
import torch.nn.functional as F
import yaml
from datasets import load_dataset
from matplotlib.figure import Figure
from pretraining import BFLOAT16, ROOT, prepare, run, save_random, train
from sentence_transformers import SentenceTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from transformers import BertConfig, BertForMaskedLM, set_seed
from transformers.modeling_outputs import MaskedLMOutput

from neobert_hf import NeoBERTConfig
from neobert_hf.arguments import parse_config
from neobert_hf.checkpoints import newest_checkpoint
from neobert_hf.embedding_data import read_descriptions
from neobert_hf.embedding_training import build_encoder
from neobert_hf.mlm_batches import Documents, MLMBatchSampler
from neobert_hf.mlm_collator import MLMCollator
from neobert_hf.pretraining import Feed, MLMTrainer, PretrainingArguments
from neobert_hf.text_shards import load_shards, load_tokenizer, read_manifest
from neobert_hf.whole_files import write_json, write_png, write_text


# Of the recipe, what BERT's pretraining shares beside data, masks and batches; the first may not change on resuming.
BERT_TRAINING = "optimizer learning_rate warmup_steps max_steps bf16".split()
BERT_SETTINGS = [*BERT_TRAINING, "use_cpu", "logging_steps", "save_steps", "dataloader_num_workers"]

# Shorter than the shipped configuration; and two runs at a time, of one thread each.
FINETUNING = "--max_steps 600 --max_length 64 --eval_strategy no --save_steps 200"

TUNED = "pretrained, fine-tuned"
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

    def forward(self, input_ids, attention_mask, labels, num_items_in_batch=None):
        labelled = labels != -100
        logits = self.cls(self.bert(input_ids, attention_mask).last_hidden_state[labelled])
        loss = F.cross_entropy(logits, labels[labelled], reduction="sum")
        return MaskedLMOutput(loss=loss / (num_items_in_batch or labelled.sum()), logits=logits)


def pretrain_bert(neobert: Path, data: Path, output: Path, limit: str) -> Path:
    """Train a BERT as configs/pretrain/small.yaml trains NeoBERT, unless that is done.

    Args:
        neobert: the trained NeoBERT, whose width, depth and vocabulary the BERT gets.
        data: the shards that it was trained on.

    Returns:
        The folder of the model.
    """
    folder = output / "model"
    if folder.exists():
        return folder
    recipe = {"use_cpu": False} | yaml.safe_load((ROOT / "configs/pretrain/small.yaml").read_text())
    flags = zip(limit.split()[::2], limit.split()[1::2])
    recipe |= {flag.removeprefix("--"): yaml.safe_load(value) for flag, value in flags}
    (arguments,) = parse_config(
        PretrainingArguments,
        args=["--output_dir", str(output), "--report_to", "none"]
        + [f"--{name}={recipe[name]}" for name in BERT_SETTINGS],
    )
    manifest, tokenizer = read_manifest(data), load_tokenizer(data)
    shards = load_shards(data, manifest)
    sampler = MLMBatchSampler(
        shards,
        [shard["documents"] for shard in manifest.shards],
        max_length=recipe["max_length"],
        micro_batch_tokens=recipe["micro_batch_tokens"],
        seed=arguments.seed,
    )
    shape = NeoBERTConfig.from_pretrained(neobert)
    set_seed(0)
    model = BertOfLabels(
        BertConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            num_hidden_layers=shape.num_hidden_layers,
            num_attention_heads=shape.num_attention_heads,
            intermediate_size=shape.intermediate_size,
            pad_token_id=tokenizer.pad_token_id,
            attn_implementation="eager",
        )
    )
    masking = {name: recipe[name] for name in ("mask_replace_prob", "random_replace_prob")}
    collator = MLMCollator(tokenizer, layout="padded", seed=arguments.seed, **masking)
    feed = Feed(Documents(shards, recipe["max_length"]), sampler, collator)
    settings = {name: getattr(arguments, name) for name in BERT_TRAINING}
    resume, progress = newest_checkpoint(output, settings)
    if progress is not None:
        sampler.cursor = progress.cursor
    trainer = MLMTrainer(model, arguments, feed, None, settings, processing_class=tokenizer)
    trainer.train_to_the_end(resume)
    # As a plain BERT.
    model.__class__ = BertForMaskedLM
    trainer.save_whole(folder)
    write_json(output / "log.json", trainer.state.log_history)
    return folder


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


def evaluate(model: Path, encoder: SentenceTransformer, query_prompt: str, tests: dict) -> dict[str, float]:
    """nDCG@10 of the retrieval test, and the accuracy of a logistic regression on the embeddings; kept by the model."""
    file = model.parent / "scores.json"
    if file.exists():
        return json.loads(file.read_text())
    queries, documents = (
        encoder.encode(tests["retrieval"][column], prompt=prompt, convert_to_tensor=True, normalize_embeddings=True)
        for column, prompt in (("query", query_prompt), ("document", ""))
    )
    scores = queries @ documents.T
    ranks = (scores > scores.diagonal()[:, None]).sum(1).cpu().numpy()
    train_texts, test_texts = (encoder.encode(tests[part]["sentence"]) for part in ("train", "validation"))
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=300))
    classifier.fit(train_texts, tests["train"]["label"])
    accuracy = classifier.score(test_texts, tests["validation"]["label"])
    scores = {"ndcg_at_10": ndcg_at_10(ranks), "accuracy": float(accuracy)}
    write_json(file, scores)
    return scores


def report(scores: dict[str, dict], settings: dict, notes: str, bf16: bool) -> str:
    versions = ", ".join(
        f"{name} {version(name)}"
        for name in ("torch", "transformers", "sentence-transformers", "bm25s", "scikit-learn")
    )

    def judge(pair: tuple[str, str]) -> str:
        better, worse = (scores[name]["ndcg_at_10"] for name in pair)
        verdict = "holds" if better > worse else "does not hold"
        return f'"{pair[0]}" before "{pair[1]}" {verdict} ({better:.3f}, {worse:.3f})'

    lines = ["| | nDCG@10, FOLDOC retrieval | accuracy, Debian sections |", "| --- | --- | --- |"]
    for name, one in scores.items():
        accuracy = f"{one['accuracy']:.3f}" if "accuracy" in one else "-"
        lines.append(f"| {name} | {one['ndcg_at_10']:.3f} | {accuracy} |")
    sections = (
        "# Embeddings of a small NeoBERT on a CPU",
        f"{date.today()}; {os.cpu_count()} cores ({platform.machine()}), float32"
        f"{', both pretrainings in bfloat16 autocast' if bf16 else ''}; Python {platform.python_version()}, {versions}."
        " Not measured on GPU.\n\nCommand: `python benchmarks/embeddings.py --data ../shared/data"
        f"{' --bf16 true' if bf16 else ''}`.",
        "\n".join(lines),
        "![scores](embeddings.png)",
        f"Retrieval: {settings['queries']:,} terms, each against {settings['documents']:,} dictionary entries, one of "
        "them right. Fine-tuned models get the instruction they were trained with before the term, the others nothing. "
        f"Classification: logistic regression on the embeddings of {settings['train']:,} one-line descriptions of "
        f"software, tested on {settings['test']:,}, {settings['labels']} sections. One run each.",
        f"Fine-tuning: `configs/embeddings/small.yaml` with `{FINETUNING}`. BERT has NeoBERT's data, masks, optimizer, "
        "learning rate, steps and precision in pretraining.",
        f"Expected of nDCG@10: {'; '.join(map(judge, EXPECTED))}. [NOTES.md](../NOTES.md) has what is known of the "
        "reasons.",
        notes,
        "`sts_lee.parquet` holds the score 0.0 in all of its 1,225 rows: a correlation with it is not defined, so no "
        "Spearman coefficient is given.",
    )
    return "\n\n".join(sections) + "\n"


def training_notes(logs: dict[str, list[dict]]) -> str:
    """The loss at the end of each training, of which every 20 steps are logged."""
    parts = []
    for name, log in logs.items():
        losses = [entry["loss"] for entry in log if "loss" in entry][-5:]
        parts.append(f"{name} {statistics.mean(losses):.3f}" if losses else f"{name} none")
    return "Training loss over the last 100 steps: " + "; ".join(parts) + "."


def plot(scores: dict[str, dict], file: Path) -> None:
    figure = Figure(figsize=(13, 3.5), layout="constrained")
    for axes, key in zip(figure.subplots(1, 2), ("ndcg_at_10", "accuracy")):
        values = {name: one[key] for name, one in scores.items() if key in one}
        axes.barh(list(values)[::-1], list(values.values())[::-1])
        axes.set_xlabel({"ndcg_at_10": "nDCG@10, FOLDOC retrieval", "accuracy": "accuracy, Debian sections"}[key])
    write_png(file, figure)


def read_tests(data: Path, rows: int | None) -> dict:
    files = {"retrieval": "retrieval_foldoc_test.parquet"}
    files |= {part: f"classification_debian_sections/{part}.parquet" for part in ("train", "validation")}
    tests = {name: load_dataset("parquet", data_files=str(data / file), split="train") for name, file in files.items()}
    return {name: test.shuffle(seed=0).select(range(min(rows or len(test), len(test)))) for name, test in tests.items()}


def main() -> None:
    (settings,) = parse_config(BenchmarkArguments)
    data, output, pretraining = Path(settings.data).resolve(), Path(settings.output_dir), Path(settings.pretraining_dir)
    tests = read_tests(data, settings.test_rows)

    # 1. Pretraining
    pretraining_limit = f"{BFLOAT16 if settings.bf16 else ''} {settings.pretraining_limit}"
    prepare(data / "text", pretraining / "data")
    shards = f"--train_data {pretraining}/data/train --validation_data {pretraining}/data/validation"
    neobert_log = train(pretraining, "small.yaml", "stage_1", f"{shards} {pretraining_limit}", 2)
    neobert = pretraining / "stage_1" / "model"
    bert = pretrain_bert(neobert, pretraining / "data" / "train", output / "bert", pretraining_limit)
    random = output / "random" / "model"
    save_random(neobert, random)

    # 2. Fine-tuning
    plain = {"random weights": random, "pretrained": neobert, "BERT of the same size, pretrained": bert}
    starts = {
        TUNED: (neobert, output / "from_pretrained"),
        "fine-tuned from random weights": (random, output / "from_random"),
        "BERT of the same size, pretrained, fine-tuned": (bert, output / "from_bert"),
    }
    with ThreadPoolExecutor(2) as executor:
        models = executor.map(lambda start: finetune(*start, data, settings.limit), starts.values())
        tuned = dict(zip(starts, models))

    # 3. Evaluation
    _, evaluation = read_descriptions(str(ROOT / "configs/embeddings/small_datasets.yaml"))
    prompt = evaluation["retrieval"].prompt
    scores = {}
    for name, model in plain.items():
        scores[name] = evaluate(model, build_encoder(str(model), 128), "", tests)
    for name, model in tuned.items():
        scores[name] = evaluate(model, SentenceTransformer(str(model)), prompt, tests)
    ranks = bm25_ranks(tests["retrieval"]["query"][:], tests["retrieval"]["document"][:])
    scores["BM25"] = {"ndcg_at_10": ndcg_at_10(ranks)}

    # 4. Report
    logs = {"NeoBERT, masked": neobert_log, "BERT, masked": json.loads((output / "bert/log.json").read_text())}
    logs |= {name: json.loads((model.parent / "log.json").read_text()) for name, model in tuned.items()}
    sizes = {
        "queries": len(tests["retrieval"]),
        "documents": len(tests["retrieval"]),
        "train": len(tests["train"]),
        "test": len(tests["validation"]),
        "labels": len(set(tests["train"]["label"])),
    }
    results = Path(settings.results)
    results.mkdir(parents=True, exist_ok=True)
    plot(scores, results / "embeddings.png")
    write_json(results / "embeddings.json", {"scores": scores, "sizes": sizes, "logs": logs})
    write_text(results / "embeddings.md", report(scores, sizes, training_notes(logs), settings.bf16))


if __name__ == "__main__":
    main()
