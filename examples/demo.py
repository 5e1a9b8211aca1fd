"""NeoBERT from raw text to search in a few minutes on a CPU, without a network.

    python examples/demo.py --config configs/demo.yaml

The text is what every Python installation carries: the language reference behind `help()` and the docstrings of the
standard library. Seven steps: text, tokenizer, tokens, pretraining, fill-mask, search, numbers. Steps 2 to 4 are the
commands of the full-size recipe; each is printed as it is run.
"""

import ast
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
import zlib
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pydoc_data.topics import topics


# Before torch is imported, here and in the commands. Threads that wait must not spin: with another busy process on the
# same 2 cores a training step takes 0.2 s so, and 0.8 to 2.4 s when they spin. On idle cores it costs a quarter (0.15 s
# instead of 0.12 s).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from sentence_transformers import SentenceTransformer
from transformers import pipeline

from neobert_hf.common.settings import parse_config
from neobert_hf.pretraining.shards import load_shards, load_tokenizer


EXAMPLES = Path(__file__).parent
SENTENCES = ["Returns [MASK] if the file exists, False otherwise.", "Return the number [MASK] items in the list."]
# Predicates find predicates. Pretraining alone groups texts by wording; meaning takes contrastive training on top.
QUERY = "Return True if the object is a string."


@dataclass
class DemoArguments:
    output_dir: str = field(metadata={"help": "where text, tokenizer, tokens, model and numbers go"})
    vocab_size: int = field(metadata={"help": "most entries that the tokenizer may have"})
    max_length: int = field(metadata={"help": "tokens a sequence; longer documents are cut into several"})
    pretraining: str = field(metadata={"help": "settings of examples/pretrain.py"})
    max_documents: int | None = field(default=None, metadata={"help": "use only so many documents; all if unset"})
    require_learning: bool = field(
        default=True, metadata={"help": "fail unless the model beats the unigram distribution on held-out text"}
    )


def read_documentation(max_documents: int | None) -> tuple[list[str], list[str]]:
    """Documents to train on and documents held out: paragraphs of the reference, and whole docstrings."""
    documents = [paragraph for topic in topics.values() for paragraph in re.split(r"\n\s*\n", topic)]
    library = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages"}
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for file in library.rglob("*.py"):
        if skipped.intersection(file.relative_to(library).parts):
            continue
        # Parsed, not imported: importing the library runs it (`import this`, `import antigravity`).
        nodes = ast.walk(ast.parse(file.read_bytes()))
        documents += [ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)]
    # Line breaks mean nothing to BERT's tokenizer; without them more duplicates are found.
    documents = {" ".join(document.split()) for document in documents}
    # crc32 is the same in every process, unlike hash(): the same documents are held out on every machine, and the first
    # `max_documents` of this order are a fair sample.
    numbered = sorted((zlib.crc32(document.encode()), document) for document in documents if len(document) >= 40)
    numbered = numbered[:max_documents]
    train = [document for number, document in numbered if number % 20]
    held_out = [document for number, document in numbered if number % 20 == 0]
    if not train or not held_out:
        raise ValueError(f"{len(numbered)} documents leave {len(held_out)} held out: raise `max_documents` above 100.")
    return train, held_out


def write_text(documents: list[str], file: Path) -> None:
    file.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents), encoding="utf-8")


def run(script: str, **flags) -> None:
    """A script of this folder, with its flags, as from a shell."""
    command = [sys.executable, str(EXAMPLES / script)]
    command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    print(f"   {shlex.join(['python', *command[1:]])}", flush=True)
    code = subprocess.run(command).returncode
    if code:
        sys.exit(code)


def unigram_entropy(train: Path, held_out: Path) -> float:
    """Loss in nats on held-out tokens of the best guess that ignores context, counted on the training tokens."""
    tokenizer = load_tokenizer(train)
    # [UNK] may stand in a text; the other four special tokens may not.
    special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    counts = []
    for folder in (train, held_out):
        ids = Counter(token for document in load_shards(folder) for token in document["input_ids"])
        counts.append(Counter({token: count for token, count in ids.items() if token not in special}))
    # Add-one smoothing: a token that the training text lacks would cost infinitely much.
    total = counts[0].total() + len(tokenizer) - len(special)
    return -sum(n * math.log((counts[0][token] + 1) / total) for token, n in counts[1].items()) / counts[1].total()


