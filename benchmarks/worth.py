"""What pretraining is worth when labels are few.

    python benchmarks/data.py --output_dir data/benchmark
    python benchmarks/worth.py

Two tasks: tagging words in sentences with their part of speech (many words have several), and predicting the archive
section of a one-line description of software. Each start is fine-tuned on few and many rows with the same search over
learning rates and, for texts, over the input of the head. The search is scored on rows that are neither trained on nor
tested on. `random` is the first start's architecture with random weights, different for each seed. An interrupted
command goes on when it is run again, on another machine too: its runs are in results/single_runs/worth.json.
"""

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from datasets import Dataset, disable_progress_bars
from matplotlib.figure import Figure
from runner import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    ROOT,
    Settings,
    StoredRuns,
    difference,
    draw_lines,
    interval,
    new_figure,
    run_benchmark,
    table,
)
from sklearn.feature_extraction import DictVectorizer
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

from neobert_hf.common.fingerprints import model_fingerprint


MODELS = {"NeoBERT": ROOT / "benchmarks/models/small", "BERT": ROOT / "benchmarks/models/bert"}
RANDOM, COUNTS = "random", "words alone"
# Folder, column of texts and column of labels of each task.
TASKS = {"tags": ("pos_brown", "tokens", "tags"), "sections": ("classification_debian_sections", "sentence", "label")}
# Labelled rows that are trained on, by task: None means all.
ROWS = {"tags": (100, 300, 3000), "sections": (100, 300, 1000, 3000, None)}
# Epochs by number of training rows: the fewer rows, the more epochs.
EPOCHS = {100: 40, 300: 15, 1000: 8, 3000: 5}
RATES = (3e-4, 1e-3, 3e-3)
# Rows on which the learning rate and the head are chosen, and rows that are scored.
DEVELOPMENT, TEST = 1000, 2000
# Rows of a step. With many training rows, steps are larger: on two cores that takes a third of the time.
BATCH, LARGE_BATCH, MANY_ROWS = 16, 64, 10_000
MAX_LENGTH = 128
# Of the rows drawn, their order, the head and random weights.
SEEDS = 5
TITLES = {"tags": "parts of speech, words right", "sections": "sections of software, texts right"}
COLOURS = {"NeoBERT": BLUE, "BERT": ORANGE, RANDOM: GREY, COUNTS: GREEN}


@dataclass(kw_only=True)
class WorthSettings(Settings):
    data: str = field(
        default="data/benchmark",
        metadata={"help": "folder with pos_brown/ and classification_debian_sections/", "path": True},
    )


@dataclass
class Task:
    """Labelled texts: rows to train on, rows on which the learning rate is chosen, and rows that are scored.

    Args:
        labels: how many there are.
        of_words: whether each word has a label; otherwise each text has one.
    """

    name: str
    train: Dataset
    development: Dataset
    test: Dataset
    labels: int
    of_words: bool

    def draw(self, rows: int, seed: int) -> Dataset:
        return self.train.shuffle(seed=seed).select(range(rows))


def read_task(name: str, data: Path) -> Task:
    folder, text, label = TASKS[name]
    train, test = (
        Dataset.from_parquet(str(data / folder / f"{part}.parquet")).rename_columns({text: "text", label: "labels"})
        for part in ("train", "validation")
    )
    if name == "tags":
        names = sorted({tag for tags in train["labels"] for tag in tags})
        train, test = (
            rows.map(lambda row: {"labels": [names.index(tag) for tag in row["labels"]]}) for rows in (train, test)
        )
    count = len(names) if name == "tags" else max(train["labels"]) + 1
    train, test = train.shuffle(seed=0), test.shuffle(seed=0)
    development, train = train.take(DEVELOPMENT), train.skip(DEVELOPMENT)
    return Task(name, train, development, test.take(min(TEST, len(test))), count, of_words=name == "tags")


def encode(rows: Dataset, task: Task, tokenizer: PreTrainedTokenizerFast) -> Dataset:
    """Token ids and labels. If a word has several tokens, the first one carries its label."""

    def to_ids(row: dict) -> dict[str, list]:
        encoded = tokenizer(row["text"], truncation=True, max_length=MAX_LENGTH, is_split_into_words=task.of_words)
        if not task.of_words:
            return {**encoded, "labels": row["labels"]}
        words = encoded.word_ids()
        first = [word is not None and word != before for word, before in zip(words, [None, *words])]
        return {**encoded, "labels": [row["labels"][word] if new else -100 for word, new in zip(words, first)]}

    return rows.map(to_ids, remove_columns=rows.column_names)


