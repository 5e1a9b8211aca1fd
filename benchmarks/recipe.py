"""What each step of a newer way to pretrain is worth to a small model, and what few steps of BERT's masks mend.

    python benchmarks/data.py --output_dir data/benchmark
    python benchmarks/recipe.py --bf16 true            # an hour of a CPU core; without AVX512-BF16 leave --bf16 out

Every run is the recipe `pretrain` with `configs/pretrain/small.yaml` and the settings in `RUNS`. Runs of a seed have
the same initial weights, text, order and masks. A stage goes on from a checkpoint of another run. An interrupted
command goes on when it is run again: what was measured is in results/single_runs/recipe.json.
"""

import shutil
import statistics
import time
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, disable_progress_bars
from runner import ROOT, Settings, StoredRuns, difference, run_benchmark, table
from sklearn.linear_model import RidgeClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch.nn import functional as F
from transformers import AutoTokenizer, DataCollatorWithFlattening
from worth import encode, fine_tune, read_parts

from neobert_hf.data import prepare_data
from neobert_hf.data.batches import HeldOutBatchSampler
from neobert_hf.data.collator import MLMCollator
from neobert_hf.data.documents import PreparedDocuments
from neobert_hf.hub.averaging import average
from neobert_hf.modeling_neobert import NeoBERTForMaskedLM
from neobert_hf.pretraining import pretrain


TOKENIZER = ROOT / "benchmarks/models/small"
# Steps of 2,048 tokens, and those of a decay.
STEPS, DECAY = 480, 96
ALL_MASK = {"mask_replace_prob": 1.0, "random_replace_prob": 0.0}
BERT_MASKS = {"mask_replace_prob": 0.8, "random_replace_prob": 0.1}
PAPER = ALL_MASK | {"optimizer": "adamw", "learning_rate": 2e-3}
# Sources whose text was edited: of this corpus those that are neither generated nor lists.
EDITED = ("python-docs", "state-of-the-union", "brown-corpus", "moby-dick", "debian-docs")


@dataclass(frozen=True)
class Variant:
    """A run: its settings; the run that it goes on from and after how many steps; checkpoints that are averaged."""

    settings: dict[str, Any] = field(default_factory=dict)
    start: str | None = None
    after: int = 0
    averaged: tuple[int, ...] = ()


def decay(start: str, steps: int = DECAY, **settings: Any) -> Variant:
    """The last steps of a run, in which the rate falls to 0."""
    course = {"schedule": "wsd", "decay_steps": 1.0, "warmup_steps": 0, "max_steps": steps, "continue_optimizer": True}
    return Variant(course | settings, start, STEPS - steps)