def fill_masks(folder: Path, sentences: list[str]) -> dict[str, list[str]]:
    fill = pipeline("fill-mask", model=str(folder))
    guesses = {}
    for sentence in sentences:
        guesses[sentence] = [f"{guess['token_str']} {guess['score']:.2f}" for guess in fill(sentence, top_k=5)]
        print(f"   {sentence:<60} {', '.join(guesses[sentence])}")
    return guesses


def search(folder: Path, query: str, documents: list[str]) -> list[str]:
    """The three documents whose mean hidden states point the way of the query's."""
    # To a folder that says nothing about pooling SentenceTransformer adds the mean, which is what we want.
    encoder = SentenceTransformer(str(folder))
    scores = encoder.similarity(encoder.encode([query]), encoder.encode(documents))[0]
    best = scores.topk(min(3, len(documents)))
    for score, index in zip(best.values.tolist(), best.indices.tolist()):
        print(f"   {score:.2f}  {documents[index][:100]}")
    return [documents[index] for index in best.indices.tolist()]


def main() -> None:
    (settings,) = parse_config(DemoArguments)
    started = time.time()
    output = Path(settings.output_dir)
    train, held_out, pretrained = output / "train", output / "held_out", output / "pretraining"
    numbers = {"settings": asdict(settings)}

    print("1. Text: the documentation inside Python")
    train_documents, held_out_documents = read_documentation(settings.max_documents)
    # A run of the demo starts anew: its tokenizer differs a little each time.
    for folder in (output / "tokenizer", train, held_out, pretrained):
        shutil.rmtree(folder, ignore_errors=True)
    output.mkdir(parents=True, exist_ok=True)
    for name, documents in (("train", train_documents), ("held_out", held_out_documents)):
        write_text(documents, output / f"{name}.jsonl")
    numbers["documents"] = {"train": len(train_documents), "held_out": len(held_out_documents)}
    print("   {train:,} documents to train on, {held_out:,} held out".format(**numbers["documents"]))

    print("2. Tokenizer: WordPiece, lower case")
    # Ties between equally frequent merges fall differently in each run: expect losses to differ by some hundredths of a
    # nat between runs, seeds or not.
    run(
        "train_tokenizer.py",
        source=output / "train.jsonl",
        vocab_size=settings.vocab_size,
        max_length=settings.max_length,
        output_dir=output / "tokenizer",
    )

    print("3. Tokens")
    for folder in (train, held_out):
        run(
            "prepare_data.py",
            source=folder.with_suffix(".jsonl"),
            tokenizer=output / "tokenizer",
            max_length=settings.max_length,
            long_documents="split",
            documents_per_shard=5000,
            output_dir=folder,
        )
    unigram = numbers["unigram_entropy"] = unigram_entropy(train, held_out)
    print(f"   unigram entropy of the held-out text: {unigram:.3f} nats")

    print("4. Pretraining: masked language modelling")
    run(
        "pretrain.py",
        config=settings.pretraining,
        train_data=train,
        validation_data=held_out,
        max_length=settings.max_length,
        output_dir=pretrained,
    )
    numbers["log"] = json.loads((pretrained / "log.json").read_text())
    losses = [entry["eval_loss"] for entry in numbers["log"] if "eval_loss" in entry]
    loss = numbers["held_out_loss"] = losses[-1]
    print(f"   held-out masked loss {loss:.3f} nats, unigram entropy {unigram:.3f}: {unigram - loss:.3f} below")

    print("5. Fill-mask")
    numbers["fill_mask"] = fill_masks(pretrained / "model", SENTENCES)

    print(f"6. Search for {QUERY!r} in held-out documents")
    numbers["search"] = search(pretrained / "model", QUERY, held_out_documents[:200])

    print("7. Numbers")
    numbers["seconds"] = round(time.time() - started, 1)
    (output / "numbers.json").write_text(json.dumps(numbers, indent=2) + "\n")
    print(f"   {output / 'numbers.json'}, {pretrained / 'curves.png'}; {numbers['seconds']:.0f} seconds in all")

    if settings.require_learning and loss >= unigram:
        sys.exit(
            f"The held-out loss ({loss:.3f} nats) is not below the unigram entropy ({unigram:.3f}): the model has "
            f"learnt nothing from context. Raise `max_steps` in {settings.pretraining}, or pass --no_require_learning "
            "if this is only a trial."
        )


if __name__ == "__main__":
    main()
