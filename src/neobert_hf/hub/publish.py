"""`neobert-hf publish`: build a complete Hub repository from any checkpoint of this package, check it and push it.

    neobert-hf publish runs/embeddings/model me/my-embeddings --card card.yaml --dry_run

A repository holds config and weights, the code for those who load it without the package, the tokenizer, the files of
Sentence Transformers, `onnx/` if requested, `golden.json` and the model card. All of it is written anew into a folder,
so nothing else of the checkpoint's folder can be sent, and is pushed in one commit only if `neobert-hf doctor` finds
that folder healthy. The same command can be repeated: after an interrupted push, files that have arrived are not sent
again, and if nothing has changed, nothing is sent.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import metadata
from pathlib import Path

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils import validate_repo_id

from neobert_hf.common.files import atomic_folder, folder_lock, write_json
from neobert_hf.common.settings import parse_config
from neobert_hf.common.tokenizers import load_tokenizer
from neobert_hf.hub.card import build_card, gather_facts
from neobert_hf.hub.doctor import FAIL, diagnose
from neobert_hf.hub.golden_outputs import GOLDEN_FILE, record_outputs
from neobert_hf.hub.model_folder import (
    MODULES,
    SENTENCE_CONFIG,
    TRANSFORMER_CONFIG,
    find_class,
    has_tokenizer,
    load_model,
    local_folder,
    read_config,
    read_tensors,
    read_tokenizer,
    sentence_class,
)


# Those of `neobert-hf export`, whose module needs packages that most publishing does not.
PRECISIONS = ["float32", "int8", "float16"]
# Where the package can be cloned from, before anybody has said it.
PLACEHOLDER = "PACKAGE_URL"

# Files that are deleted on the Hub unless this push has them: left over from another model, they would make the
# repository wrong. Here `*` and `?` also match `/`, so the patterns must not match other files of the owner.
SHARD = "[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9]"
STALE = [
    *("model.safetensors", f"model-{SHARD}.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", f"pytorch_model-{SHARD}.bin", "pytorch_model.bin.index.json"),
    *("onnx/model*", MODULES, SENTENCE_CONFIG, TRANSFORMER_CONFIG),
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
        metadata={"help": "YAML file with the card's metadata, such as `license`, and `text`", "path": True},
    )
    mteb_results: str | None = field(
        default=None,
        metadata={"help": "folder with this model's results of examples/run_mteb.py, for the card", "path": True},
    )
    package_url: str | None = field(
        default=None,
        metadata={"help": "where this package can be cloned from, for the card; see [project.urls] of pyproject.toml"},
    )
    tokenizer: str | None = field(
        default=None, metadata={"help": "folder or Hub id; the checkpoint's own if unset", "path": "or Hub id"}
    )
    onnx: list[str] | None = field(
        default=None, metadata={"choices": PRECISIONS, "help": "add ONNX files in these precisions"}
    )
    public: bool = field(default=False, metadata={"help": "make a new repository public; otherwise it is private"})
    revision: str | None = field(default=None, metadata={"help": "branch or refs/pr/N to push to; `main` if unset"})
    pr: bool = field(default=False, metadata={"help": "open a pull request instead of changing `main`"})
    output_dir: str | None = field(
        default=None, metadata={"help": "keep the built folder here; must not exist yet", "path": True}
    )
    dry_run: bool = field(default=False, metadata={"help": "build and check; print what would be sent"})


POSITIONAL = ("checkpoint", "repo_id")


def main(args: list[str] | None = None) -> None:
    """The same steps as `examples/push_to_hub.py`."""
    (settings,) = parse_config(PublishSettings, args=args, positional=POSITIONAL, prog="neobert-hf publish")
    check_request(settings)
    with built_folder(settings) as folder:
        print(list_files(folder), flush=True)
        print(describe_dry_run(settings) if settings.dry_run else push_folder(folder, settings))


def check_request(settings: PublishSettings) -> None:
    """Refuse what cannot be built or pushed, before work starts.

    Raises:
        ValueError: naming the setting.
        OSError: if the user is not logged in to the Hub; a dry run does not check this.
    """
    validate_repo_id(settings.repo_id)
    if "/" not in settings.repo_id:
        raise ValueError(f"The repository is {settings.repo_id!r}; it must be OWNER/NAME.")
    if settings.output_dir is not None and Path(settings.output_dir).exists():
        raise ValueError(
            f"{settings.output_dir} exists. Delete it, or send it as it is: hf upload {settings.repo_id} "
            f"{settings.output_dir}"
        )
    if not settings.dry_run:
        if package_url(settings) == PLACEHOLDER:
            raise ValueError(
                "The card has to say where others get this package: give the address of its source repository as "
                "`--package_url`, or write it into [project.urls] of pyproject.toml and install the package again."
            )
        with hub_errors():
            HfApi().whoami()


def package_url(settings: PublishSettings) -> str:
    """The address that was given, or that of the installed package; `PLACEHOLDER` if nobody has said it."""
    urls = [url.split(", ")[-1] for url in metadata("neobert_hf").get_all("Project-URL") or []]
    return settings.package_url or next((url for url in urls if "example.com" not in url), PLACEHOLDER)


@contextmanager
def built_folder(settings: PublishSettings) -> Iterator[Path]:
    """A folder with everything that is sent, which was found healthy: `output_dir`, or a temporary folder.

    Raises:
        ValueError: if the checkpoint or the folder is not healthy.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(settings.output_dir or f"{temporary}/repository")
        with folder_lock(folder):
            with atomic_folder(folder) as partial:
                build_folder(settings, partial)
            yield folder


