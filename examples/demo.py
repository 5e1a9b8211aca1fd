"""NeoBERT from raw text to search in a few minutes on a CPU, without a network.

    python examples/demo.py --config configs/demo.yaml

The text is what every Python installation carries: the language reference behind `help()` and the docstrings of the
standard library. Eight steps: text, tokenizer, tokens, pretraining, saving, fill-mask, search, plot.
"""

import ast
import json
import math
import os
import re
import shutil
import sys
import sysconfig
import time
import zlib
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pydoc_data.topics import topics


# Before torch is imported. Threads that wait must not spin: with another busy process on the same 2 cores a training
# step takes 0.2 s so, and 0.8 to 2.4 s when they spin. On idle cores it costs a quarter (0.15 s instead of 0.12 s).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from matplotlib.figure import Figure
from sentence_transformers import SentenceTransformer
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    pipeline,
    set_seed,
)

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM
from neobert_hf.arguments import parse_config


SENTENCES = ["Returns [MASK] if the file exists, False otherwise.", "Return the number [MASK] items in the list."]
# Predicates find predicates. Pretraining alone groups texts by wording; meaning takes contrastive training on top.
QUERY = "Return True if the object is a string."


@dataclass
class DemoArguments:
    output_dir: str = field(metadata={"help": "where the model, the plot and the numbers go"})
    vocab_size: int = field(metadata={"help": "most entries that the tokenizer may have"})
    max_length: int = field(metadata={"help": "tokens a sequence; longer documents are cut into several"})
    hidden_size: int = field(metadata={"help": "width of the model"})
    num_hidden_layers: int = field(metadata={"help": "encoder blocks"})
    num_attention_heads: int = field(metadata={"help": "must divide the width"})
    decoder_init_range: float = field(metadata={"help": "linear layers start uniform in +- this"})
    embedding_init_range: float = field(metadata={"help": "embeddings start uniform in +- this"})
    max_steps: int = field(metadata={"help": "training steps"})
    batch_size: int = field(metadata={"help": "sequences a step"})
    learning_rate: float = field(metadata={"help": "its peak, after 10%% of the steps"})
    seed: int = field(metadata={"help": "of the initial weights, the order of the data and the masks"})
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


def train_tokenizer(documents: list[str], vocab_size: int, max_length: int) -> BertTokenizer:
    """A lower-cased WordPiece tokenizer like bert-base-uncased's, with [PAD] at 0 and [MASK] at 4."""
    # An empty BertTokenizer brings normaliser, pre-tokenizer, [CLS] A [SEP] and the five special tokens; NeoBERT has no
    # token types. Ties between equally frequent merges fall differently in each run: expect losses to differ by some
    # hundredths of a nat between runs, seeds or not.
    untrained = BertTokenizer(model_max_length=max_length, model_input_names=["input_ids", "attention_mask"])
    return untrained.train_new_from_iterator([documents], vocab_size=vocab_size, show_progress=False)


def tokenize(tokenizer: BertTokenizer, documents: list[str]) -> list[dict]:
    """Sequences of at most `model_max_length` tokens; the special tokens, which are never masked, are marked."""
    encoded = tokenizer(documents, truncation=True, return_overflowing_tokens=True, return_special_tokens_mask=True)
    names = ("input_ids", "special_tokens_mask")
    return [dict(zip(names, sequence)) for sequence in zip(*(encoded[name] for name in names))]


def count_tokens(sequences: list[dict]) -> Counter:
    """How often each id occurs where it can be masked."""
    return Counter(
        token
        for sequence in sequences
        for token, special in zip(sequence["input_ids"], sequence["special_tokens_mask"])
        if not special
    )


def unigram_entropy(train: Counter, held_out: Counter, ordinary: int) -> float:
    """Loss in nats on held-out tokens of the best guess that ignores context, counted on the training tokens."""
    # Add-one smoothing: a token that the training text lacks would cost infinitely much.
    total = train.total() + ordinary
    return -sum(n * math.log((train[token] + 1) / total) for token, n in held_out.items()) / held_out.total()


