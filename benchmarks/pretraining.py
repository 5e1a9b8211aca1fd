"""What a small NeoBERT learns on a CPU: both stages, a BERT of the same size, and ablation pairs.

    python benchmarks/data.py --output_dir data/benchmark
    python benchmarks/pretraining.py --bf16 true       # three hours on 2 cores; without AVX512-BF16 leave --bf16 out

Every run is the recipe `pretrain` with a shipped configuration and a few settings; that of BERT is its code with
another model. After an interruption the same command goes on, and BERT's run begins anew.
"""

import json
import statistics
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from runner import BLUE, GREY, ORANGE, Settings, draw_lines, new_figure, run_apart, run_benchmark, table
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, PreTrainedTokenizerBase, set_seed
from transformers.modeling_outputs import MaskedLMOutput

from neobert_hf import NeoBERTConfig
from neobert_hf.common.files import write_json
from neobert_hf.common.settings import settings_of_keywords
from neobert_hf.data import prepare_data, train_tokenizer
from neobert_hf.data.batches import HeldOutBatchSampler
from neobert_hf.data.collator import MLMCollator
from neobert_hf.data.documents import PreparedDocuments
from neobert_hf.modeling_neobert import NeoBERTForMaskedLM
from neobert_hf.pretraining import pretrain
from neobert_hf.pretraining.data import read_data
from neobert_hf.pretraining.trainer import MLMTrainer
from neobert_hf.training.run import Run


# Further settings of every run, which a test sets.
TRIAL: dict[str, Any] = {}
# A model of 3 million parameters, trained on 1.2 million tokens and validated only at the end.
ABLATION = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 512,
    "decoder_init_range": 0.1,
    "embedding_init_range": 1.0,
    "tie_word_embeddings": False,
    "micro_batch_tokens": 2048,
    "global_batch_tokens": 2048,
    "mask_replace_prob": 1.0,
    "random_replace_prob": 0.0,
    "optimizer": "adamw",
    "learning_rate": 2e-3,
    "warmup_steps": 0.05,
    "max_steps": 600,
    "eval_strategy": "no",
    "save_steps": 600,
}
M1, PACKED, NAIVE = (
    "RoPE, SwiGLU, RMSNorm (M1)",
    "documents of 64 tokens, packed",
    "documents of 64 tokens, packed naively (M6)",
)
# What is special about each ablation, and the one that it is compared with.
ABLATIONS = {
    M1: ({}, M1),
    "learned absolute positions": ({"rope": False}, M1),
    "GELU": ({"hidden_act": "gelu"}, M1),
    "LayerNorm": ({"rms_norm": False}, M1),
    "all three (M0's architecture)": ({"rope": False, "hidden_act": "gelu", "rms_norm": False}, M1),
    PACKED: ({"max_length": 64}, PACKED),
    NAIVE: ({"layout": "naive"}, PACKED),
}
# Runs of each ablation.
SEEDS = 3
# The tokens of a text where the parts end whose losses are told apart, and the masks, which are those of small.yaml.
ENDS = (128, 256, 512, 1024)
MASKS = {"mask_replace_prob": 0.8, "random_replace_prob": 0.1}
# The best of a short search for BERT: the rate of Muon, and the deviation of initial weights.
BERT = {"learning_rate": 1e-3, "decoder_init_range": 0.05}


@dataclass(kw_only=True)
class PretrainingSettings(Settings):
    text: str = field(
        default="data/benchmark/text",
        metadata={"help": "folder with train.parquet and validation.parquet", "path": True},
    )
    output_dir: str = field(default="runs/pretraining_benchmark", metadata={"help": "data, runs and logs"})
    bf16: bool = field(default=False, metadata={"help": "train in bfloat16 autocast"})


def prepare(text: str, data: Path) -> None:
    """Make a vocabulary of 8,192 entries, and windows of 64, 256 and 1,024 tokens."""
    tokenizer, log, split = data / "tokenizer", data / "log.txt", {"long_documents": "split"}
    if not tokenizer.exists():
        run_apart(train_tokenizer, log, source=f"{text}/train.parquet", vocab_size=8192, output_dir=tokenizer)
    for name, part, options in (
        ("train", "train", {"max_length": 256, **split}),
        ("train_long", "train", {"max_length": 1024, **split}),
        ("train_short", "train", {"max_length": 64, **split}),
        ("validation", "validation", {"max_length": 1024}),
        ("validation_short", "validation", {"max_length": 64, "max_documents": 60, **split}),
    ):
        options |= {"source": f"{text}/{part}.parquet", "output_dir": data / name, "documents_per_shard": 1000}
        run_apart(prepare_data, log, tokenizer=tokenizer, **options)


