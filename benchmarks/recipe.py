"""What each step of a newer way to pretrain is worth to a small model, and what few steps of BERT's masks mend.

    python benchmarks/data.py --output_dir data/benchmark
    python benchmarks/recipe.py --bf16 true --seeds 3                # without AVX512-BF16 leave --bf16 out
    python benchmarks/recipe.py --bf16 true --steps 8000 --runs cosine "stable, 2e-3" "linear decay, 2e-3"

480 steps take three minutes of a CPU core, 8,000 an hour. Every run is the recipe `pretrain` with
`configs/pretrain/small.yaml` and the settings in `RUNS`. Runs of a seed have the same initial weights, text, order and
masks. A decay goes on from a checkpoint of another run. An interrupted command goes on when it is run again, and the
page holds the runs of all commands, which are kept in results/single_runs/recipe.json.
"""

import shutil
import statistics
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, disable_progress_bars
from distil import Retrieval
from pretraining import losses_by_place
from runner import ROOT, Settings, StoredRuns, difference, run_benchmark, table
from sentence_transformers import SentenceTransformer
from sklearn.linear_model import RidgeClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from transformers import AutoTokenizer, DataCollatorWithFlattening
from worth import RATES, encode, fine_tune, read_parts

from neobert_hf.data import prepare_data
from neobert_hf.embeddings import finetune_embeddings
from neobert_hf.hub.averaging import average
from neobert_hf.modeling_neobert import NeoBERTForMaskedLM
from neobert_hf.pretraining import pretrain


# The tokenizer of the stored runs.
TOKENIZER = ROOT / "benchmarks/models/small"
# Checkpoints are kept of the last 9 of so many parts of a run.
PARTS = 20
# Muon's rate where a row does not name another.
RATE = 4e-3
ALL_MASK = {"mask_replace_prob": 1.0, "random_replace_prob": 0.0}
ADAMW = {"optimizer": "adamw", "learning_rate": 2e-3}
PAPER = ALL_MASK | ADAMW
WSD = {"schedule": "wsd", "decay_steps": 0.2, "decay_shape": "linear"}
# Sources whose text was edited: of this corpus those that are neither generated nor lists.
EDITED = ("python-docs", "state-of-the-union", "brown-corpus", "moby-dick", "debian-docs")


@dataclass(frozen=True)
class Variant:
    """A run: its settings; the run that it goes on from, after how many of its parts; or parts that are averaged."""

    settings: dict[str, Any] = field(default_factory=dict)
    start: str | None = None
    after: int = 0
    averaged: tuple[int, ...] = ()


def decay(start: str, parts: int = 4, **settings: Any) -> Variant:
    """The last parts of a run, in which the rate falls to 0."""
    course = {"schedule": "wsd", "decay_steps": 1.0, "warmup_steps": 0, "continue_optimizer": True}
    return Variant(course | settings, start, PARTS - parts)


