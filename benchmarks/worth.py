"""What pretraining is worth when labels are few. Rewrites benchmarks/results/worth.md.

    python benchmarks/worth.py --data ../shared/data --starts NeoBERT=runs/small/model BERT=runs/bert/model

Two tasks: tagging words in sentences with their part of speech (many words have several), and predicting the archive
section of a one-line description of software. Each start is fine-tuned on 300, 3,000 and more rows with the same search
over learning rates and, for texts, over the input of the head. The search is scored on rows that are neither trained
on nor tested on.
`random` is the first start's architecture with random weights, different for each seed. After an interruption the same
command resumes, also on another machine: see stored_runs.py.
"""

import itertools
import statistics
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from circumstances import circumstances
from datasets import Dataset, disable_progress_bars
from embedding_report import interval
from sklearn.feature_extraction import DictVectorizer
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from stored_runs import StoredRuns
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

from neobert_hf.common.files import write_json, write_text
from neobert_hf.common.fingerprints import model_fingerprint
from neobert_hf.common.report import Line, Panel, markdown_table, mean_interval, plot_lines
from neobert_hf.common.settings import parse_config


RANDOM, COUNTS, COMMONEST = "random", "words alone", "commonest label"
MEAN = "mean of the tasks"
KINDS = ("fine-tuned", "probe")
# Epochs by number of training rows: the fewer rows, the more epochs.
EPOCHS = {100: 40, 300: 15, 1000: 8, 3000: 5}
# Rows of a step. With many training rows, steps are larger: on two cores that takes a third of the time.
BATCH, LARGE_BATCH, MANY_ROWS = 16, 64, 10_000


@dataclass
class WorthArguments:
    data: str = field(metadata={"help": "folder with pos_brown/ and classification_debian_sections/"})
    starts: list[str] = field(metadata={"help": "NAME=FOLDER of each pretrained model"})
    output_dir: str = field(default="runs/worth", metadata={"help": "folder for what the Trainer writes"})
    results: str = field(default="benchmarks/results", metadata={"help": "folder of the report"})
    rows: list[int] = field(default_factory=lambda: [300, 3000], metadata={"help": "numbers of rows to train on"})
    rows_of_sections: list[int] = field(
        default_factory=list,
        metadata={"help": "further numbers, for the sections only; a number above all rows means all"},
    )
    learning_rates: list[float] = field(
        default_factory=lambda: [3e-4, 1e-3, 3e-3], metadata={"help": "rates that every start tries"}
    )
    seeds: int = field(default=5, metadata={"help": "of the rows drawn, their order, the head and random weights"})
    search_seeds: int = field(default=2, metadata={"help": "seeds with which every learning rate is tried"})
    development: int = field(default=1000, metadata={"help": "rows on which the learning rate is chosen"})
    test: int = field(default=2000, metadata={"help": "rows that are scored"})
    max_length: int = field(default=128, metadata={"help": "tokens"})


@dataclass
class Task:
    """Labelled texts.

    Args:
        train: all rows from which training rows are drawn.
        development: rows on which the learning rate is chosen.
        of_words: whether each word has a label; otherwise each text has one.
    """

    name: str
    title: str
    train: Dataset
    development: Dataset
    test: Dataset
    labels: list[str]
    of_words: bool


def read_tasks(settings: WorthArguments) -> list[Task]:
    data = Path(settings.data)
    tags = _read(data / "pos_brown", settings)
    names = sorted({tag for row in tags["train"]["tags"][:] for tag in row})
    numbers = {name: number for number, name in enumerate(names)}
    tags = {
        split: rows.map(lambda row: {"labels": [numbers[tag] for tag in row["tags"]]}).rename_column("tokens", "text")
        for split, rows in tags.items()
    }
    sections = {
        split: rows.rename_columns({"sentence": "text", "label": "labels"})
        for split, rows in _read(data / "classification_debian_sections", settings).items()
    }
    count = max(sections["train"]["labels"]) + 1
    return [
        Task("tags", "parts of speech, words right", **tags, labels=names, of_words=True),
        Task(
            "sections", "Debian sections, texts right", **sections, labels=list(map(str, range(count))), of_words=False
        ),
    ]


def _read(folder: Path, settings: WorthArguments) -> dict[str, Dataset]:
    train = Dataset.from_parquet(str(folder / "train.parquet")).shuffle(seed=0)
    test = Dataset.from_parquet(str(folder / "validation.parquet")).shuffle(seed=0)
    return {
        "train": train.select(range(settings.development, len(train))),
        "development": train.select(range(settings.development)),
        "test": test.select(range(min(settings.test, len(test)))),
    }


