"""Kills and concurrent starts of the commands that write folders; prints a table.

    python -m tests.faults --rounds 3

Every command runs on small data in processes of its own. A fault counts as survived if the command then ends with the
files of an undisturbed run, to the bit, or refuses with a message that names the file. Anything else is `wrong`, and
the exit status is 1. A round of all commands takes some ten minutes of CPU time.
"""

import argparse
import contextlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics

import yaml
from sentence_transformers import SentenceTransformer

import tests.conftest  # noqa: F401  Settings of the environment.
from neobert_hf.common.fingerprints import file_checksum
from neobert_hf.common.report import markdown_table
from tests.helpers import embedding_runs, glue_runs
from tests.helpers.models import ROOT
from tests.helpers.pretraining_runs import small_flags, start, to_flags
from tests.helpers.small_tokenizer import small_tokenizer
from tests.helpers.word_tokenizer import word_tokenizer


@dataclass
class Command:
    """A script, its flags without the folder that it writes, and the files of that folder that must come out equal.

    Args:
        flag: that names the folder.
        clean: what of a result file differs between equal runs.
    """

    script: str
    flags: list[str]
    results: tuple[str, ...]
    flag: str = "--output_dir"
    clean: Callable[[Path], object] = file_checksum
    seconds: float = 0.0
    expected: dict = field(default_factory=dict)

    def arguments(self, folder: Path) -> list[str]:
        first = ["index"] if self.script == "semantic_search" else []
        # Tests of pretraining expect the folder first.
        return [*first, self.flag, str(folder), *self.flags]

    def start(self, folder: Path):
        return start(self.arguments(folder), script=self.script)

    def found(self, folder: Path) -> dict:
        files = sorted(file for pattern in self.results for file in folder.glob(pattern))
        return {str(file.relative_to(folder)): self.clean(file) for file in files}


def make_material(folder: Path) -> None:
    """Text, a tokenizer, encoders, pairs and a task in GLUE's form."""
    texts = [" ".join(text.split()) for _, text in sorted(topics.items())]
    documents = [text[start : start + 600] for text in texts for start in range(0, len(text), 600)][:400]
    tokenizer = word_tokenizer("\n".join(documents).lower(), 600, 128)
    tokenizer.save_pretrained(folder / "tokenizer")
    glue_runs.save_encoder(folder / "encoder", tokenizer)
    glue_runs.save_encoder(folder / "glue_encoder", small_tokenizer(model_input_names=["input_ids", "attention_mask"]))
    rows = [{"id": f"d{number}", "text": text} for number, text in enumerate(documents)]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [text.split() for text in documents if len(text.split()) > 60]
    pairs = [{"query": " ".join(text[:4]), "positive": " ".join(text[4:24])} for text in words]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    pairs = {"source": str(folder / "pairs.jsonl"), "query": "query", "positive": "positive", "instruction": "Find it."}
    (folder / "datasets.yaml").write_text(yaml.safe_dump({"train": {"pairs": pairs}}))
    # It mines and teaches.
    SentenceTransformer(str(folder / "encoder"), device="cpu").save(str(folder / "helper"))
    (folder / "documents").mkdir()
    for number, text in enumerate(words[:40]):
        sections = [f"## {' '.join(text[at : at + 3])}\n{' '.join(text[at + 3 : at + 30])}" for at in (0, 30)]
        (folder / "documents" / f"{number}.md").write_text("\n\n".join(sections))
    training = {name: value for name, value in embedding_runs.SMALL.items() if name not in ("use_cpu", "bf16")}
    (folder / "training.yaml").write_text(yaml.safe_dump(training | {"max_steps": 8, "save_steps": 4}))
    (folder / "glue").mkdir()
    glue_runs.write_rows({"sst2": glue_runs.make_rows()["sst2"]}, folder / "glue")


def stored_passages(file: Path) -> list:
    """Of an index, without the vectors: batches of other sizes round in another way."""
    import lancedb

    rows = lancedb.connect(file.parent).open_table("passages").to_arrow().drop(["vector"]).to_pylist()
    return sorted(map(str, rows))


def without_seconds(file: Path) -> object:
    if file.suffix != ".json":
        return file_checksum(file)
    return {name: value for name, value in json.loads(file.read_text()).items() if name != "seconds"}


