"""`neobert-hf publish`: build a complete Hub repository from any checkpoint of this package, check it and push it.

    neobert-hf publish runs/embeddings/model me/my-embeddings --card card.yaml --dry_run

A repository holds config and weights, the code for those who load it without the package, the tokenizer, the files of
Sentence Transformers, `onnx/` if requested, `golden.json` and the model card. It is built in a folder, and sent in one
commit only if `neobert-hf doctor` finds the folder healthy. The same command can be repeated: after an interrupted
push, files that have arrived are not sent again, and if nothing has changed, nothing is sent. With `--output_dir` the
folder is kept, and the next time it is checked and sent as it is.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedTokenizerBase

from neobert_hf.common.files import folder_lock, write_json
from neobert_hf.common.paths import check_links
from neobert_hf.common.settings import parse_config
from neobert_hf.hub.card import build_card, check_card, gather_facts
from neobert_hf.hub.doctor import CONTEXTUAL_FILES, FAIL, diagnose
from neobert_hf.hub.golden_outputs import GOLDEN_FILE, record_outputs
from neobert_hf.hub.model_folder import (
    ENCODERS_AND_CONTEXTUAL,
    INDEX,
    SENTENCE_FILES,
    ModelFolder,
    copy_files,
    load_tokenizer,
    local_folder,
    new_folder,
    read_json,
)


# The only files that are ever sent; `*` stands for part of a name. A list of forbidden files would miss some: keys and
# passwords (`.env`, `id_rsa`), pickles, which run code when they are loaded, code that is not of this package, and
# training states that reveal something about the data.
# For Sentence Transformers' modules, `config.json` and `model.safetensors` in the folders that modules.json names are
# sent as well.
SENT = (
    *("config.json", GOLDEN_FILE, "model.safetensors", "model-*-of-*.safetensors", INDEX, *CONTEXTUAL_FILES),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    "additional_chat_templates/*.jinja",
    *("vocab.txt", "vocab.json", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *SENTENCE_FILES,
    *("onnx/model*.onnx", "onnx/model*.onnx_data"),
    # The card, and the files that it shows or links to.
    *("*.md", "*.png", "*.jpg", "*.jpeg", "*.svg", "LICENSE*", ".gitattributes"),
)

# Files that are deleted on the Hub unless this push has them: left over from another model, they would make the
# repository wrong. Here `*` and `?` also match `/`, so the patterns must not match other files of the owner.
SHARD = "[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9]"
STALE = [
    *("model.safetensors", f"model-{SHARD}.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", f"pytorch_model-{SHARD}.bin", "pytorch_model.bin.index.json"),
    *("onnx/model*", *SENTENCE_FILES),
    *("[0-9]_*/config.json", "[0-9]_*/model.safetensors", "[0-9]_*/pytorch_model.bin"),
    *("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json", "added_tokens.json"),
    # If these were left, Transformers would load another model and put the adapter into it.
    *("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"),
    # The original's code, and that of contextual models alone.
    *("model.py", "rotary.py", "contextual_neobert.py"),
]


@dataclass
class PublishSettings:
    """What is published, where to, and what its card says."""

    checkpoint: str = field(metadata={"help": "folder or Hub id, with safetensors", "path": "or Hub id"})
    repo_id: str = field(metadata={"help": "OWNER/NAME on the Hub"})
    card: str | None = field(
        default=None,
        metadata={"help": "YAML file with the content of the model card: fields of CardFacts", "path": True},
    )
    mteb_results: str | None = field(
        default=None,
        metadata={"help": "folder with this model's results of examples/run_mteb.py, for the card", "path": True},
    )
    tokenizer: str | None = field(
        default=None, metadata={"help": "folder or Hub id; the checkpoint's own if unset", "path": "or Hub id"}
    )
    onnx: bool = field(default=False, metadata={"help": "add ONNX files"})
    precisions: list[str] | None = field(
        default=None, metadata={"help": "precisions of the ONNX files, as for `neobert-hf export`; all if unset"}
    )
    public: bool = field(default=False, metadata={"help": "make a new repository public; otherwise it is private"})
    revision: str | None = field(default=None, metadata={"help": "branch or refs/pr/N to push to; `main` if unset"})
    pr: bool = field(default=False, metadata={"help": "open a pull request instead of changing `main`"})
    output_dir: str | None = field(
        default=None,
        metadata={"help": "keep the built folder here; if it exists already, it is sent as it is", "path": True},
    )
    dry_run: bool = field(default=False, metadata={"help": "build and check; print what would be sent"})


POSITIONAL = ("checkpoint", "repo_id")


def main(args: list[str] | None = None) -> None:
    """The same steps as `examples/push_to_hub.py`."""
    (settings,) = parse_config(PublishSettings, args=args, positional=POSITIONAL, prog="neobert-hf publish")
    check_request(settings)
    with checked_folder(settings) as folder:
        print(list_files(folder), flush=True)
        print(describe_dry_run() if settings.dry_run else push_folder(folder, settings))


def check_request(settings: PublishSettings) -> None:
    """Refuse what cannot be built or pushed, before work starts.

    Raises:
        ValueError: naming the setting.
        ModuleNotFoundError: if a package that `onnx` needs is missing.
        OSError: if the user is not logged in to the Hub; a dry run does not check this.
    """
    repo_id, output_dir = settings.repo_id, settings.output_dir
    validate_repo_id(repo_id)
    if "/" not in repo_id:
        raise ValueError(f"The repository is {repo_id!r}; it must be OWNER/NAME.")
    if settings.pr and settings.revision is not None:
        raise ValueError("The Hub opens pull requests against `main` only: leave out `--revision` or `--pr`.")
    if output_dir is not None and Path(output_dir).exists():
        card = Path(output_dir) / "README.md"
        if not card.is_file() or f'"{repo_id}"' not in card.read_text(encoding="utf-8"):
            raise ValueError(
                f"{output_dir} exists, but its card is not that of {repo_id}. Choose a new folder, or delete it."
            )
    if settings.precisions and not settings.onnx:
        raise ValueError(
            f"`precisions` is {settings.precisions} without ONNX files: add `--onnx`, or leave `precisions` out."
        )
    if settings.onnx:
        from neobert_hf.hub.export import known_precisions

        known_precisions(settings.precisions)
    if not settings.dry_run:
        with hub_errors():
            HfApi().whoami()


@contextmanager
def checked_folder(settings: PublishSettings) -> Iterator[Path]:
    """A folder with everything that is sent, which was found healthy: `output_dir`, or a temporary folder.

    Raises:
        ValueError: if the checkpoint or the folder is not healthy.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(settings.output_dir or f"{temporary}/repository")
        with folder_lock(folder):
            if folder.exists():
                note = f"it is used as it is, not built from {settings.checkpoint}. Delete it to build it again."
                print(f"{folder} exists: {note}")
                check_folder(folder)
            else:
                with new_folder(folder) as partial:
                    build_folder(settings, partial)
                    check_folder(partial)
            yield folder