def encode(rows: Dataset, task: Task, tokenizer: PreTrainedTokenizerFast, max_length: int) -> Dataset:
    """Token ids and labels. If a word has several tokens, the first one carries its label."""

    def to_ids(batch: dict[str, list]) -> dict[str, list]:
        encoded = tokenizer(batch["text"], truncation=True, max_length=max_length, is_split_into_words=task.of_words)
        if not task.of_words:
            return {**encoded, "labels": batch["labels"]}
        labels = []
        for number, tags in enumerate(batch["labels"]):
            words = encoded.word_ids(number)
            first = [word is not None and word != before for word, before in zip(words, [None, *words])]
            labels.append([tags[word] if is_first else -100 for word, is_first in zip(words, first)])
        return {**encoded, "labels": labels}

    return rows.map(to_ids, batched=True, remove_columns=rows.column_names)


def poolings(start: Path, task: Task) -> tuple[str | None, ...]:
    """Possible inputs of the head: the first token's hidden state or the mean of all; None if there is no choice.

    Masked language modelling sets no task for the first token's hidden state. Which input is better depends on the
    start.
    """
    choice = not task.of_words and hasattr(AutoConfig.from_pretrained(start), "classifier_pooling")
    return ("cls", "mean") if choice else (None,)


def build_model(start: Path, task: Task, pooling: str | None, weights: bool) -> PreTrainedModel:
    auto = AutoModelForTokenClassification if task.of_words else AutoModelForSequenceClassification
    options = {"num_labels": len(task.labels)} | ({"classifier_pooling": pooling} if pooling else {})
    if weights:
        return auto.from_pretrained(start, dtype=torch.float32, **options)
    return auto.from_config(AutoConfig.from_pretrained(start, **options), dtype=torch.float32)


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Share of right predictions. Positions with the label -100 are left out."""
    labelled = labels != -100
    return float((predictions[labelled] == labels[labelled]).mean())


def fine_tune(
    start: Path,
    task: Task,
    rows: int,
    trial: tuple[float, str | None],
    seed: int,
    settings: WorthArguments,
    weights: bool,
) -> dict:
    """Fine-tune once with a learning rate and a pooling. Returns the accuracy on development and test rows."""
    rate, pooling = trial
    tokenizer = AutoTokenizer.from_pretrained(start)
    drawn = task.train.shuffle(seed=seed).select(range(min(rows, len(task.train))))
    parts = [encode(part, task, tokenizer, settings.max_length) for part in (drawn, task.development, task.test)]
    set_seed(seed)
    model = build_model(start, task, pooling, weights)
    collator = (DataCollatorForTokenClassification if task.of_words else DataCollatorWithPadding)(tokenizer)
    arguments = TrainingArguments(
        output_dir=settings.output_dir,
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
        scores[name] = accuracy(output.predictions.argmax(-1), output.label_ids)
    return scores


@torch.no_grad()
def probe(start: Path, task: Task, rows: int, seed: int, settings: WorthArguments, weights: bool) -> dict:
    """A logistic regression on the last hidden state of each word, or on their mean. The model is not trained."""
    tokenizer = AutoTokenizer.from_pretrained(start)
    set_seed(seed)
    config = AutoConfig.from_pretrained(start)
    model = AutoModel.from_pretrained(start, dtype=torch.float32) if weights else AutoModel.from_config(config)
    model.eval()
    drawn = task.train.shuffle(seed=seed).select(range(min(rows, len(task.train))))

    def states(part: Dataset) -> tuple[np.ndarray, np.ndarray]:
        found, labels = [], []
        for batch in encode(part, task, tokenizer, settings.max_length).batch(64):
            inputs = tokenizer.pad({"input_ids": batch["input_ids"]}, return_tensors="pt")
            lengths = inputs["attention_mask"].sum(1).tolist()
            for state, length, tags in zip(model(**inputs).last_hidden_state, lengths, batch["labels"]):
                tags, state = torch.tensor(tags), state[:length]
                found.append(state[tags != -100] if task.of_words else state.mean(0, keepdim=True))
                labels.append(tags[tags != -100] if task.of_words else tags[None])
        return torch.cat(found).numpy(), torch.cat(labels).numpy()

    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=300))
    classifier.fit(*states(drawn))
    return {"test": float(classifier.score(*states(task.test)))}


def word_features(words: list[str]) -> list[dict[str, str]]:
    """Features of each word: the word itself, its neighbours, its last letters and whether it begins with a capital."""
    lowered = ["<s>", *(word.lower() for word in words), "</s>"]
    return [
        {
            "word": lowered[place + 1],
            "before": lowered[place],
            "after": lowered[place + 2],
            "end": lowered[place + 1][-3:],
            "capital": str(word[:1].isupper()),
        }
        for place, word in enumerate(words)
    ]


def count_features(task: Task, rows: int, seed: int) -> dict:
    """A logistic regression without any network: on words and bigrams by TF-IDF, or on each word and its neighbours."""
    drawn = task.train.shuffle(seed=seed).select(range(min(rows, len(task.train))))
    features = DictVectorizer() if task.of_words else TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)

    def read(part: Dataset) -> tuple[list, list[int]]:
        if not task.of_words:
            return part["text"][:], part["labels"][:]
        words = [features for row in part["text"] for features in word_features(row)]
        return words, [tag for tags in part["labels"] for tag in tags]

    texts, labels = read(drawn)
    found = {}
    for strength in (1.0, 10.0, 100.0):
        classifier = make_pipeline(features, LogisticRegression(C=strength, max_iter=300)).fit(texts, labels)
        found[classifier.score(*read(task.development))] = classifier
    return {"test": float(found[max(found)].score(*read(task.test)))}


def commonest_label(task: Task, rows: int, seed: int) -> float:
    """The accuracy of the label that a word, or a text, most often has in the training rows."""
    drawn = task.train.shuffle(seed=seed).select(range(min(rows, len(task.train))))
    if not task.of_words:
        ((label, _),) = Counter(drawn["labels"]).most_common(1)
        return statistics.mean(label == right for right in task.test["labels"])
    counts = defaultdict(Counter)
    for words, tags in zip(drawn["text"], drawn["labels"]):
        for word, tag in zip(words, tags):
            counts[word][tag] += 1
    # Words that no training row has get the commonest label of all words.
    ((other, _),) = sum(counts.values(), Counter()).most_common(1)
    best = {word: found.most_common(1)[0][0] for word, found in counts.items()}
    right = [
        best.get(word, other) == tag
        for words, tags in zip(task.test["text"], task.test["labels"])
        for word, tag in zip(words, tags)
    ]
    return statistics.mean(right)


@dataclass
class Benchmark:
    """All fine-tunings and scores of one command."""

    settings: WorthArguments
    runs: StoredRuns

    def name_of(self, *parts: str) -> str:
        """The name of a run: what differs between runs (`parts`), then what all runs of a command share."""
        settings = self.settings
        return "; ".join([*parts, f"{settings.max_length} tokens", f"{settings.development} + {settings.test} rows"])

    def check_choice(self, names: list[str]) -> None:
        """Raise, before anything is trained, if a stored run lacks the development accuracy that the choice needs."""
        for name in names:
            if name in self.runs.runs and "development" not in self.runs.runs[name]["found"]:
                raise ValueError(
                    f"The run {name!r} in {self.runs.file} was stored without its accuracy on development rows, so "
                    "rates cannot be chosen anew. Give `learning_rates` and `rows` that the file holds a `best of` "
                    "for, or another folder of `results`, where all is trained."
                )

    def run_start(self, name: str, start: Path, task: Task, rows: int) -> dict:
        """The best learning rate and pooling, the test accuracy with them for each seed, and that of each probe."""
        settings, weights = self.settings, name != RANDOM
        weights_of = f"{'weights' if weights else 'random weights'} of {model_fingerprint(str(start))[:8]}"
        given = (weights_of, task.name, f"{rows} rows")

        def name_of_trial(trial: tuple[float, str | None], seed: int) -> str:
            return self.name_of(*given, described(trial), f"seed {seed}")

        def tune(trial: tuple[float, str | None], seed: int) -> dict:
            def train_and_score() -> dict:
                return fine_tune(start, task, rows, trial, seed, settings, weights)

            return self.runs.result(name_of_trial(trial, seed), train_and_score)

        def search() -> dict:
            def score(trial: tuple[float, str | None]) -> float:
                return statistics.mean(tune(trial, seed)["development"] for seed in range(settings.search_seeds))

            trials = list(itertools.product(settings.learning_rates, poolings(start, task)))
            self.check_choice(
                [name_of_trial(*each) for each in itertools.product(trials, range(settings.search_seeds))]
            )
            return {"trial": max(trials, key=score), "seeds": settings.search_seeds}

        rates = ", ".join(f"{rate:g}" for rate in settings.learning_rates)
        best = self.runs.result(self.name_of(*given, f"best of {rates}"), search)

        def probe_once(seed: int) -> dict:
            name = self.name_of(*given, "probe", f"seed {seed}")
            return self.runs.result(name, lambda: probe(start, task, rows, seed, settings, weights))

        seeds = range(settings.seeds)
        return {
            "best": best,
            "fine-tuned": [tune(tuple(best["trial"]), seed)["test"] for seed in seeds],
            "probe": [probe_once(seed)["test"] for seed in seeds],
        }

    def run_counts(self, task: Task, rows: int) -> dict:
        def count_once(seed: int) -> dict:
            # With all rows, every seed trains on the same rows, and a regression has no other randomness.
            seed = 0 if rows == len(task.train) else seed
            name = self.name_of(COUNTS, task.name, f"{rows} rows", f"seed {seed}")
            return self.runs.result(name, lambda: count_features(task, rows, seed))

        return {"fine-tuned": [count_once(seed)["test"] for seed in range(self.settings.seeds)]}

    def run_all(self, starts: dict[str, Path], tasks: list[Task]) -> dict:
        """By task, rows and start: the accuracy on the test rows for each seed, and the chosen learning rate."""
        first, scores = next(iter(starts.values())), {}
        sections = next(task for task in tasks if task.name == "sections")
        of_sections = [(min(rows, len(sections.train)), sections) for rows in self.settings.rows_of_sections]
        for rows, task in sorted([*itertools.product(self.settings.rows, tasks), *of_sections], key=lambda job: job[0]):
            entries = scores.setdefault(task.name, {}).setdefault(str(rows), {})
            for name, start in {**starts, RANDOM: first}.items():
                entries[name] = self.run_start(name, start, task, rows)
                mean = statistics.mean(entries[name]["fine-tuned"])
                print(f"{task.title}, {rows} rows: {name} {mean:.4f}", flush=True)
            entries[COUNTS] = self.run_counts(task, rows)
            entries[COMMONEST] = {
                "fine-tuned": [commonest_label(task, rows, seed) for seed in range(self.settings.seeds)]
            }
        return scores


def described(trial: tuple[float, str | None]) -> str:
    return ", ".join(f"{part:g}" if isinstance(part, float) else part for part in trial if part)


def scores_table(scores: dict, tasks: list[Task]) -> list[str]:
    """Accuracy of each start in percent: the mean over the seeds, and half of its 95% interval."""
    lines = []
    for task in tasks:
        for rows, entries in scores[task.name].items():
            for name, entry in entries.items():
                best = entry.get("best")
                chosen = f"{described(best['trial'])} ({best['seeds']})" if best else "-"
                cells = [task.title, f"{int(rows):,}", name, chosen]
                for kind in KINDS:
                    cells.append(interval([100 * share for share in entry[kind]], 1) if kind in entry else "-")
                lines.append(cells)
    return markdown_table(
        ["task", "rows", "start", "best rate, head reads (seeds)", "fine-tuned, %", "probe, %"], lines
    )


def comparisons(starts: list[str]) -> list[tuple[str, str, str]]:
    """Kind and names of each comparison: each start with random weights, and the first start with all others."""
    pairs = [(name, RANDOM) for name in starts] + [(starts[0], name) for name in starts[1:]]
    return [("fine-tuned", starts[0], COUNTS), *((kind, *pair) for kind in KINDS for pair in pairs)]


def gains(entries: dict, kind: str, better: str, worse: str) -> list[float]:
    """Differences in percentage points, seed by seed."""
    return [100 * (a - b) for a, b in zip(entries[better][kind], entries[worse][kind])]


def gain_cells(found: list[float]) -> list[str]:
    mean, lower, upper = mean_interval(found)
    verdict = "yes" if lower > 0 else "no" if upper < 0 else "not decided"
    return [f"{mean:+.1f} ({lower:+.1f} to {upper:+.1f})", verdict]


def gains_table(by_title: dict[str, dict], starts: list[str]) -> list[str]:
    """What each start gains over random weights, and the first start over the others, seed by seed."""
    lines = []
    for title, by_rows in by_title.items():
        for (rows, entries), (kind, better, worse) in itertools.product(by_rows.items(), comparisons(starts)):
            found = gain_cells(gains(entries, kind, better, worse))
            lines.append([title, f"{int(rows):,}", f"{better} - {worse}, {kind}", *found])
    return markdown_table(["task", "rows", "", "points, 95% interval", "better?"], lines)


def growth_table(by_title: dict[str, dict], starts: list[str]) -> list[str]:
    """How much larger each gain is with the fewest rows than with the most rows, seed by seed."""
    lines = []
    for title, by_rows in by_title.items():
        fewest, most = (by_rows[choose(by_rows, key=int)] for choose in (min, max))
        for kind, better, worse in comparisons(starts):
            pairs = zip(gains(fewest, kind, better, worse), gains(most, kind, better, worse))
            found = gain_cells([few - many for few, many in pairs])
            lines.append([title, f"{better} - {worse}, {kind}", *found])
    return markdown_table(["task", "", "points, 95% interval", "does the gain grow?"], lines)


def mean_of_tasks(scores: dict) -> dict:
    """The mean of the tasks, seed by seed, by rows, start and kind. Numbers of rows that a task lacks are left out."""
    first, *others = scores.values()
    means = {}
    for rows, entries in first.items():
        if not all(rows in other for other in others):
            continue
        for name, kind in itertools.product(entries, KINDS):
            if kind in entries[name]:
                of_tasks = zip(*(by_rows[rows][name][kind] for by_rows in scores.values()))
                means.setdefault(rows, {}).setdefault(name, {})[kind] = list(map(statistics.mean, of_tasks))
    return means


def plot(scores: dict, tasks: list[Task], file: Path) -> None:
    """Accuracy against the number of labelled rows, with one panel per task and one curve per start."""
    panels = []
    for task in tasks:
        by_rows = scores[task.name]
        lines = []
        for number, name in enumerate(next(iter(by_rows.values()))):
            for kind, style in zip(KINDS, ("-", ":")):
                found = [(int(rows), entry[name][kind]) for rows, entry in by_rows.items() if kind in entry[name]]
                points = [(rows, 100 * statistics.mean(scores)) for rows, scores in found]
                look = {"marker": "o", "color": f"C{number}", "linestyle": style}
                lines += [Line(points, f"{name}, {kind}", look)] if points else []
        labels = {"xlabel": "labelled rows", "ylabel": task.title + " (%)", "xscale": "log"}
        panels.append(Panel(lines, labels))
    plot_lines(file, panels)


def report(benchmark: Benchmark, scores: dict, tasks: list[Task], starts: dict[str, Path]) -> str:
    settings = benchmark.settings
    by_title = {task.title: scores[task.name] for task in tasks} | {MEAN: mean_of_tasks(scores)}
    growth = []
    if len(settings.rows) > 1:
        growth.append(
            "Does the gain grow as labels become fewer? Shown is the gain with the fewest rows of a task minus the "
            "gain with its most rows, seed by seed. The smaller set of a seed is part of its larger set."
        )
        growth.append("\n".join(growth_table(by_title, list(starts))))
    sections = (
        "# What pretraining is worth when labels are few",
        "![accuracy against labelled rows](worth.png)",
        circumstances("worth", "scikit-learn", runs=benchmark.runs.circumstances()),
        f"Each start is fine-tuned at the rates {', '.join(f'{rate:g}' for rate in settings.learning_rates)} with as "
        "many seeds as the last table says. For texts, two heads are tried: on the hidden state of the first token, "
        "and on the mean of all hidden states. The rate and the head are chosen by the accuracy "
        f"on {settings.development:,} rows that are never trained on; then {settings.seeds} seeds are scored on "
        f"{settings.test:,} held-out rows. A step has {BATCH} rows, or {LARGE_BATCH} if there are {MANY_ROWS:,} or "
        "more training rows. A seed determines the training rows, their order, the new head and the random "
        "weights. It is the same for all starts, so gains are computed seed by seed. `probe`: a logistic regression on "
        f"the hidden states of the model, which is not trained. `{COMMONEST}`: the most frequent label of each word, "
        f"or of all texts, in the training rows. `{COUNTS}`: a regression without any network, on TF-IDF of words and "
        "bigrams, or on each word, its neighbours and its last letters. The mean of the tasks is given for numbers of "
        "rows that both have. Intervals are 95% by Student's t.",
        "\n".join(gains_table(by_title, list(starts))),
        *growth,
        "\n".join(scores_table(scores, tasks)),
    )
    return "\n\n".join(sections) + "\n"


def main(args: list[str] | None = None) -> None:
    (settings,) = parse_config(WorthArguments, args=args)
    disable_progress_bars()
    starts = {name: Path(folder) for name, folder in (start.split("=", 1) for start in settings.starts)}
    tasks = read_tasks(settings)
    results = Path(settings.results)
    results.mkdir(parents=True, exist_ok=True)
    benchmark = Benchmark(settings, StoredRuns(results / "single_runs" / "worth.json"))
    scores = benchmark.run_all(starts, tasks)
    plot(scores, tasks, results / "worth.png")
    write_json(results / "worth.json", {"settings": asdict(settings), "scores": scores})
    write_text(results / "worth.md", report(benchmark, scores, tasks, starts))


if __name__ == "__main__":
    main()