STABLE = {"schedule": "constant", "save_steps": 24, "save_total_limit": 9}
# The run that decays go on from.
TRUNK = "before the decay"
RUNS = {
    TRUNK: Variant({"schedule": "constant", "max_steps": STEPS - DECAY, "save_steps": STEPS - DECAY}),
    "paper": Variant(PAPER),
    "cosine": Variant(),
    "cosine, 8e-3": Variant({"learning_rate": 8e-3}),
    "stable": Variant(STABLE),
    "mean of 5": Variant(start="stable", averaged=(384, 408, 432, 456, 480)),
    "mean of 9": Variant(start="stable", averaged=tuple(range(288, 481, 24))),
    "decay": decay(TRUNK),
    "linear decay": decay(TRUNK, decay_shape="linear"),
    "linear decay, fewer masks": decay(TRUNK, decay_shape="linear", final_mlm_probability=0.05),
    "linear decay, edited text": decay(TRUNK, decay_shape="linear", train_data="train_edited"),
    "stable, all [MASK]": Variant(STABLE | ALL_MASK),
    "decay, all [MASK]": decay("stable, all [MASK]", **ALL_MASK),
    "decay of 20%, 80/10/10": decay("stable, all [MASK]"),
    "decay of 10%, 80/10/10": decay("stable, all [MASK]", STEPS // 10),
    "decay of 5%, 80/10/10": decay("stable, all [MASK]", STEPS // 20),
}
# What is compared over several seeds, and the starts whose tags are fine-tuned, as worth.py does.
DECISIVE = ("cosine", "linear decay")
TUNED = ("decay", "decay, all [MASK]", "decay of 20%, 80/10/10")
TAGGED, RATE_OF_TAGS = (100, 3000), 1e-3
# The rows of projections are from before Muon always took them apart.
WHOLE_MATRICES = (
    "In the rows with 'Muon by projection' it took query, key, value, gate and input each as a matrix, in the others "
    "the fused matrices whole. It always takes them apart now, since it gained in all four pairs of runs and cost no "
    "time, though three seeds that gain so differently leave an interval with 0 in it."
)
TITLES = {
    "paper": "as in the paper: all [MASK], AdamW at 2e-3, cosine",
    "cosine": "`small.yaml` of today: 80/10/10, Muon at 4e-3, cosine",
    "cosine, 8e-3": "cosine, a peak of 8e-3",
    "cosine, projections": "cosine, Muon by projection",
    "stable": "stable, no decay",
    "mean of 5": "stable, the mean of 5 checkpoints of the last 20%",
    "mean of 9": "stable, the mean of 9 checkpoints of the last 40%",
    "decay": "stable, decay of 1 - sqrt",
    "linear decay": "stable, linear decay",
    "linear decay, fewer masks": "stable, linear decay, masks from 20% to 5% in it",
    "linear decay, edited text": "stable, linear decay on edited text",
    "linear decay, projections": "stable, linear decay, Muon by projection",
}
MASKS = {
    "decay": "80/10/10 from the first step on",
    "stable, all [MASK]": "all [MASK], no decay",
    "decay, all [MASK]": "all [MASK]",
    "decay of 20%, 80/10/10": "all [MASK], then 80/10/10 for 20%",
    "decay of 10%, 80/10/10": "all [MASK], then 80/10/10 for 10%",
    "decay of 5%, 80/10/10": "all [MASK], then 80/10/10 for 5%",
}


# The row that others are compared with, since it has most seeds.
BASE = "linear decay"
SPEED_RUN = (
    ("2026-11-29", "cosine", "`small.yaml` with `--max_steps 480`: a cosine"),
    ("2026-11-29", "linear decay", "a stable rate, and a linear decay over the last fifth"),
    ("2026-11-29", "linear decay, projections", "Muon takes query, key, value, gate and input each as a matrix"),
)


@dataclass(kw_only=True)
class RecipeSettings(Settings):
    data: str = field(
        default="data/benchmark",
        metadata={"help": "folder with text/, pos_brown/ and classification_debian_sections/", "path": True},
    )
    output_dir: str = field(default="runs/recipe", metadata={"help": "prepared text, and runs"})
    bf16: bool = field(default=False, metadata={"help": "train in bfloat16 autocast"})


def prepare(text: str, data: Path) -> None:
    """Windows of 256 tokens to train on, also of edited text, and held-out documents of up to 1,024."""
    edited = data / "edited.parquet"
    if not edited.exists():
        data.mkdir(parents=True, exist_ok=True)
        rows = Dataset.from_parquet(f"{text}/train.parquet")
        rows.filter(lambda row: row["source"] in EDITED).to_parquet(edited)
    for name, source, options in (
        ("train", f"{text}/train.parquet", {"max_length": 256, "long_documents": "split"}),
        ("train_edited", str(edited), {"max_length": 256, "long_documents": "split"}),
        ("validation_long", f"{text}/validation.parquet", {"max_length": 1024}),
    ):
        common = {"tokenizer": TOKENIZER, "output_dir": data / name, "documents_per_shard": 1000}
        prepare_data(source=source, **common, **options)


def folder_of(name: str, seed: int, output: Path) -> Path:
    return output / f"{name}, seed {seed}".replace("/", " ")


def train(folder: Path, variant: Variant, seed: int, output: Path, bf16: bool) -> Path:
    """Train, or average, unless this has been done, and return the model's folder."""
    start = variant.start and folder_of(variant.start, seed, output)
    steps = variant.averaged or (variant.after,)
    if start and not all((start / f"checkpoint-{step}").exists() for step in steps):
        train(start, RUNS[variant.start], seed, output, bf16)
    if variant.averaged:
        shutil.rmtree(folder, ignore_errors=True)
        return average(models=[str(start / f"checkpoint-{step}") for step in steps], output=str(folder)).model
    own = variant.settings | {"train_data": output / "data" / variant.settings.get("train_data", "train")}
    if start:
        # Another order than from the beginning, or the stage would read the first documents again.
        own |= {"init_from": start / f"checkpoint-{variant.after}", "seed": seed + 100}
    common = {"config": ROOT / "configs/pretrain/small.yaml", "output_dir": folder, "seed": seed, "max_steps": STEPS}
    common |= {"use_cpu": True, "bf16": bf16, "eval_strategy": "no", "save_steps": STEPS, "report_to": "none"}
    quiet = {"disable_tqdm": True, "validation_data": None}
    return pretrain(**common | quiet | own).model


@torch.no_grad()
def held_out_losses(model: NeoBERTForMaskedLM, folder: Path) -> dict[str, float]:
    """Nats of a masked token, by its place in the text; 20% are masked and all are [MASK], whatever the training."""
    model.config.sparse_prediction = True
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    documents, collator = PreparedDocuments([str(folder)], 1024), MLMCollator(tokenizer)
    losses, places = [], []
    for keys in HeldOutBatchSampler(documents, 4096, 0, 1):
        inputs = collator(documents.__getitems__(keys))
        labelled = inputs["labels"][0] != -100
        logits = model(**inputs).logits
        losses.append(F.cross_entropy(logits.float(), inputs["labels"][0][labelled], reduction="none"))
        lengths = inputs["cu_seq_lens_q"].diff().tolist()
        places.append(torch.cat([torch.arange(length) for length in lengths])[labelled])
    losses, places = torch.cat(losses).double(), torch.cat(places)
    ends = {"loss": (0, 256), "loss_257_to_512": (256, 512), "loss_513_to_1024": (512, 1024)}
    return {name: float(losses[(low <= places) & (places < high)].mean()) for name, (low, high) in ends.items()}


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
    probes = {"tags": probe_tags(model, data), "sections": probe_sections(model, data)}
    return probes | held_out_losses(model, Path(settings.output_dir) / "data/validation_long")


JUDGED = [name for name in RUNS if name != TRUNK]


def measure(settings: RecipeSettings) -> dict:
    """By run and seed, what `judge` finds; and by start and number of sentences, the tags that are right."""
    disable_progress_bars()
    output = Path(settings.output_dir)
    found, tuned = ({name: {} for name in names} for names in (JUDGED, TUNED))
    runs = StoredRuns(Path(settings.results) / "single_runs" / "recipe.json")
    prepare(str(Path(settings.data) / "text"), output / "data")

    def run(name: str, seed: int) -> dict[str, float]:
        start = time.process_time()
        model = train(folder_of(name, seed, output), RUNS[name], seed, output, settings.bf16)
        seconds = time.process_time() - start
        return {"core_seconds": seconds, **judge(model, settings)}

    def tag(name: str, rows: int) -> dict[str, float]:
        start = train(folder_of(name, 0, output), RUNS[name], 0, output, settings.bf16)
        return fine_tune(start, True, tags_of(Path(settings.data)), rows, RATE_OF_TAGS, 0)

    for seed, name in [(0, name) for name in JUDGED] + [(seed, name) for seed in (1, 2) for name in DECISIVE]:
        key = f"{name}; {STEPS} and {DECAY} steps; seed {seed}"
        found[name][str(seed)] = runs.result(key, partial(run, name, seed))
        print(key, found[name][str(seed)], flush=True)
    for rows, name in product(TAGGED, TUNED):
        key = f"{name}; {STEPS} and {DECAY} steps; {rows} sentences"
        tuned[name][str(rows)] = 100 * runs.result(key, partial(tag, name, rows))["test"]
        print(key, tuned[name], flush=True)
    return {"runs": found, "tags": tuned, "places": runs.places()}


def row_of(name: str, runs: dict[str, dict]) -> list[str]:
    """The held-out losses of a run, what they differ by from `BASE`, seed by seed, and the means of the rest."""
    own, base = runs[name], runs[BASE]
    pairs = [(own[seed]["loss"], base[seed]["loss"]) for seed in own if seed in base]
    change = difference(*zip(*pairs), 3) if len(pairs) > 1 else f"{pairs[0][0] - pairs[0][1]:+.3f}"
    change = "-" if name == BASE else change
    keys = ("loss_513_to_1024", "tags", "sections")
    far, *probes = [statistics.fmean(run[key] for run in own.values()) for key in keys]
    losses = ", ".join(f"{run['loss']:.3f}" for run in own.values())
    return [losses, change, f"{far:.3f}", *(f"{share:.1f}" for share in probes)]


def page(found: dict) -> list[str]:
    runs, tags = found["runs"], found["tags"]
    columns = ["nats of each seed", f"against {TITLES[BASE]!r}", "nats of tokens 513 to 1,024", "tags", "sections"]
    steps = [[title, *row_of(name, runs)] for name, title in TITLES.items() if runs.get(name)]
    masks = []
    for name in (name for name in MASKS if runs.get(name)):
        shares = [f"{share:.1f}" if (share := tags.get(name, {}).get(str(rows))) else "" for rows in TAGGED]
        masks.append([MASKS[name], *row_of(name, runs), *shares])
    entries = [[day, f"{runs[name]['0']['loss']:.3f}", change] for day, name, change in SPEED_RUN if name in runs]
    return [
        "# With a million tokens a small model gains most from a rate that stays high and falls at the end",
        f"Each run reads {STEPS * 2048 / 1e6:.2f} million tokens, {STEPS} steps of 2,048, in two minutes of a core, "
        "with `configs/pretrain/small.yaml` (3.4 million parameters) and what the row says. A seed decides the initial "
        "weights, the order and the masks, and is the same for all rows. Decays go on from one run with another order, "
        f"and take {DECAY} of the steps. This is little: after an hour this model is at 3.19 nats. What gains here may "
        "lose there, and nothing here says what happens at the published size.",
        "The loss is in nats of a masked token of held-out texts. 20% of the tokens are masked, and all of these are "
        "[MASK], whatever the training had; it is of the first 256 tokens of a text, the length of the training, and "
        "beside it of tokens 513 to 1,024. Positive differences are worse; over several seeds they have their 95% "
        "interval, and those of one seed have none, and a "
        "tenth of a nat may be chance. The other columns are means over the seeds. The probes are linear "
        "classifiers on last states that stay as they are, in percent: parts of speech (300 sentences to learn from) "
        "and 41 sections of Debian (3,000 "
        "descriptions).",
        table(["", *columns], steps),
        *([WHOLE_MATRICES] if "linear decay, projections" in runs else []),
        "A stable rate was tried at 4e-3 alone, the peak that was found for the cosine with as many tokens, and AdamW "
        "at 2e-3 alone.",
        "## The speed run: the lowest loss with a million tokens",
        "The same model, text and held-out masks, seed 0. The newest entry is `configs/pretrain/speed_run.yaml`, but "
        "for the order of the text in its decay: `neobert-hf pretrain --config pretrain/speed_run.yaml --use_cpu true "
        "--bf16 true --train_data data/yours/train --validation_data data/yours/validation`.",
        table(["", "nats", "what changed"], entries),
        "## What few steps of BERT's masks mend",
        "If [MASK] replaces every token to predict, no loss depends on the last states of visible tokens. Here the "
        f"last 20%, 10% or 5% of {STEPS} steps, in which the rate falls to 0 by 1 - sqrt, have all [MASK] or BERT's "
        "80/10/10; one seed. A shorter decay alone costs some loss, too. The last columns are fine-tuned on 100 "
        f"and 3,000 sentences as in [worth](worth.md), at {RATE_OF_TAGS:g} alone; there words alone have 86.2 and "
        "95.7. A BERT was not pretrained with so few tokens.",
        table(["", *columns, *(f"tags, {rows:,} sentences" for rows in TAGGED)], masks),
        f"The single runs are of {found['places']}.",
    ]


def main(args: list[str] | None = None) -> None:
    run_benchmark("recipe", measure, page, None, ("accelerate", "datasets"), RecipeSettings, args)


if __name__ == "__main__":
    main()
