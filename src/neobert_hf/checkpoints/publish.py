"""`neobert-hf publish`: any checkpoint of this package as a complete Hub repository, checked, then pushed.

    neobert-hf publish runs/embeddings/model me/my-embeddings --card card.yaml --dry_run

A repository holds config and weights, the code for those who load it without the package, the tokenizer, the files of
Sentence Transformers, `onnx/` if asked for, `golden.json` and the model card. It is built in a folder, which
`neobert-hf doctor` must find healthy; only then it is sent, in one commit. The same command can be repeated: of an
interrupted push what has arrived is not sent again, and of an unchanged folder nothing is. With `--output_dir` the
folder is kept, and the next time it is checked and sent as it is.
"""

import json
import shutil
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils import validate_repo_id
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from neobert_hf.checkpoints.card import KINDS, CardFacts, build_card, check_card, gather_facts
from neobert_hf.checkpoints.doctor import FAIL, diagnose, open_checkpoint
from neobert_hf.checkpoints.golden_outputs import GOLDEN, record_golden
from neobert_hf.checkpoints.tensors import local_folder
from neobert_hf.common.atomic_writes import atomic_folder, write_json


# Those of `onnx_export`, which needs more packages than the rest.
PRECISIONS = ("float32", "float16", "int8")
SENTENCE_FILES = ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json")

# Deleted on the Hub unless this push has them: of another model they would make the repository wrong. Here `*` and `?`
# match `/` as well: other files of the owner's must not be met.
SHARD = "-of-".join(["[0-9]" * 5] * 2)
STALE = [
    *("model.safetensors", f"model-{SHARD}.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", f"pytorch_model-{SHARD}.bin", "pytorch_model.bin.index.json"),
    *("onnx/model*", *SENTENCE_FILES),
    *("[0-9]_*/config.json", "[0-9]_*/model.safetensors", "[0-9]_*/pytorch_model.bin"),
    *("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json", "added_tokens.json"),
    # The original's code.
    *("model.py", "rotary.py"),
]


def check_request(
    repo_id: str, revision: str | None = None, create_pr: bool = False, output_dir: Path | None = None
) -> None:
    """Refuse what cannot be pushed, before work starts.

    Raises:
        ValueError: naming the argument.
    """
    validate_repo_id(repo_id)
    if "/" not in repo_id:
        raise ValueError(f"The repository is {repo_id!r}; it must be OWNER/NAME.")
    if create_pr and revision is not None:
        raise ValueError("The Hub opens pull requests against `main` only: leave out `--revision` or `--pr`.")
    if output_dir is not None and output_dir.exists():
        card = output_dir / "README.md"
        if not card.is_file() or f'"{repo_id}"' not in card.read_text(encoding="utf-8"):
            raise ValueError(f"{output_dir} exists, and its card is not of {repo_id}. Name a new folder, or delete it.")


def build_folder(
    source: Path,
    folder: Path,
    repo_id: str,
    facts: CardFacts,
    tokenizer: str | None = None,
    onnx: tuple[str, ...] = (),
) -> None:
    """Write everything that a repository holds into an empty folder.

    Args:
        source: a checkpoint with safetensors.
        folder: where to write.
        repo_id: which the card names.
        facts: what the card tells beyond the checkpoint.
        tokenizer: folder or Hub id; the source's own if None.
        onnx: precisions of ONNX files, as for `onnx_export.export`.

    Raises:
        ValueError: if the source is no sound checkpoint, or lacks a tokenizer.
    """
    # 1. Read
    checkpoint = open_checkpoint(source)
    modules, sentence = read_modules(source), sentence_class(source)
    words = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False) if tokenizer else checkpoint.tokenizer
    if words is None:
        raise ValueError(f"{source} has no tokenizer. Name one with `--tokenizer`: a folder or a Hub id.")
    # The dtype of the tensors: that of the config might round them.
    dtype = next(iter(checkpoint.tensors.values())).dtype
    model = checkpoint.cls.from_pretrained(source, dtype=dtype).eval()

    # 2. Weights, with config and code; tokenizer; modules
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    copy_modules(source, folder, modules)

    # 3. What it computes, in PyTorch and ONNX
    golden = record_golden(model, words)
    write_json(folder / GOLDEN, golden)
    exported = export_onnx(folder, words, onnx) if onnx else ()

    # 4. Model card
    build_card(repo_id, model, facts, golden, sentence, exported).save(folder / "README.md")


def read_modules(source: Path) -> list[dict]:
    """The modules of a Sentence Transformers model, none of another.

    Raises:
        ValueError: if one is not of Sentence Transformers itself: others would need trust to be loaded.
    """
    if not (source / "modules.json").is_file():
        return []
    modules = json.loads((source / "modules.json").read_text(encoding="utf-8"))
    if foreign := [one["type"] for one in modules if not one["type"].startswith("sentence_transformers.")]:
        raise ValueError(
            f"{source} has the module {foreign[0]}, which loads with `trust_remote_code` only; allowed are "
            "sentence_transformers.*"
        )
    return modules