RUNS = {
    "paper": Variant(PAPER),
    "AdamW": Variant(ADAMW),
    "cosine": Variant(),
    "cosine, 8e-3": Variant({"learning_rate": 8e-3}),
    "cosine, 16e-3": Variant({"learning_rate": 16e-3}),
    "linear, 8e-3": Variant({"learning_rate": 8e-3, "schedule": "linear"}),
    "all [MASK], 8e-3": Variant({"learning_rate": 8e-3} | ALL_MASK),
    "stable": Variant({"schedule": "constant"}),
    "mean of 5": Variant(start="stable", averaged=(16, 17, 18, 19, 20)),
    "mean of 9": Variant(start="stable", averaged=tuple(range(12, 21))),
    "decay": decay("stable"),
    "linear decay": decay("stable", decay_shape="linear"),
    "longer linear decay": decay("stable", 8, decay_shape="linear"),
    "linear decay, fewer masks": decay("stable", decay_shape="linear", final_mlm_probability=0.05),
    "linear decay, edited text": decay("stable", decay_shape="linear", train_data="train_edited"),
    "stable, 2e-3": Variant({"schedule": "constant", "learning_rate": 2e-3}),
    "linear decay, 2e-3": decay("stable, 2e-3", decay_shape="linear", learning_rate=2e-3),
    "longer linear decay, 2e-3": decay("stable, 2e-3", 8, decay_shape="linear", learning_rate=2e-3),
    "speed run": Variant(WSD),
    "speed run, 8e-3": Variant(WSD | {"learning_rate": 8e-3}),
    "speed run, 16e-3": Variant(WSD | {"learning_rate": 16e-3}),
    "speed run, 8e-3, masks fall": Variant(
        WSD | {"learning_rate": 8e-3, "mlm_probability": 0.3, "final_mlm_probability": 0.1}
    ),
    "stable, all [MASK]": Variant({"schedule": "constant"} | ALL_MASK),
    "linear decay, all [MASK]": decay("stable, all [MASK]", decay_shape="linear", **ALL_MASK),
    "20%, 80/10/10": decay("stable, all [MASK]", decay_shape="linear"),
    "10%, 80/10/10": decay("stable, all [MASK]", 2, decay_shape="linear"),
    "5%, 80/10/10": decay("stable, all [MASK]", 1, decay_shape="linear"),
}
TITLES = {
    "paper": "as in the paper: all [MASK], AdamW at 2e-3, cosine",
    "AdamW": "the same with 80/10/10",
    "cosine": "80/10/10, Muon at 4e-3, cosine",
    "cosine, 8e-3": "the same at 8e-3, which is `small.yaml`",
    "cosine, 16e-3": "the same at 16e-3",
    "linear, 8e-3": "the same at 8e-3, from the peak to 0 linearly",
    "all [MASK], 8e-3": "the same at 8e-3, a cosine, all [MASK]",
    "stable": "80/10/10, Muon at 4e-3, stable",
    "mean of 5": "the mean of its checkpoints of the last 20%",
    "mean of 9": "the mean of its checkpoints of the last 40%",
    "decay": "its last 20% decay by 1 - sqrt",
    "linear decay": "its last 20% decay linearly",
    "longer linear decay": "its last 40% decay linearly",
    "linear decay, fewer masks": "its last 20% decay linearly, with masks from 20% to 5% in it",
    "linear decay, edited text": "the same decay on edited text",
    "stable, 2e-3": "80/10/10, Muon at 2e-3, stable",
    "linear decay, 2e-3": "its last 20% decay linearly",
    "longer linear decay, 2e-3": "its last 40% decay linearly",
    "speed run": "stable and linear decay in one run",
    "speed run, 8e-3": "stable at 8e-3 and linear decay in one run, which is `speed_run.yaml`",
    "speed run, 16e-3": "the same at 16e-3",
    "speed run, 8e-3, masks fall": "stable at 8e-3 and linear decay in one run, masks from 30% to 10% throughout",
    "stable, all [MASK]": "all [MASK], Muon at 4e-3, stable",
    "linear decay, all [MASK]": "its last 20% decay linearly",
    "20%, 80/10/10": "the same, with 80/10/10 in it",
    "10%, 80/10/10": "with 80/10/10 in a decay of 10%",
    "5%, 80/10/10": "with 80/10/10 in a decay of 5%",
}
# The row that others are compared with, seed by seed.
BASE = "cosine"
# Held-out losses, and the token of a text where each ends.
LOSSES = {"loss": 256, "loss_257_to_512": 512, "loss_513_to_1024": 1024}
# Labelled sentences for the fine-tuning on tags, and the steps on pairs of FOLDOC of the embedding run.
TAGGED, PAIR_STEPS = (100, 3000), 150
SPEED_RUN = (
    ("2026-11-29", "5.808", "`small.yaml` with `--max_steps 480`: a cosine"),
    ("2026-11-29", "5.504", "a stable rate, and a linear decay over the last fifth"),
    ("2026-11-29", "5.461", "Muon takes query, key, value, gate and input each as a matrix"),
    ("2026-11-29", "5.556", "the same as one command; it read other documents"),
    ("2026-11-30", "5.478", "first text again, as two commands; other vocabulary (a cosine at 8e-3: 5.475)"),
    ("2026-11-30", "5.266", "twice the peak of the rate, as one command (two other seeds: 5.351, 5.312)"),
)

HOUR_RUN = (
    ("2026-12-01", "4.320", "the paper's way, for comparison: all [MASK], AdamW, a cosine (80/10/10: 4.310)"),
    ("2026-11-30", "3.798", "80/10/10, and Muon at 4e-3"),
    ("2026-11-30", "3.581", "twice the peak of the rate (another seed: 3.560)"),
)


@dataclass(kw_only=True)
class RecipeSettings(Settings):
    data: str = field(default="data/benchmark", metadata={"help": "folder that data.py wrote", "path": True})
    output_dir: str = field(default="runs/recipe", metadata={"help": "prepared text, and runs"})
    bf16: bool = field(default=False, metadata={"help": "train in bfloat16 autocast"})
    steps: int = field(default=480, metadata={"help": "of 2,048 tokens, of each whole run; a multiple of 20"})
    seeds: int = field(default=1, metadata={"help": "runs of each kind"})
    runs: list[str] = field(default_factory=lambda: [*RUNS], metadata={"help": "kinds of runs"})
    tuned: list[str] = field(
        default_factory=list, metadata={"help": "kinds that are also fine-tuned on tags and on pairs, seed 0"}
    )