def build_folder(settings: PublishSettings, folder: Path) -> None:
    """Write everything that a repository holds into an empty folder, and check it.

    Raises:
        ValueError: if the checkpoint or the folder is not healthy, or lacks a tokenizer.
    """
    # 1. Read
    source = local_folder(settings.checkpoint)
    config = read_config(source, contextual=True)
    facts = gather_facts(source, settings.card, settings.mteb_results)
    if settings.tokenizer:
        tokenizer = load_tokenizer(settings.tokenizer, config.vocab_size)
    elif has_tokenizer(source):
        tokenizer = read_tokenizer(source, config)
    else:
        raise ValueError(f"{source} has no tokenizer. Give one with `--tokenizer`: a folder or a Hub id.")
    # That of the tensors, since that of the config might round them.
    dtype = next(iter(read_tensors(source).values())).dtype

    # 2. Weights with config and code, tokenizer, modules, and the checkpoint's own card
    if sentence_class(source):
        save_sentence_model(source, dtype, settings.repo_id, folder)
    else:
        load_model(find_class(config), source, dtype=dtype).save_pretrained(folder)
        if (source / "README.md").is_file():
            shutil.copyfile(source / "README.md", folder / "README.md")
    tokenizer.save_pretrained(folder)

    # 3. Outputs in PyTorch, and the ONNX files
    model = load_model(find_class(config), folder, dtype=torch.float32, attn_implementation="sdpa")
    write_json(folder / GOLDEN_FILE, record_outputs(model, tokenizer))
    onnx = add_onnx(folder, settings.onnx) if settings.onnx else []

    # 4. Card
    card = build_card(settings.repo_id, package_url(settings), model.to(dtype), folder, facts, onnx)
    card.save(folder / "README.md")

    # 5. Check
    findings = diagnose(folder)
    print(*findings, sep="\n", flush=True)
    if failed := [finding.check for finding in findings if finding.status == FAIL]:
        raise ValueError(f"Nothing is sent: the check of {', '.join(failed)} failed.")


def save_sentence_model(source: Path, dtype: torch.dtype, repo_id: str, folder: Path) -> None:
    """Load and save a model of Sentence Transformers, which writes its files and its card."""
    import sentence_transformers

    model_class = getattr(sentence_transformers, sentence_class(source))
    options = {"device": "cpu", "local_files_only": True, "model_kwargs": {"dtype": dtype}}
    model_class(str(source), **options).save_pretrained(str(folder), model_name=repo_id)


def add_onnx(folder: Path, precisions: list[str]) -> list:
    """Write and check `onnx/` of a built folder; returns its `ExportedFile`s."""
    # Imported here, since only this part of publishing needs onnx and onnxruntime.
    from neobert_hf.hub import export

    # Layers between pooling and normalisation stay modules of the folder, so that they must not be in the files too.
    export.check_modules(folder)
    model, task = export.load_for_task(folder)
    tokenizer = read_tokenizer(folder, model.config)
    export.write_server_settings(folder)
    return export.write_onnx(model, task, tokenizer, folder / "onnx", precisions)


def list_files(folder: Path) -> str:
    """The files with their sizes."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    lines = [f"{file.stat().st_size:>15,}  {file.relative_to(folder).as_posix()}" for file in files]
    return "\n".join([*lines, f"{sum(file.stat().st_size for file in files):>15,}  bytes in {len(files)} files"])


def describe_dry_run(settings: PublishSettings) -> str:
    lines = ["Not sent. A push deletes what an earlier model left there: weights, ONNX files, tokenizer, modules."]
    if package_url(settings) == PLACEHOLDER:
        lines.append(f"The card says {PLACEHOLDER} where others get this package: a push asks for `--package_url`.")
    return "\n".join(lines)


def push_folder(folder: Path, settings: PublishSettings) -> str:
    """Send a folder in one commit, to a repository that is created if there is none.

    Args:
        folder: from `built_folder`.
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