def fine_tune(
    start: Path, weights: bool, task: Task, rows: int, rate: float, pooling: str | None, seed: int
) -> dict[str, float]:
    """Fine-tune once. Returns the accuracy on development and test rows.

    Args:
        weights: whether to begin with the weights of `start`, and not with random ones.
        pooling: what the head reads of a text: the first token's hidden state ("cls") or the mean of all ("mean").
    """
    tokenizer = AutoTokenizer.from_pretrained(start)
    parts = [encode(part, task, tokenizer) for part in (task.draw(rows, seed), task.development, task.test)]
    set_seed(seed)
    auto = AutoModelForTokenClassification if task.of_words else AutoModelForSequenceClassification
    config = AutoConfig.from_pretrained(start, num_labels=task.labels)
    if pooling:
        config.classifier_pooling = pooling
    if weights:
        model = auto.from_pretrained(start, config=config, dtype=torch.float32)
    else:
        model = auto.from_config(config, dtype=torch.float32)
    collator = (DataCollatorForTokenClassification if task.of_words else DataCollatorWithPadding)(tokenizer)
    arguments = TrainingArguments(
        output_dir="runs/worth",
        num_train_epochs=EPOCHS.get(rows, 3),
        learning_rate=rate,
        warmup_steps=0.1,
        weight_decay=0.01,
        per_device_train_batch_size=BATCH if rows < MANY_ROWS else LARGE_BATCH,
        per_device_eval_batch_size=64,
        train_sampling_strategy="group_by_length",
        seed=seed,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, collator, parts[0])
    trainer.train()
    scores = {}
    for name, part in zip(("development", "test"), parts[1:]):
        output = trainer.predict(part)
        labelled = output.label_ids != -100
        scores[name] = float((output.predictions.argmax(-1) == output.label_ids)[labelled].mean())
    return scores


def word_features(words: list[str]) -> list[dict[str, str]]:
    """Of each word: itself, its neighbours, its last letters and whether it begins with a capital."""
    lowered = ["<s>", *(word.lower() for word in words), "</s>"]
    return [
        {"word": now, "before": before, "after": after, "end": now[-3:], "capital": str(word[:1].isupper())}
        for word, before, now, after in zip(words, lowered, lowered[1:], lowered[2:])
    ]


def count_features(task: Task, rows: int, seed: int) -> dict:
    """A logistic regression without any network: on words and bigrams by TF-IDF, or on each word and its neighbours."""
    features = DictVectorizer() if task.of_words else TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)

    def read(part: Dataset) -> tuple[list, list[int]]:
        if not task.of_words:
            return part["text"][:], part["labels"][:]
        words = [features for row in part["text"] for features in word_features(row)]
        return words, [tag for tags in part["labels"] for tag in tags]

    texts, labels = read(task.draw(rows, seed))
    found = {}
    for strength in (1.0, 10.0, 100.0):
        classifier = make_pipeline(features, LogisticRegression(C=strength, max_iter=300)).fit(texts, labels)
        found[classifier.score(*read(task.development))] = classifier
    return {"test": float(found[max(found)].score(*read(task.test)))}


def run_start(start: Path, weights: bool, task: Task, rows: int, result: Callable) -> dict:
    """The best learning rate and pooling, and the test accuracy with them for each seed.

    Args:
        result: takes the name of a run, in parts, and a function that makes it; returns its result.
    """
    kind = f"{'weights' if weights else 'random weights'} of {model_fingerprint(str(start))[:8]}"
    # BERT's head for texts has no choice of what it reads.
    choice = not task.of_words and hasattr(AutoConfig.from_pretrained(start), "classifier_pooling")

    def tune(rate: float, pooling: str | None, seed: int) -> dict:
        name = f"{rate:g}" + (f", {pooling}" if pooling else "")
        run = partial(fine_tune, start, weights, task, rows, rate, pooling, seed)
        return result((kind, task.name, f"{rows} rows", name, f"seed {seed}"), run)

    def search() -> dict:
        trials = itertools.product(RATES, ("cls", "mean") if choice else (None,))
        return {"trial": max(trials, key=lambda trial: tune(*trial, 0)["development"])}

    rates = ", ".join(f"{rate:g}" for rate in RATES)
    best = result((kind, task.name, f"{rows} rows", f"best of {rates}"), search)
    return {"best": best, "accuracy": [tune(*best["trial"], seed)["test"] for seed in range(SEEDS)]}