def pretrain(settings: DemoArguments, tokenizer: BertTokenizer, train: list[dict], held_out: list[dict]) -> Trainer:
    set_seed(settings.seed)
    config = NeoBERTConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.num_hidden_layers,
        num_attention_heads=settings.num_attention_heads,
        intermediate_size=4 * settings.hidden_size,
        max_length=settings.max_length,
        pad_token_id=tokenizer.pad_token_id,
        decoder_init_range=settings.decoder_init_range,
        embedding_init_range=settings.embedding_init_range,
        # The decoder runs on the masked fifth of the tokens only.
        sparse_prediction=True,
    )
    # NeoBERT's objective (paper, section 3.3): 20% of the tokens, always replaced by [MASK].
    collator = DataCollatorForLanguageModeling(
        tokenizer, mlm_probability=0.2, mask_replace_prob=1.0, random_replace_prob=0.0
    )
    arguments = TrainingArguments(
        output_dir=settings.output_dir,
        max_steps=settings.max_steps,
        # No packing: the model strips the padding of a batch itself before its first layer.
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=64,
        learning_rate=settings.learning_rate,
        adam_beta2=0.95,
        weight_decay=0.1,
        warmup_steps=0.1,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        seed=settings.seed,
        # Shares of max_steps. The held-out loss is over 5,300 tokens, masked anew each time: give or take 0.045 nats.
        logging_steps=0.025,
        eval_strategy="steps",
        eval_steps=0.125,
        # With sparse_prediction the logits are those of the masked positions, which the Trainer cannot line up.
        prediction_loss_only=True,
        # The collator needs `special_tokens_mask`, which the model does not take.
        remove_unused_columns=False,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = Trainer(
        model=NeoBERTForMaskedLM(config),
        args=arguments,
        data_collator=collator,
        train_dataset=train,
        eval_dataset=held_out,
    )
    trainer.train()
    trainer.evaluate()
    return trainer


def save(model: NeoBERTForMaskedLM, tokenizer: BertTokenizer, folder: Path) -> None:
    """Write beside and rename: `folder` never holds half a model."""
    partial = folder.with_name(folder.name + ".partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)


@torch.no_grad()
def check_reload(model: NeoBERTForMaskedLM, folder: Path, documents: list[str]) -> None:
    """What was saved is what was trained, to the last bit."""
    batch = AutoTokenizer.from_pretrained(folder)(documents, padding=True, truncation=True, return_tensors="pt")
    batch = batch.to(model.device)
    model.eval()
    masked_lm = AutoModelForMaskedLM.from_pretrained(folder).to(model.device)
    encoder = AutoModel.from_pretrained(folder).to(model.device)
    exact = {"rtol": 0, "atol": 0}
    torch.testing.assert_close(masked_lm(**batch).logits, model(**batch).logits, **exact)
    torch.testing.assert_close(encoder(**batch).last_hidden_state, model.model(**batch).last_hidden_state, **exact)


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


def plot(log: list[dict], unigram: float, file: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for key, label, style in (("loss", "training", "-"), ("eval_loss", "held out", "o-")):
        points = [(entry["step"], float(entry[key])) for entry in log if key in entry]
        axes.plot(*zip(*points), style, label=label, markersize=4)
    axes.axhline(unigram, linestyle="--", color="grey", label="unigram entropy, held out")
    axes.set(xlabel="step", ylabel="masked loss (nats)", title="NeoBERT on the documentation inside Python")
    axes.legend()
    figure.savefig(file, dpi=150)


def main() -> None:
    (settings,) = parse_config(DemoArguments)
    started = time.time()
    output = Path(settings.output_dir)
    numbers = {"settings": asdict(settings)}

    print("1. Text: the documentation inside Python")
    train_documents, held_out_documents = read_documentation(settings.max_documents)
    numbers["documents"] = {"train": len(train_documents), "held_out": len(held_out_documents)}
    print("   {train:,} documents to train on, {held_out:,} held out".format(**numbers["documents"]))

    print("2. Tokenizer: WordPiece, lower case")
    tokenizer = train_tokenizer(train_documents, settings.vocab_size, settings.max_length)
    print(f"   {len(tokenizer):,} entries: {' '.join(tokenizer.tokenize(held_out_documents[0])[:20])} ...")

    print("3. Tokens")
    train, held_out = tokenize(tokenizer, train_documents), tokenize(tokenizer, held_out_documents)
    train_counts, held_out_counts = count_tokens(train), count_tokens(held_out)
    numbers["tokens"] = {"train": train_counts.total(), "held_out": held_out_counts.total()}
    print("   {train:,} to train on, {held_out:,} held out".format(**numbers["tokens"]))
    # [UNK] may stand in a text; the other four special tokens may not.
    unigram = numbers["unigram_entropy"] = unigram_entropy(train_counts, held_out_counts, len(tokenizer) - 4)
    print(f"   unigram entropy of the held-out text: {unigram:.3f} nats")

    print("4. Pretraining: masked language modelling")
    trainer = pretrain(settings, tokenizer, train, held_out)
    numbers["log"] = trainer.state.log_history
    loss = numbers["held_out_loss"] = numbers["log"][-1]["eval_loss"]
    print(f"   held-out masked loss {loss:.3f} nats, unigram entropy {unigram:.3f}: {unigram - loss:.3f} below")

    print("5. Saving, and reloading with the Auto classes")
    folder = output / "model"
    save(trainer.model, tokenizer, folder)
    check_reload(trainer.model, folder, held_out_documents[:8])
    print(f"   {folder}: the reloaded model gives the same logits")

    print("6. Fill-mask")
    numbers["fill_mask"] = fill_masks(folder, SENTENCES)

    print(f"7. Search for {QUERY!r} in held-out documents")
    numbers["search"] = search(folder, QUERY, held_out_documents[:200])

    print("8. Plot and numbers")
    plot(numbers["log"], unigram, output / "loss.png")
    numbers["seconds"] = round(time.time() - started, 1)
    (output / "numbers.json").write_text(json.dumps(numbers, indent=2) + "\n")
    print(f"   {output / 'loss.png'}, {output / 'numbers.json'}; {numbers['seconds']:.0f} seconds in all")

    if settings.require_learning and loss >= unigram:
        sys.exit(
            f"The held-out loss ({loss:.3f} nats) is not below the unigram entropy ({unigram:.3f}): the model has "
            "learnt nothing from context. Raise `max_steps`, or pass --no_require_learning if this is only a trial."
        )


if __name__ == "__main__":
    main()
