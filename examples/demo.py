"""A search by meaning in seconds, and then a model from raw text in five minutes: on a CPU, without a network.

    python examples/demo.py --config configs/demo.yaml

The text comes with every Python installation: the language reference behind `help()` and the docstrings of the standard
library. Steps 3 to 5 call the recipes of full size, and print the command that does the same.
"""

import json
import math
import os
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path


# Both must be set before the libraries are imported. Waiting threads sleep and do not spin: with another busy process
# on the same 2 cores a training step takes 0.2 s this way, and 0.8 to 2.4 s with spinning threads. On idle cores a step
# takes a quarter longer this way (0.15 s instead of 0.12 s).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if not sys.stderr.isatty():
    # In a file, a progress bar would fill thousands of lines.
    os.environ.setdefault("TQDM_DISABLE", "1")

from matplotlib.figure import Figure
from sentence_transformers import SentenceTransformer
from transformers import pipeline
from transformers.utils.logging import disable_progress_bar

from neobert_hf.common.files import write_json, write_png, write_text
from neobert_hf.common.recipe import Result
from neobert_hf.common.run import output_folder
from neobert_hf.common.settings import parse_config
from neobert_hf.data import prepare_data, train_tokenizer
from neobert_hf.data.documents import PreparedDocuments
from neobert_hf.data.sample_text import python_documentation
from neobert_hf.data.shards import prepared_tokenizer
from neobert_hf.data.sources import list_of
from neobert_hf.pretraining import pretrain
from neobert_hf_cli import short_errors


SENTENCES = ["Returns [MASK] if the file exists, False otherwise.", "Return the number [MASK] items in the list."]
# A pretrained model groups texts by their wording. Search by meaning needs a model that was trained for it.
EMBEDDING_MODEL = Path(__file__).parents[1] / "models" / "distilled"
QUERY = "how do I find out whether a file exists?"


@dataclass
class DemoArguments:
    output_dir: str = field(metadata={"help": "where text, tokenizer, tokens, model and numbers go", "path": True})
    vocab_size: int = field(metadata={"help": "maximum number of entries of the tokenizer"})
    max_length: int = field(metadata={"help": "tokens per sequence; longer documents are split into several sequences"})
    pretraining: str = field(metadata={"help": "settings of `pretrain`", "path": True})
    max_documents: int | None = field(default=None, metadata={"help": "use only this many documents; all if unset"})
    require_learning: bool = field(
        default=True, metadata={"help": "fail unless the model beats the unigram distribution on held-out text"}
    )


def call(recipe: Callable, **settings) -> Result:
    """Call a recipe, and print the command that does the same."""
    flags = [word for name, value in settings.items() for word in (f"--{name}", *map(str, list_of(value)))]
    print(f"   $ {shlex.join(['neobert-hf', recipe.__name__, *flags])}", flush=True)
    return recipe(**settings)


def unigram_entropy(train: Path, held_out: Path) -> float:
    """Loss in nats on the held-out tokens when each is guessed by its frequency in the training tokens."""
    tokenizer = prepared_tokenizer(train)
    # [UNK] can occur in a text; the other four special tokens cannot.
    special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    counts = []
    for folder in (train, held_out):
        ids = Counter(token for ids in PreparedDocuments([folder]) for token in ids.tolist())
        counts.append(Counter({token: count for token, count in ids.items() if token not in special}))
    # Add-one smoothing: without it, a token that the training text lacks would have an infinite loss.
    total = counts[0].total() + len(tokenizer) - len(special)
    return -sum(n * math.log((counts[0][token] + 1) / total) for token, n in counts[1].items()) / counts[1].total()


def plot_learning(log: list[dict], unigram: float, file: Path) -> None:
    """Draw the loss on held-out text as it falls below the best guess without context."""
    training = [(entry["step"], entry["loss"]) for entry in log if "loss" in entry]
    held_out = [(entry["step"], entry["eval_loss"]) for entry in log if "eval_loss" in entry]
    figure = Figure(figsize=(6, 3.7), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*training), label="training")
    axes.plot(*zip(*held_out), label="held out", marker="o", markersize=3)
    axes.axhline(unigram, label="best guess without context", linestyle="--", color="gray")
    axes.set(title="What the demo's model learnt", xlabel="step", ylabel="loss at masked tokens (nats)")
    axes.legend(fontsize="small")
    write_png(file, figure)


def check_learning(loss: float, unigram: float, pretraining: str) -> None:
    """End the demo with an error message unless the model beats the unigram distribution on held-out text."""
    if loss >= unigram:
        sys.exit(
            f"The held-out loss ({loss:.3f} nats) is not below the unigram entropy ({unigram:.3f}): the model has "
            f"learnt nothing from context. Raise `max_steps` in {pretraining}, or pass --no_require_learning if this "
            "is only a trial."
        )


def main(args: list[str] | None = None) -> None:
    (settings,) = parse_config(DemoArguments, args=args)
    if not sys.stderr.isatty():
        disable_progress_bar()
    writes = ("tokenizer", "train*", "held_out*", "pretraining", "numbers.json", "demo.png")
    with output_folder(settings.output_dir, "demo.py", writes, {"pretraining": settings.pretraining}):
        started, numbers = time.time(), {"settings": asdict(settings)}
        documents = python_documentation(settings.max_documents)
        print(f"1. Text: the documentation inside Python, {len(documents):,} documents")
        search(documents, numbers)
        learn(settings, numbers, documents)
        fill_gaps(settings, numbers)
        report(settings, numbers, time.time() - started)