class BertOfLabels(BertForMaskedLM):
    """BERT for the batches of NeoBERT's pretraining: packed documents, and a decoder on the labelled tokens only."""

    accepts_loss_kwargs = True

    def forward(self, input_ids, labels, cu_seq_lens_q, num_items_in_batch=None, **others):
        # BERT cannot tell packed documents apart, so each gets a row of its own.
        lengths = cu_seq_lens_q.diff().tolist()
        rows = pad_sequence(input_ids[0].split(lengths), batch_first=True)
        mask = pad_sequence([torch.ones(length) for length in lengths], batch_first=True)
        labels = pad_sequence(labels[0].split(lengths), batch_first=True, padding_value=-100)
        labelled = labels != -100
        logits = self.cls(self.bert(rows, mask).last_hidden_state[labelled])
        loss = F.cross_entropy(logits, labels[labelled], reduction="sum")
        return MaskedLMOutput(loss=loss / (num_items_in_batch or labelled.sum()), logits=logits)


def pretrain_bert(neobert: Path, given: dict[str, Any]) -> None:
    """Pretrain it in `output_dir`. An interrupted run begins anew.

    Args:
        neobert: model whose width, depth and vocabulary the BERT gets.
        given: settings of `pretrain`, for the NeoBERT. Their dropout and range of initial weights are the BERT's.
    """
    architecture, settings, arguments = settings_of_keywords(pretrain.kinds, given, "pretrain_bert")
    arguments.gradient_accumulation_steps = settings.accumulation_steps(arguments.world_size)
    data, shape = read_data(settings, arguments), NeoBERTConfig.from_pretrained(neobert)
    config = BertConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        intermediate_size=shape.intermediate_size,
        hidden_dropout_prob=architecture.dropout or 0.0,
        attention_probs_dropout_prob=architecture.dropout or 0.0,
        initializer_range=architecture.decoder_init_range or shape.decoder_init_range,
        pad_token_id=data.tokenizer.pad_token_id,
        attn_implementation="eager",
    )
    set_seed(arguments.seed)
    model, run = BertOfLabels(config), Run(Path(arguments.output_dir))
    trainer = MLMTrainer(model, arguments, data, run)
    trainer.train_to_the_end()
    # What is saved is a plain BERT.
    model.__class__ = BertForMaskedLM
    trainer.save_whole(run.folder / "model")
    write_json(run.folder / "log.json", trainer.state.log_history)


def train(
    folder: Path, settings: dict[str, Any], config: str = "small", bert_like: Path | None = None
) -> list[dict[str, float]]:
    """Train, unless this has been done, and return the held-out losses, with the tokens seen until each.

    Args:
        bert_like: a NeoBERT; what is trained is a BERT of its shape, with the threads of this process. A NeoBERT is
            trained on one.
    """
    own = {"config": f"pretrain/{config}.yaml", "output_dir": folder, "report_to": "none"}
    settings = own | settings | TRIAL
    if not (folder / "log.json").exists():
        if bert_like:
            pretrain_bert(bert_like, settings)
        else:
            run_apart(pretrain, folder.with_suffix(".txt"), 1, **settings)
    found, seen = [], 0
    for entry in json.loads((folder / "log.json").read_text()):
        seen = entry.get("tokens_seen", seen)
        if "eval_loss" in entry:
            found.append({"tokens": seen, "step": entry["step"], "eval_loss": entry["eval_loss"]})
    return found


@torch.no_grad()
def losses_by_place(
    model: NeoBERTForMaskedLM, tokenizer: PreTrainedTokenizerBase, text: Path, ends: Iterable[int], **masks: float
) -> list[float]:
    """Nats of a masked token of held-out texts, by its place: up to the first of `ends`, from there to the second, ...

    Args:
        masks: settings of the collator. Without any, 20% of the tokens are masked, all by [MASK].
    """
    model.config.sparse_prediction = True
    ends = list(ends)
    documents, collator = PreparedDocuments([str(text)], ends[-1]), MLMCollator(tokenizer, **masks)
    losses, places = [], []
    for keys in HeldOutBatchSampler(documents, 4096, 0, 1):
        inputs = collator(documents.__getitems__(keys))
        labelled = inputs["labels"][0] != -100
        logits = model(**inputs).logits
        losses.append(F.cross_entropy(logits.float(), inputs["labels"][0][labelled], reduction="none"))
        lengths = inputs["cu_seq_lens_q"].diff().tolist()
        places.append(torch.cat([torch.arange(length) for length in lengths])[labelled])
    losses, places = torch.cat(losses).double(), torch.cat(places)
    return [float(losses[(low <= places) & (places < high)].mean()) for low, high in zip([0, *ends], ends)]


def run_ablations(output: Path, common: dict[str, Any]) -> dict[str, list[float]]:
    """Held-out loss of each ablation and seed. Two runs are trained at a time, with one thread each."""
    data = output / "data"

    def final_loss(job: tuple[int, str]) -> float:
        seed, name = job
        special, other = ABLATIONS[name]
        short = "_short" if other == PACKED else ""
        text = {"train_data": data / f"train{short}", "validation_data": data / f"validation{short}"}
        folder = output / f"ablation_{list(ABLATIONS).index(name)}_{seed}"
        return train(folder, common | text | ABLATION | special | {"seed": seed})[-1]["eval_loss"]

    with ThreadPoolExecutor(2) as executor:
        losses = list(executor.map(final_loss, product(range(SEEDS), ABLATIONS)))
    return {name: losses[index :: len(ABLATIONS)] for index, name in enumerate(ABLATIONS)}