def prepare(data: Path, output: Path) -> None:
    """Windows of 256 tokens to train on, also of edited text, and held-out documents of up to 1,024."""
    text, edited = data / "text", output / "edited.parquet"
    if not edited.exists():
        output.mkdir(parents=True, exist_ok=True)
        rows = Dataset.from_parquet(f"{text}/train.parquet")
        rows.filter(lambda row: row["source"] in EDITED).to_parquet(edited)
    for name, source, options in (
        ("train", f"{text}/train.parquet", {"max_length": 256, "long_documents": "split"}),
        ("train_edited", str(edited), {"max_length": 256, "long_documents": "split"}),
        ("validation_long", f"{text}/validation.parquet", {"max_length": 1024}),
    ):
        common = {"tokenizer": TOKENIZER, "output_dir": output / name, "documents_per_shard": 1000}
        prepare_data(source=source, **common, **options)


def train(name: str, seed: int, settings: RecipeSettings) -> Path:
    """Train, or average, unless this has been done, and return the model's folder."""
    variant, output = RUNS[name], Path(settings.output_dir)

    def folder_of(name: str) -> Path:
        return output / f"{settings.steps} steps" / f"{name}, seed {seed}".replace("/", " ")

    def checkpoint(part: int) -> Path:
        return folder_of(variant.start) / f"checkpoint-{settings.steps * part // PARTS}"

    if variant.start and not all(checkpoint(part).exists() for part in variant.averaged or (variant.after,)):
        train(variant.start, seed, settings)
    if variant.averaged:
        shutil.rmtree(folder_of(name), ignore_errors=True)
        models = [str(checkpoint(part)) for part in variant.averaged]
        return average(models=models, output=str(folder_of(name))).model
    own = variant.settings | {"train_data": output / "data" / variant.settings.get("train_data", "train")}
    if variant.start:
        # Another order than from the beginning, or the stage would read the first documents again.
        own |= {"init_from": checkpoint(variant.after), "seed": seed + 100}
    common = {"config": ROOT / "configs/pretrain/small.yaml", "output_dir": folder_of(name), "seed": seed}
    common |= {"max_steps": settings.steps * (PARTS - variant.after) // PARTS, "save_steps": settings.steps // PARTS}
    common |= {"learning_rate": RATE, "save_total_limit": 9, "use_cpu": True, "bf16": settings.bf16}
    quiet = {"report_to": "none", "disable_tqdm": True, "validation_data": None, "eval_strategy": "no"}
    return pretrain(**common | quiet | own).model


@torch.no_grad()
def states(model: NeoBERTForMaskedLM, rows: list[list[int]]) -> list[np.ndarray]:
    """The last hidden states (length, width) of each row of token ids; none of the tokens is masked."""
    join, found = DataCollatorWithFlattening(return_position_ids=False, return_flash_attn_kwargs=True), []
    for first in range(0, len(rows), 100):
        some = rows[first : first + 100]
        inputs = join([{"input_ids": ids} for ids in some], return_tensors="pt")
        del inputs["labels"]
        found += model.model(**inputs).last_hidden_state[0].split([len(ids) for ids in some])
    return [each.numpy() for each in found]


def probe(train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]) -> float:
    """The accuracy in percent of a linear classifier on states that stay as they are."""
    return 100 * float(make_pipeline(StandardScaler(), RidgeClassifier()).fit(*train).score(*test))


tags_of = cache(read_parts)


def first(rows: Dataset, count: int) -> Dataset:
    return rows.take(min(count, len(rows)))


def probe_tags(model: NeoBERTForMaskedLM, data: Path) -> float:
    parts, tokenizer, read = tags_of(data), AutoTokenizer.from_pretrained(TOKENIZER), []
    for name, count in (("train", 300), ("test", 1000)):
        rows = [encode(row, tokenizer) for row in first(parts[name], count)]
        labels = np.concatenate([row["labels"] for row in rows])
        found = np.concatenate(states(model, [row["input_ids"] for row in rows]))
        read.append((found[labels != -100], labels[labels != -100]))
    return probe(*read)


