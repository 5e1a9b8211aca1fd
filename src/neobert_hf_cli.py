"""The command `neobert-hf`: one subcommand for each recipe and tool, each the `main` of a function of the package.

This module lies beside the package, since importing the package imports torch: `--help` prints a text that is stored in
`neobert_hf/help` (`make help` writes it), so that it answers at once.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from traceback import extract_tb


PACKAGE = Path(__file__).parent / "neobert_hf"
# By command: where its function is, the extra of the package that it needs, and what it does.
COMMANDS = {
    "Data and pretraining": {
        "train_tokenizer": ("data.tokenizer", "train", "train a tokenizer on your own text"),
        "deduplicate": ("data.duplicates", "scale", "leave repeated documents out of a corpus"),
        "prepare_data": ("data.preparing", "train", "tokenise text into shards for pretraining"),
        "pretrain": ("pretraining.recipe", "train", "masked language modelling, also from a model that exists"),
    },
    "Your own tasks": {
        "classify": ("tasks.classification", "eval", "train a text classifier"),
        "regress": ("tasks.regression", "eval", "train a model that finds a number for a text"),
        "tag": ("tasks.token_classification", "eval", "train a tagger of words"),
        "answer": ("tasks.question_answering", "eval", "train a model that finds answers in texts"),
    },
    "Embeddings": {
        "make_pairs": ("embeddings.text_pairs", "embed", "make pairs of texts from documents"),
        "finetune_embeddings": ("embeddings.dense", "embed", "train an embedding model on pairs"),
        "train_sparse_encoder": ("embeddings.sparse", "embed", "train a sparse encoder (SPLADE)"),
        "train_multi_vector_encoder": ("embeddings.multi_vector", "embed", "train a late-interaction model (ColBERT)"),
        "train_reranker": ("embeddings.reranker", "embed", "train a reranker (cross-encoder)"),
        "train_contextual": ("contextual.recipe", "eval", "train contextual document embeddings (CDE)"),
        "distil": ("distillation.recipe", "embed", "make a small model of a large one"),
        "embed": ("embeddings.corpus", "embed", "store the vectors of a corpus"),
    },
    "Search": {
        "index": ("search.recipe", "search", "index documents, also those that changed"),
        "query": ("search.recipe", "search", "search an index"),
        "remove": ("search.recipe", "search", "remove a source from an index"),
        "retrieval_from_documents": ("search.own_documents", "search", "learn from your documents and index them"),
    },
    "Evaluation": {
        "run_glue": ("evaluation.glue.recipe", "eval", "GLUE as in the paper"),
        "run_mteb": ("evaluation.mteb.recipe", "eval", "MTEB, or your own tasks for embeddings"),
        "pseudo_perplexity": ("evaluation.pseudo_perplexity", "eval", "pseudo-perplexity against length"),
    },
    "Checkpoints and the Hub": {
        "average": ("hub.averaging", "train", "average the weights of models"),
        "convert": ("hub.conversion", "", "convert checkpoints of the original project, and back"),
        "doctor": ("hub.diagnosis", "embed", "check whether a checkpoint is healthy"),
        "export": ("hub.exporting", "export", "write ONNX files, a web page around them, or files for llama.cpp"),
        "publish": ("hub.publishing", "embed", "build a complete Hub repository, check it and push it"),
    },
}
PLACES = {name: place for group in COMMANDS.values() for name, place in group.items()}


def main() -> None:
    """The console script."""
    if not sys.argv[1:] or sys.argv[1] in ("-h", "--help"):
        print("usage: neobert-hf COMMAND [--setting value ...]; neobert-hf COMMAND --help lists the settings")
        for title, group in COMMANDS.items():
            print(f"\n{title}:", *(f"  {name:<27}{purpose}" for name, (*_, purpose) in group.items()), sep="\n")
    elif sys.argv[1] not in PLACES:
        sys.exit(f"neobert-hf: there is no command {sys.argv[1]!r}; `neobert-hf --help` lists them.")
    else:
        run(sys.argv[1], sys.argv[2:])


def load(command: str) -> Callable:
    """The function of a command. Raises ImportError naming the extra to install, if a library is missing."""
    module, extra, _ = PLACES[command]
    try:
        return getattr(import_module(f"neobert_hf.{module}"), command)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("neobert_hf"):
            raise
        message = f"{error.name} is not installed: pip install 'neobert_hf[{extra}]'"
        raise ModuleNotFoundError(message, name=error.name) from error


def run(command: str, args: list[str] | None = None) -> None:
    """Run a command, and end the process as a command should."""
    args = sys.argv[1:] if args is None else args
    if {"-h", "--help"} & set(args):
        print((PACKAGE / "help" / f"{command}.txt").read_text(encoding="utf-8"), end="")
        return
    try:
        with short_errors(command):
            function = load(command)
            if "--help_all" in args:
                print(import_module("neobert_hf.common.help").help_of(function, everything=True))
                return
            status = function.main(args)
        _end(status if isinstance(status, int) else 0)
    except KeyboardInterrupt as stopped:
        # Trainings save a checkpoint first. What the others have finished stays.
        if os.environ.get("RANK", "0") == "0":
            print(str(stopped) or "Stopped: the same command goes on with what is left.", file=sys.stderr)
        _end(128 + getattr(stopped, "signal", signal.SIGINT))


@contextmanager
def short_errors(command: str) -> Iterator[None]:
    """An error about a setting or a file that this package raises ends the process with its message alone.

    Every other error keeps its traceback, which is needed to find a bug: those that libraries raise, and other kinds.
    """
    try:
        yield
    except (ValueError, OSError, ImportError, RuntimeError, FloatingPointError) as error:
        place = Path(extract_tb(error.__traceback__)[-1].filename).resolve()
        if place != Path(__file__).resolve() and not place.is_relative_to(PACKAGE.resolve()):
            raise
        sys.exit(f"{command}: {error}")


def write_help() -> None:
    """Store the help of every command; a test compares it."""
    help_of = import_module("neobert_hf.common.help").help_of
    for command in PLACES:
        (PACKAGE / "help" / f"{command}.txt").write_text(help_of(load(command)), encoding="utf-8")


def _end(code: int) -> None:
    """End this process if something went wrong, or the group of processes that `accelerate launch` started."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        import_module("neobert_hf.training.trainer").end_processes(code)
    elif code:
        sys.exit(code)


if __name__ == "__main__":
    main()