def measure(settings: WorthSettings) -> dict:
    """By task, rows and start: the accuracy on the test rows for each seed, and the chosen learning rate."""
    disable_progress_bars()
    starts = {name: (folder, True) for name, folder in MODELS.items()} | {RANDOM: (MODELS["NeoBERT"], False)}
    runs = StoredRuns(Path(settings.results) / "single_runs" / "worth.json")

    def result(parts: tuple[str, ...], run: Callable[[], dict]) -> dict:
        return runs.result("; ".join((*parts, f"{MAX_LENGTH} tokens", f"{DEVELOPMENT} + {TEST} rows")), run)

    scores = {}
    for task in (read_task(name, Path(settings.data)) for name in TASKS):
        scores[task.name] = {}
        for rows in (count or len(task.train) for count in ROWS[task.name]):
            entries = {name: run_start(*start, task, rows, result) for name, start in starts.items()}
            counts = []
            for seed in range(SEEDS):
                parts = (COUNTS, task.name, f"{rows} rows", f"seed {seed}")
                counts.append(result(parts, partial(count_features, task, rows, seed))["test"])
            scores[task.name][str(rows)] = entries | {COUNTS: {"accuracy": counts}}
            print(task.name, rows, {name: entry["accuracy"] for name, entry in entries.items()}, flush=True)
    return {"scores": scores, "runs": runs.places()}


def percent(entry: dict) -> list[float]:
    return [100 * share for share in entry["accuracy"]]


def tables(scores: dict) -> tuple[str, str]:
    """Accuracy in percent with its 95% interval; and what NeoBERT gains over each other, seed by seed."""
    first, *others = COLOURS
    means, gains = [], []
    for task, by_rows in scores.items():
        for rows, entries in by_rows.items():
            found = {name: percent(entries[name]) for name in COLOURS}
            means.append([TITLES[task], f"{int(rows):,}", *(interval(each, 1) for each in found.values())])
            gains.append([TITLES[task], f"{int(rows):,}", *(difference(found[first], found[o], 1) for o in others)])
    return table(["", "rows", first, *others], means), table([f"{first} over", "rows", *others], gains)


def plot(found: dict) -> Figure:
    """Accuracy against the number of labelled rows: a panel each task, and a line each start."""
    figure, panels = new_figure(
        ("NeoBERT needs 100 labelled sentences where BERT needs 3,000",
         "Words whose part of speech is found, %, by labelled sentences"),
        ("Where words alone decide, pretraining adds little",
         "Descriptions of software whose section is found, %, by labelled texts"),
        size=(6.6, 4.1),
    )  # fmt: skip
    for axes, by_rows in zip(panels, found["scores"].values()):
        lines = {}
        for name, color in COLOURS.items():
            points = [(int(rows), statistics.mean(percent(entries[name]))) for rows, entries in by_rows.items()]
            lines["untrained" if name == RANDOM else name] = (points, color)
        axes.set_xscale("log")
        draw_lines(axes, lines, "{:.1f}")
        axes.set_xticks(list(map(int, by_rows)), [f"{int(rows):,}" for rows in by_rows])
        axes.minorticks_off()
    return figure


def page(found: dict) -> list[str]:
    means, gains = tables(found["scores"])
    return [
        "# An hour of pretraining saves labels where the order of words matters",
        "![Accuracy against labelled rows](worth.png)",
        f"Accuracy in percent on {TEST:,} held-out rows. Each start is fine-tuned at the rates "
        f"{', '.join(f'{rate:g}' for rate in RATES)}, for texts with two heads (on the first "
        "token's hidden state, and on the mean of all). Rate and head are chosen on "
        f"{DEVELOPMENT:,} other rows, and {SEEDS} seeds are scored with them. A seed decides "
        "the training rows, their order, the new head and the random weights; it is the same for all starts. "
        f"`{RANDOM}` is the same network untrained. `{COUNTS}` is a logistic regression without any network, on words "
        "and bigrams by TF-IDF, or on each word, its neighbours and its last letters.",
        means,
        "Gains in points, seed by seed, with their 95% interval by Student's t:",
        gains,
        f"The single runs are of {found['runs']}.",
    ]


def main(args: list[str] | None = None) -> None:
    run_benchmark("worth", measure, page, plot, ("scikit-learn",), WorthSettings, args)


if __name__ == "__main__":
    main()