def probe_sections(model: NeoBERTForMaskedLM, data: Path) -> float:
    tokenizer, read = AutoTokenizer.from_pretrained(TOKENIZER), []
    for name in ("train", "validation"):
        rows = Dataset.from_parquet(str(data / f"classification_debian_sections/{name}.parquet")).shuffle(seed=0)
        rows = first(rows, 3000 if name == "train" else 2000)
        found = states(model, tokenizer(list(rows["sentence"]))["input_ids"])
        read.append((np.stack([each.mean(0) for each in found]), np.array(rows["label"])))
    return probe(*read)


def judge(folder: Path, settings: RecipeSettings) -> dict[str, float]:
    """All numbers of a model that need no fine-tuning."""
    model = NeoBERTForMaskedLM.from_pretrained(folder, dtype=torch.float32).eval()
    data = Path(settings.data)
    found = {"tags": probe_tags(model, data), "sections": probe_sections(model, data)}
    held_out, tokenizer = Path(settings.output_dir) / "data/validation_long", AutoTokenizer.from_pretrained(TOKENIZER)
    return found | dict(zip(LOSSES, losses_by_place(model, tokenizer, held_out, LOSSES.values())))


def embed(start: Path, name: str, settings: RecipeSettings) -> float:
    """nDCG@10 of the search in FOLDOC after some steps on its pairs."""
    data, output = Path(settings.data), Path(settings.output_dir, f"{settings.steps} steps", f"{name}, pairs")
    pairs = {"pairs": data / "pairs/foldoc.parquet", "query": "query", "positive": "positive"}
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "eval_strategy": "no"}
    common = {"config": ROOT / "configs/embeddings/small.yaml", "datasets": None, "max_steps": PAIR_STEPS}
    folder = finetune_embeddings(model=start, output_dir=output, **pairs, **common, **quiet).model
    rows = Dataset.from_parquet(str(data / "retrieval_foldoc_test.parquet"))
    test, model = Retrieval(rows["query"][:], rows["document"][:]), SentenceTransformer(str(folder), device="cpu")
    return float(test.ndcg(model.encode_query(test.queries) @ model.encode_document(test.documents).T).mean())


def measure(settings: RecipeSettings) -> dict:
    """By steps, run and seed, what `judge` finds; and of some runs what is right after fine-tuning."""
    disable_progress_bars()
    data, kept = Path(settings.data), StoredRuns(Path(settings.results) / "single_runs" / "recipe.json")
    prepare(data, Path(settings.output_dir) / "data")

    def run(name: str, seed: int) -> dict[str, float]:
        return judge(train(name, seed, settings), settings)

    def tune(name: str) -> dict[str, float]:
        start, parts = train(name, 0, settings), tags_of(data)
        found = {"FOLDOC": embed(start, name, settings)}
        for rows in TAGGED:
            tried = [fine_tune(start, True, parts, rows, rate, 0) for rate in RATES]
            found[f"{rows:,} sentences"] = 100 * max(tried, key=lambda scores: scores["development"])["test"]
        return found

    for name, seed in ((name, seed) for seed in range(settings.seeds) for name in settings.runs):
        key = f"{settings.steps} steps; seed {seed}; {name}"
        print(key, kept.result(key, partial(run, name, seed)), flush=True)
    for name in settings.tuned:
        key = f"{settings.steps} steps; tuned; {name}"
        print(key, kept.result(key, partial(tune, name)), flush=True)
    found: dict[str, dict] = {"runs": {}, "tuned": {}}
    for key in kept.runs:
        steps, which, name = key.split("; ")
        part = found["tuned" if which == "tuned" else "runs"].setdefault(steps.split()[0], {})
        if which == "tuned":
            part[name] = kept.result(key, dict)
        else:
            part.setdefault(name, {})[which.split()[1]] = kept.result(key, dict)
    return {**found, "places": kept.places()}


def row_of(own: dict[str, dict], base: dict[str, dict]) -> list[str]:
    """The held-out losses of a run, what they differ by from `base`, seed by seed, and the means of the rest."""
    pairs = [(own[seed]["loss"], base[seed]["loss"]) for seed in own if seed in base]
    change = difference(*zip(*pairs), 3) if len(pairs) > 1 else "".join(f"{one - two:+.3f}" for one, two in pairs)
    keys = ("loss_513_to_1024", "tags", "sections")
    far, *probes = [statistics.fmean(run[key] for run in own.values()) for key in keys]
    losses = ", ".join(f"{own[seed]['loss']:.3f}" for seed in sorted(own))
    return [losses, "-" if own is base else change, f"{far:.3f}", *(f"{share:.1f}" for share in probes)]


def tagged(scores: dict[str, float], rows: int) -> str:
    share = scores.get(f"{rows:,} sentences")
    return "not run" if share is None else f"{share:.1f}"