def build_folder(settings: PublishSettings, folder: Path) -> None:
    """Write everything that a repository holds into an empty folder.

    Raises:
        ValueError: if the checkpoint is damaged, or lacks a tokenizer.
    """
    # 1. Read
    source = ModelFolder(local_folder(settings.checkpoint), ENCODERS_AND_CONTEXTUAL)
    facts = gather_facts(source.path, settings.card, settings.mteb_results)
    source.check_weights()
    if settings.onnx:
        check_exportable(source)
    tokenizer = load_tokenizer(settings.tokenizer) if settings.tokenizer else source.tokenizer
    if tokenizer is None:
        raise ValueError(f"{source.path} has no tokenizer. Give one with `--tokenizer`: a folder or a Hub id.")
    # Use the dtype of the tensors, since that of the config might round them.
    dtype = next(iter(source.tensors.values())).dtype
    model = source.model_class.from_pretrained(source.path, dtype=dtype).eval()

    # 2. Weights, with config and code; tokenizer; modules
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if source.sentence_class is not None:
        copy_files((*SENTENCE_FILES, *module_files(source)), source.path, folder)

    # 3. Outputs in PyTorch, and the ONNX files
    write_json(folder / GOLDEN_FILE, record_outputs(model, tokenizer))
    exported = add_onnx(folder, tokenizer, settings.precisions) if settings.onnx else []

    # 4. Model card
    built = ModelFolder(folder, ENCODERS_AND_CONTEXTUAL)
    card = build_card(settings.repo_id, model, built, exported, facts)
    card.save(folder / "README.md")


def module_files(folder: ModelFolder) -> list[str]:
    """The files that Sentence Transformers' modules may store. The first module, without a folder, is the model."""
    folders = [module.path for module in folder.sentence_modules if module.path]
    return [f"{path}/{name}" for path in folders for name in ("config.json", "model.safetensors")]