def measure(settings: PretrainingSettings) -> dict:
    output = Path(settings.output_dir)
    data = output / "data"
    prepare(settings.text, data)
    common = {"use_cpu": True, "bf16": settings.bf16}
    short = common | {"train_data": data / "train", "validation_data": data / "validation"}
    long = short | {"train_data": data / "train_long", "init_from": output / "stage_1"}
    stages = [train(output / "stage_1", short), train(output / "stage_2", long, config="small_long")]
    bert = train(output / "bert", short | BERT, bert_like=output / "stage_1/model")
    return {"stages": stages, "places": judge(output), "bert": bert, "ablations": run_ablations(output, common)}


def judge(output: Path) -> dict[str, list[float]]:
    """Held-out losses of both stages by the place in a text."""
    found, tokenizer = {}, AutoTokenizer.from_pretrained(output / "data/tokenizer")
    for name in ("stage_1", "stage_2"):
        model = NeoBERTForMaskedLM.from_pretrained(output / name / "model", dtype=torch.float32).eval()
        found[name] = losses_by_place(model, tokenizer, output / "data/validation", ENDS, **MASKS)
    return found


def place_table(found: dict) -> str:
    names = [f"{low + 1:,} to {high:,}" for low, high in zip([0, *ENDS], ENDS)]
    rows = [[name, *(f"{loss:.3f}" for loss in losses)] for name, *losses in zip(names, *found["places"].values())]
    course = found["stages"][1]
    rows.append(["all", f"{course[0]['eval_loss']:.3f}", f"{course[-1]['eval_loss']:.3f}"])
    return table(["tokens of the text", "stage 1", "stage 2"], rows)


def ablation_table(losses: dict[str, list[float]]) -> str:
    rows = []
    for name, (_, other) in ABLATIONS.items():
        differences = ", ".join(f"{value - base:+.3f}" for value, base in zip(losses[name], losses[other]))
        runs = ", ".join(f"{value:.3f}" for value in losses[name])
        rows.append([name, runs, f"{statistics.mean(losses[name]):.3f}", "-" if name == other else differences])
    return table(["", "held-out loss of each seed", "mean", f"against {M1!r}, or its packed pair"], rows)


def plot(found: dict) -> Figure:
    lines = {}
    for name, curve, color in (("NeoBERT", found["stages"][0], BLUE), ("BERT", found["bert"], ORANGE)):
        lines[name] = ([(entry["tokens"] / 1e6, entry["eval_loss"]) for entry in curve], color)
    unit = "Loss of held-out masked tokens, nats; same text, masks and size (3.4 million parameters)"
    figure, axes = new_figure("With 16 million tokens NeoBERT is 1.6 nats ahead of BERT", unit)
    draw_lines(axes, lines, "{:.2f}")
    axes.set_xlabel("million tokens of training", loc="left", color=GREY)
    return figure


def page(found: dict) -> list[str]:
    first, second = found["stages"]
    return [
        "# A small NeoBERT learns to fill masks in an hour on one core",
        "![Held-out loss against tokens of training](pretraining.png)",
        "`configs/pretrain/small.yaml`, 4 layers of 192 and 8,192 entries, reads "
        f"{first[-1]['tokens'] / 1e6:.1f} million tokens, up to 256 of a document. Then `small_long.yaml` reads "
        f"{second[-1]['tokens'] / 1e6:.1f} million, up to 1,024 of a document, from the mixture of 20% all "
        "documents, 40% of at least 256 tokens and 40% of at least 512. On the first 256 "
        f"tokens of held-out documents stage 1 ends at {first[-1]['eval_loss']:.3f} nats. Where both "
        "read 1,024 tokens, more than any text of stage 1 had, with the same masks:",
        place_table(found),
        "## Each part of the architecture",
        "Models of 3 million parameters after 600 steps of 2,048 tokens; the runs of a seed share order, masks and "
        "held-out text. Positive differences are worse.",
        ablation_table(found["ablations"]),
        "## Against BERT",
        "The curve of BERT is the same code with the best settings of a short search: Muon at 1e-3, and initial "
        f"weights with a deviation of 0.05. It ends at {found['bert'][-1]['eval_loss']:.3f} nats. It learns nothing "
        "but the frequency of words for longer, perhaps because of its learned positions, which also cost a NeoBERT "
        "0.6 nats above.",
        "The models of stage 1 and of BERT are `benchmarks/models/small` and `bert`.",
    ]


def main(args: list[str] | None = None) -> None:
    run_benchmark("pretraining", measure, page, plot, ("accelerate", "datasets"), PretrainingSettings, args)


if __name__ == "__main__":
    main()