def search(documents: list[str], numbers: dict) -> None:
    """Step 2: the embedding model that comes with the package searches by meaning."""
    print(f"2. Search for {QUERY!r} by meaning, with models/{EMBEDDING_MODEL.name}", flush=True)
    encoder, started = SentenceTransformer(str(EMBEDDING_MODEL)), time.time()
    scores = encoder.similarity(encoder.encode_query(QUERY), encoder.encode_document(documents))[0]
    best = scores.topk(min(3, len(documents)))
    numbers["search"] = [documents[number] for number in best.indices.tolist()]
    for score, document in zip(best.values.tolist(), numbers["search"]):
        print(f"   {score:.2f}  {' '.join(document.split())[:100]}")
    print(f"   found in {len(documents):,} documents, which took {time.time() - started:.0f} s to embed")


def learn(settings: DemoArguments, numbers: dict, documents: list[str]) -> None:
    """Steps 3 to 5, from text to a pretrained model."""
    output = Path(settings.output_dir)
    train, held_out, pretrained = output / "train", output / "held_out", output / "pretraining"
    held_out_documents = documents[::20]
    train_documents = [document for number, document in enumerate(documents) if number % 20]
    if len(held_out_documents) < 5:
        raise ValueError(f"{len(documents)} documents leave {len(held_out_documents)} held out: raise `max_documents`.")
    # Each run of the demo starts anew, because its tokenizer differs a little each time.
    for folder in (output / "tokenizer", train, held_out, pretrained):
        shutil.rmtree(folder, ignore_errors=True)
    output.mkdir(parents=True, exist_ok=True)
    for name, texts in (("train", train_documents), ("held_out", held_out_documents)):
        write_text(output / f"{name}.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
    numbers["documents"] = {"train": len(train_documents), "held_out": len(held_out_documents)}
    print("3. A tokenizer: pieces of words that are frequent in this text")
    # Ties between equally frequent merges are broken differently in each run, so losses differ by some hundredths of a
    # nat between runs, even with the same seed.
    common = {"max_length": settings.max_length}
    tokenizer = {"source": output / "train.jsonl", "vocab_size": settings.vocab_size} | common
    call(train_tokenizer, **tokenizer, output_dir=output / "tokenizer")

    print(f"4. Tokens: {len(train_documents):,} documents to train on and {len(held_out_documents):,} to measure on")
    common |= {"tokenizer": output / "tokenizer", "long_documents": "split", "documents_per_shard": 5000}
    for folder in (train, held_out):
        call(prepare_data, source=folder.with_suffix(".jsonl"), **common, output_dir=folder)
    unigram = numbers["unigram_entropy"] = unigram_entropy(train, held_out)

    print("5. Pretraining: a fifth of the tokens is masked, and the model guesses them; about 3 minutes")
    print(f"   the loss (nats a masked token) should fall well below {unigram:.2f}, the best guess without context")
    data = {"train_data": [train], "validation_data": [held_out], "max_length": settings.max_length}
    result = call(pretrain, config=settings.pretraining, **data, output_dir=pretrained)
    numbers["log"] = json.loads((pretrained / "log.json").read_text())
    numbers["held_out_loss"] = result.scores["loss"]
    print(f"   on held-out text: {result.scores['loss']:.2f} nats; best guess without context: {unigram:.2f}")


def fill_gaps(settings: DemoArguments, numbers: dict) -> None:
    """Step 6: the pretrained model predicts masked words."""
    model = Path(settings.output_dir, "pretraining", "model")
    print("6. What it has learnt: the five most likely words for each [MASK]")
    fill, numbers["fill_mask"] = pipeline("fill-mask", model=str(model)), {}
    for sentence in SENTENCES:
        guesses = [f"{guess['token_str']} {guess['score']:.2f}" for guess in fill(sentence, top_k=5)]
        numbers["fill_mask"][sentence] = guesses
        print(f"   {sentence:<60} {', '.join(guesses)}")


def report(settings: DemoArguments, numbers: dict, seconds: float) -> None:
    """Step 7: write the measured numbers and a picture, and say what to try next."""
    output = Path(settings.output_dir)
    model, index = output / "pretraining" / "model", output / "index"
    unigram = numbers["unigram_entropy"]
    print("7. Numbers and a picture")
    numbers["seconds"] = round(seconds, 1)
    write_json(output / "numbers.json", numbers)
    plot_learning(numbers["log"], unigram, output / "demo.png")
    print(f"   {output / 'numbers.json'}, {output / 'demo.png'}; {numbers['seconds']:.0f} seconds in all")
    if settings.require_learning:
        check_learning(numbers["held_out_loss"], unigram, settings.pretraining)
    source = output / "held_out.jsonl"
    print("Try next:")
    print(f"   neobert-hf doctor {model}")
    print(f"   neobert-hf index --index {index} --model {EMBEDDING_MODEL} --source {source}")
    print(f"   neobert-hf query --index {index} --text 'open a file for reading'")


if __name__ == "__main__":
    try:
        with short_errors("demo.py"):
            main()
    except KeyboardInterrupt:
        # What the training says of its checkpoint does not hold here.
        sys.exit("Stopped: the same command begins anew.")