def tables_of(steps: str, found: dict) -> list[str]:
    """What runs of so many steps learned, and what those that were fine-tuned can do."""
    runs, tuned = found["runs"][steps], found["tuned"].get(steps, {})
    columns = ["nats of each seed", "difference", "nats of tokens 513 to 1,024", "tags", "sections"]
    rows = [[TITLES[name], *row_of(runs[name], runs.get(BASE, {}))] for name in TITLES if name in runs]
    paragraphs = [f"## {int(steps):,} steps, {int(steps) * 2048 / 1e6:.1f} million tokens", table(["", *columns], rows)]
    if tuned:
        heads = ["FOLDOC, nDCG@10", *(f"tags, {rows:,} sentences" for rows in TAGGED)]
        cells = [
            [TITLES[name], f"{scores['FOLDOC']:.3f}", *(tagged(scores, rows) for rows in TAGGED)]
            for name, scores in ((name, tuned[name]) for name in TITLES if name in tuned)
        ]
        rates = ", ".join(f"{rate:g}" for rate in RATES)
        paragraphs += [
            f"Seed 0, fine-tuned on tags as in [worth](worth.md), at the rate of {rates} that is best on other "
            f"sentences, and {PAIR_STEPS} steps on the pairs of FOLDOC, in whose test it then searches:",
            table(["", *heads], cells),
        ]
    return paragraphs


def page(found: dict) -> list[str]:
    return [
        "# With a million tokens a stable rate with a decay is best, with sixteen a cosine; both at twice the old peak",
        "`configs/pretrain/small.yaml`, 3.4 million parameters, steps of 2,048 tokens; a million tokens take three to "
        "four minutes of a core, sixteen an hour. A seed decides the initial weights, the order and the masks, and is "
        "the same for all rows. Decays go on from a checkpoint of the stable run above them, with another order of the "
        "text. Nothing here says what happens at the published size.",
        "The loss is in nats of a masked token of held-out texts, 20% of which are masked, all by [MASK], whatever the "
        "training had: of the first 256 tokens, the length of the training, and beside it of tokens 513 to 1,024. "
        "`difference` is that to the cosine of 80/10/10 and Muon at 4e-3, which `small.yaml` had until 2026-11-30; "
        "negative ones are better. Over several seeds it has its 95% interval; one seed has none, and a tenth of a nat "
        "may be chance. `tags` and `sections` are means over the seeds of linear classifiers on last states that stay "
        "as they are, in percent: parts of speech (300 sentences to learn from) and 41 sections of Debian (3,000 "
        "descriptions).",
        *(paragraph for steps in sorted(found["runs"], key=int) for paragraph in tables_of(steps, found)),
        "If [MASK] replaces every token to predict, no loss depends on the last states of visible tokens. With a "
        "million tokens and all else the same (`stable`), FOLDOC is 0.068 behind such masks and 0.156 behind 80/10/10. "
        "After an hour with AdamW at 2e-3 it is 0.104 and 0.194, and the probe of sections 46.7 and 51.8, at the same "
        "loss. After an hour with Muon at 8e-3 nothing of it is left: 0.468, and 0.470 and 0.468 (seed 1). So of what "
        "the paper's way lacks in this search the masks are the smaller part, and the optimizer with its rate, whose "
        "loss is 0.73 higher, is the larger one ([log](../NOTES.md)).",
        "The cosine of 8,000 steps at 8e-3 is `benchmarks/models/small`. Over five seeds it tags 89.4% of the words "
        "right after 100 sentences and 96.3% after 3,000; words alone 86.2 and 95.7%, BERT 78.7 and 91.3% "
        "([worth](worth.md)).",
        "## The speed run: the lowest loss with a million tokens, and in an hour",
        "One command, two to four minutes of a core. The newest entry is `configs/pretrain/speed_run.yaml`: "
        "`neobert-hf pretrain --config pretrain/speed_run.yaml --use_cpu true --bf16 true --train_data "
        "data/yours/train --validation_data data/yours/validation`.",
        table(["", "nats", "what changed"], SPEED_RUN),
        "With sixteen million tokens, an hour of a core, the newest entry is `small.yaml`:",
        table(["", "nats", "what changed"], HOUR_RUN),
        f"The single runs are of {found['places']}.",
    ]


def main(args: list[str] | None = None) -> None:
    packages = ("accelerate", "datasets", "sentence-transformers")
    run_benchmark("recipe", measure, page, None, packages, RecipeSettings, args)


if __name__ == "__main__":
    main()