def check_exportable(source: ModelFolder) -> None:
    """Refuse, before any work, ONNX files for a class without an ONNX task, or for modules that they cannot contain."""
    from neobert_hf.hub.export import TASKS, find_pooling_files

    if source.is_contextual:
        raise ValueError(
            f"There are no ONNX files for a contextual model, which takes {source.config.context_size:,} vectors in "
            "addition to every text. Leave out `--onnx`."
        )
    if source.model_class not in [cls for cls, _ in TASKS.values()]:
        raise ValueError(
            f"There are no ONNX files for a {source.model_class.__name__}; `neobert-hf export --task "
            "feature-extraction` writes those of its encoder. Leave out `--onnx`."
        )
    find_pooling_files(source)


def check_files(folder: Path) -> None:
    """Refuse files that do not belong to a model. None is skipped silently, since the user may rely on it being sent.

    Raises:
        ValueError: naming the files, or a symbolic link that leads elsewhere.
    """
    check_links(folder)
    names = [file.relative_to(folder).as_posix() for file in sorted(folder.rglob("*")) if not file.is_dir()]
    sent = module_files(ModelFolder(folder))
    # In `fnmatch`, `*` also matches slashes.
    sent += [name for name in names for one in SENT if fnmatchcase(name, one) and name.count("/") == one.count("/")]
    if others := [name for name in names if name not in sent]:
        raise ValueError(
            f"Nothing is sent: {folder} holds {', '.join(others)}. Delete it, or keep it elsewhere. Only these files "
            f"can be sent: {', '.join(SENT)}, and the files of the modules in modules.json."
        )


def add_onnx(folder: Path, tokenizer: PreTrainedTokenizerBase, precisions: list[str] | None) -> list:
    """Write and check `onnx/` of a built folder; returns its `ExportedFile`s."""
    # Imported here, since only this part of publishing needs onnx and onnxruntime.
    from neobert_hf.hub import export

    built = ModelFolder(folder)
    export.find_pooling_files(built)
    model, task = export.load_for_task(built)
    files = export.write_onnx(model, task, tokenizer, folder / "onnx", export.known_precisions(precisions))
    write_json(folder / "config.json", read_json(folder / "config.json") | export.external_data_config(files))
    export.complete_settings(folder, built.config, tokenizer)
    return files


def check_folder(folder: Path) -> None:
    """Print what the doctor finds, and check the card's metadata.

    Raises:
        ValueError: if a check fails. Nothing must be sent then.
    """
    check_files(folder)
    findings = diagnose(folder)
    print(*findings, sep="\n", flush=True)
    if failed := [finding.check for finding in findings if finding.status == FAIL]:
        raise ValueError(f"Nothing is sent: the check of {', '.join(failed)} failed.")
    check_card(folder)


def list_files(folder: Path) -> str:
    """The files with their sizes."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    lines = [f"{file.stat().st_size:>15,}  {file.relative_to(folder).as_posix()}" for file in files]
    return "\n".join([*lines, f"{sum(file.stat().st_size for file in files):>15,}  bytes in {len(files)} files"])


def describe_dry_run() -> str:
    return f"Not sent. A push deletes these on the Hub unless they are listed above: {', '.join(STALE)}"


def push_folder(folder: Path, settings: PublishSettings) -> str:
    """Send a folder in one commit, to a repository that is created if there is none.

    Args:
        folder: from `checked_folder`.
        settings: its repository, and the branch, which is created if there is none.

    Returns:
        The address of the commit or the pull request.

    Raises:
        OSError: if the Hub cannot be reached, refuses the push, or breaks off. Calling this again sends the rest.
    """
    api = HfApi(library_name="neobert_hf")
    repo_id, revision = settings.repo_id, settings.revision
    with hub_errors():
        # An existing repository stays as it is.
        api.create_repo(repo_id, private=not settings.public, exist_ok=True)
        # A revision such as `refs/pr/1` belongs to an existing pull request, and needs no branch.
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            create_pr=settings.pr,
            commit_message="Publish with neobert_hf",
            delete_patterns=STALE,
        )
    return commit.pr_url or commit.commit_url


@contextmanager
def hub_errors() -> Iterator[None]:
    """Turn broken connections and incomplete uploads into OSError; a refusal by the Hub is already one."""
    try:
        yield
    except OSError:
        raise
    except (HTTPError, RuntimeError) as error:
        reason = f"{error} {error.__cause__ or ''}".rstrip(". ")
        raise OSError(f"{reason}. Run the same command again: files that have arrived are kept.") from error