def make_commands(folder: Path) -> dict[str, Command]:
    encoder, text = folder / "encoder", folder / "text.jsonl"
    prepare = {"source": text, "tokenizer": folder / "tokenizer", "documents_per_shard": 40, "max_length": 64}
    dense = {"model": encoder, "datasets": folder / "datasets.yaml", "max_steps": 12, "eval_strategy": "no"}
    glue = glue_runs.SMALL | {"model": folder / "glue_encoder", "data_dir": folder / "glue", "task": "sst2"}
    ppl = {"models": f"m={encoder}", "source": text, "sample": 8, "max_documents": 60, "batch_tokens": 64}
    index = {"model": encoder, "source": text, "id_column": "id", "write_every": 4, "device": "cpu"}
    helper = folder / "helper"
    mined = dense | {"miner": helper, "negatives": 2}
    contextual = embedding_runs.SMALL | dense | {"context_size": 8, "mini_batch_size": 3, "first_model": helper}
    contextual |= {"config": ROOT / "configs" / "embeddings" / "contextual_small.yaml", "save_steps": 4}
    retrieval = {"documents": folder / "documents", "model": encoder, "training": folder / "training.yaml"}
    retrieval |= {"held_out": 0.2, "negatives": 2}
    prepared = folder / "prepared"
    changes = {"max_steps": 24, "save_steps": 4, "logging_steps": 5, "dataloader_num_workers": 1, "layout": "packed"}
    pretrain = small_flags(prepared, Path("unused"), **changes)[2:]
    return {
        "prepare_data": Command("prepare_data", to_flags(prepare | {"num_proc": 2}), ("*.arrow", "tokenizer/*")),
        "pretrain": Command("pretrain", pretrain, ("model/*.safetensors",)),
        "finetune_embeddings": Command(
            "finetune_embeddings", embedding_runs.to_flags("dense", dense), ("model/*.safetensors",)
        ),
        "run_glue": Command(
            "run_glue", to_flags(glue), ("*/*/*.json", "*/*/*/model/*.safetensors"), clean=without_seconds
        ),
        "pseudo_perplexity": Command("pseudo_perplexity", to_flags(ppl | {"device": "cpu"}), ("*/*/*.jsonl",)),
        "semantic_search": Command(
            "semantic_search", to_flags(index), ("passages.lance",), flag="--index", clean=stored_passages
        ),
        "mined": Command("finetune_embeddings", embedding_runs.to_flags("dense", mined), ("model/*.safetensors",)),
        "train_contextual": Command("train_contextual", to_flags(contextual), ("model/*.safetensors",)),
        "retrieval_from_documents": Command(
            "retrieval_from_documents", to_flags(retrieval), ("report.json", "*/model/*.safetensors")
        ),
    }


class Faults:
    """Counts of outcomes by command and fault; `wrong` are printed as they come."""

    def __init__(self, folder: Path, rounds: int, seed: int):
        self.folder, self.rounds, self.draw = folder, rounds, random.Random(seed)
        self.counts: dict[tuple[str, str], Counter] = {}

    def count(self, command: str, fault: str, outcome: str, output: str = "") -> None:
        self.counts.setdefault((command, fault), Counter())[outcome] += 1
        print(f"{command}, {fault}: {outcome}", flush=True)
        if outcome == "wrong":
            print(output[-2000:], flush=True)

    def new(self, name: str) -> Path:
        """A folder of its own, in a parent of its own as well."""
        return Path(tempfile.mkdtemp(dir=self.folder)) / name

    def run_undisturbed(self, name: str, command: Command) -> Path:
        whole = self.new(name)
        began = time.monotonic()
        command.start(whole).finish()
        command.seconds = time.monotonic() - began
        command.expected = command.found(whole)
        assert command.expected, f"{name} wrote none of {command.results}"
        return whole

    def kill(self, name: str, command: Command) -> None:
        """Twice in a row at random moments, then to the end."""
        folder = self.new(name)
        for _ in range(2):
            process = command.start(folder)
            time.sleep(command.seconds * self.draw.uniform(0.1, 0.8))
            # It may be through already.
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.end()
        process = command.start(folder)
        codes = process.end()
        equal = codes == [0] and command.found(folder) == command.expected
        self.count(name, "killed twice", "equal" if equal else "wrong", f"{codes} {process.output}")

    def start_two(self, name: str, command: Command) -> None:
        folder = self.new(name)
        processes = [command.start(folder) for _ in range(2)]
        codes = sorted(code for process in processes for code in process.end())
        output = "\n".join(process.output for process in processes)
        equal = command.found(folder) == command.expected
        told = codes == [0, 1] and "is being written by" in output
        self.count(name, "two at once", "one told, equal" if told and equal else "wrong", f"{codes} {output}")


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="of kills and concurrent starts of each command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], help="commands; all if unset")
    settings = parser.parse_args(args)
    # Recipes of several steps import others, which pytest finds by its settings.
    sys.path.insert(0, str(ROOT / "examples"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_material(folder)
        # The first process also starts the server that all are forked from.
        start([], script="prepare_data").end()
        commands = make_commands(folder)
        commands = {name: commands[name] for name in settings.only or commands}
        faults = Faults(folder, settings.rounds, settings.seed)
        for name, command in commands.items():
            whole = faults.run_undisturbed(name, command)
            if name == "prepare_data":
                shutil.copytree(whole, folder / "prepared" / "train")
            for _ in range(settings.rounds):
                faults.kill(name, command)
                faults.start_two(name, command)
    rows = [
        [name, fault, sum(counts.values()), ", ".join(f"{number} {outcome}" for outcome, number in counts.items())]
        for (name, fault), counts in sorted(faults.counts.items())
    ]
    print("\n".join(markdown_table(["command", "fault", "times", "outcomes"], rows)))
    return int(any("wrong" in counts for counts in faults.counts.values()))


if __name__ == "__main__":
    sys.exit(main())