def copy_modules(source: Path, folder: Path, modules: list[dict]) -> None:
    for name in SENTENCE_FILES:
        if modules and (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    for module in modules:
        # The first is the model itself; some others store nothing.
        if module["path"] and (source / module["path"]).is_dir():
            pickles = shutil.ignore_patterns("*.bin", "*.pt", "*.pkl")
            shutil.copytree(source / module["path"], folder / module["path"], ignore=pickles)


def sentence_class(source: Path) -> str | None:
    """The class of Sentence Transformers that a folder is for, if it is for one.

    Raises:
        ValueError: if it is one that the model card has no words for.
    """
    if not (source / "modules.json").is_file():
        return None
    file = source / "config_sentence_transformers.json"
    values = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    name = values.get("model_type", "SentenceTransformer")
    if name not in KINDS:
        raise ValueError(f"{file} says `model_type` {name!r}; it must be one of {', '.join(KINDS)}.")
    return name


def export_onnx(folder: Path, tokenizer: PreTrainedTokenizerBase, precisions: tuple[str, ...]) -> list:
    """Write and check `onnx/` of a built folder; returns its `ExportedFile`s."""
    # Needs onnx and onnxruntime, which the rest of publishing does not.
    from neobert_hf.checkpoints.onnx_export import external_data_config, find_pooling_files, load_model, write_onnx

    find_pooling_files(folder)
    model, task = load_model(folder)
    files = write_onnx(model, task, tokenizer, folder / "onnx", precisions)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write_json(folder / "config.json", config | external_data_config(files))
    return files


def check_folder(folder: Path) -> None:
    """Print what the doctor finds, and check the card's metadata.

    Raises:
        ValueError: if a check fails. Nothing may be sent then.
    """
    findings = diagnose(folder)
    for finding in findings:
        print(f"{finding.status:<5} {finding.check:<22} {finding.text}", flush=True)
    if failed := [finding.check for finding in findings if finding.status == FAIL]:
        raise ValueError(f"Nothing is sent: the check of {', '.join(failed)} failed.")
    check_card(folder)


def list_folder(folder: Path) -> str:
    """The files with their sizes."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    lines = [f"{file.stat().st_size:>15,}  {file.relative_to(folder).as_posix()}" for file in files]
    return "\n".join([*lines, f"{sum(file.stat().st_size for file in files):>15,}  bytes in {len(files)} files"])


def push_folder(
    folder: Path, repo_id: str, private: bool = True, revision: str | None = None, create_pr: bool = False
) -> CommitInfo:
    """Send a folder in one commit, to a repository that is created if there is none.

    Args:
        folder: from `build_folder`, and found healthy.
        repo_id: OWNER/NAME.
        private: of a new repository; an existing one stays as it is.
        revision: branch, created if there is none, or `refs/pr/N` of a pull request.
        create_pr: open a pull request instead of changing `main`.

    Raises:
        OSError: if the Hub cannot be reached, refuses, or breaks off. The same call then sends what is missing.
    """
    api = HfApi(library_name="neobert_hf")
    with hub_errors():
        api.create_repo(repo_id, private=private, exist_ok=True)
        # `refs/pr/1` is of a pull request that exists.
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            create_pr=create_pr,
            commit_message="Publish with neobert_hf",
            delete_patterns=STALE,
        )


@contextmanager
def hub_errors() -> Iterator[None]:
    """A broken connection and files that did not arrive as OSError; what the Hub refuses is one already."""
    try:
        yield
    except OSError:
        raise
    except (HTTPError, RuntimeError) as error:
        reason = f"{error} {error.__cause__ or ''}".rstrip(". ")
        raise OSError(f"{reason}. Run the same command again: what has arrived is kept.") from error


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="folder or Hub id")
    parser.add_argument("repo_id", help="OWNER/NAME on the Hub")
    parser.add_argument("--card", help="YAML file with what the model card shall say: fields of CardFacts")
    parser.add_argument("--mteb_results", type=Path, help="results of this model by examples/run_mteb.py, for the card")
    parser.add_argument("--tokenizer", help="folder or Hub id; the checkpoint's own if unset")
    parser.add_argument("--onnx", nargs="*", choices=PRECISIONS, help="add ONNX files, in all precisions or these")
    parser.add_argument("--public", action="store_true", help="a new repository is private otherwise")
    parser.add_argument("--revision", help="branch or refs/pr/N to push to; `main` if unset")
    parser.add_argument("--pr", action="store_true", help="open a pull request")
    parser.add_argument(
        "--output_dir", type=Path, help="keep the built folder here; if it is there, it is sent as it is"
    )
    parser.add_argument("--dry_run", action="store_true", help="build and check; print what would be sent")


def run(arguments: Namespace) -> None:
    # 1. Request
    check_request(arguments.repo_id, arguments.revision, arguments.pr, arguments.output_dir)
    onnx = () if arguments.onnx is None else tuple(arguments.onnx) or PRECISIONS
    if onnx:
        import_module("neobert_hf.checkpoints.onnx_export")  # Its packages may be missing.
    if not arguments.dry_run:
        with hub_errors():
            HfApi().whoami()
    source = local_folder(arguments.checkpoint)
    facts = gather_facts(source, arguments.card, arguments.mteb_results)

    # 2. Folder
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.output_dir or Path(temporary) / "repository"
        if folder.exists():
            print(f"{folder} exists: it is taken as it is, not built from {source}. Delete it to build it anew.")
            check_folder(folder)
        else:
            with atomic_folder(folder) as partial:
                build_folder(source, partial, arguments.repo_id, facts, arguments.tokenizer, onnx)
                check_folder(partial)
        print(list_folder(folder), flush=True)

        # 3. Hub
        if arguments.dry_run:
            print(f"Not sent. Deleted on the Hub, where not in this list: {', '.join(STALE)}")
            return
        commit = push_folder(folder, arguments.repo_id, not arguments.public, arguments.revision, arguments.pr)
    print(commit.pr_url or commit.commit_url)
