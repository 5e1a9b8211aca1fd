"""`neobert-hf publish`: build a complete Hub repository from any checkpoint of this package, check it and push it.

    neobert-hf publish runs/embeddings/model me/my-embeddings --card card.yaml --dry_run

A repository holds config and weights, the code for those who load it without the package, the tokenizer, the files of
Sentence Transformers, `golden.json` and the model card. All of it is written anew into a folder, so nothing else of the
checkpoint's folder can be sent, and is pushed in one commit only if `neobert-hf doctor` finds that folder healthy. The
same command can be repeated: after an interrupted push, files that have arrived are not sent again, and if nothing has
changed, nothing is sent.

A page that `neobert-hf export --space` wrote is sent as it is, as a static Space.
"""

import shutil
import tempfile
from dataclasses import dataclass, field
from importlib.metadata import metadata
from pathlib import Path

import torch
from huggingface_hub import HfApi
from huggingface_hub.utils import HFValidationError, validate_repo_id

from neobert_hf.common.files import atomic_folder, folder_lock, write_json
from neobert_hf.common.recipe import Result, recipe
from neobert_hf.embeddings.space import TEACHER_FILE
from neobert_hf.hub.card import build_card, dead_links, read_facts
from neobert_hf.hub.diagnosis import FAIL, diagnose
from neobert_hf.hub.golden_outputs import GOLDEN_FILE, record_outputs
from neobert_hf.hub.model_folder import (
    asking_the_hub,
    find_class,
    load_model,
    load_sentence_model,
    local_folder,
    read_config,
    read_json,
    read_tensors,
    read_tokenizer,
    sentence_class,
)


# Where the package can be cloned from, before anybody has said it.
PLACEHOLDER = "PACKAGE_URL"

# Files that are deleted on the Hub unless this push has them: left over from another model, they would make the
# repository wrong. Here `*` and `?` also match `/`, so the patterns must not match other files of the owner.
SHARD = "[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9]"
STALE = [
    *("model.safetensors", f"model-{SHARD}.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", f"pytorch_model-{SHARD}.bin", "pytorch_model.bin.index.json"),
    *("onnx/model*", "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"),
    TEACHER_FILE,
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

    model: str = field(
        metadata={
            "help": "a model's folder or Hub id, or the page that `neobert-hf export --space` wrote",
            "path": "or Hub id",
        }
    )
    repo_id: str = field(metadata={"help": "OWNER/NAME on the Hub"})
    card: str | None = field(
        default=None,
        metadata={"help": "YAML file with the card's metadata, such as `license`, and `text`", "path": True},
    )
    package_url: str | None = field(
        default=None,
        metadata={"help": "where this package can be cloned from, for the card; see [project.urls] of pyproject.toml"},
    )
    public: bool = field(default=False, metadata={"help": "make a new repository public; otherwise it is private"})
    pr: bool = field(default=False, metadata={"help": "open a pull request instead of changing `main`"})
    output_dir: str | None = field(
        default=None, metadata={"help": "keep the built folder here; must not exist yet", "path": True}
    )
    dry_run: bool = field(default=False, metadata={"help": "build and check; print what would be sent"})


@recipe(positional=("model", "repo_id"))
def publish(settings: PublishSettings) -> Result:
    """Build a complete Hub repository from any checkpoint of this package, check it, and push it in one commit.

    Only what belongs to the model is sent. `--dry_run` first shows what that is. A page of `neobert-hf export --space`
    is sent as it is, as a static Space.

    Returns:
        The address of the commit or pull request, as `output`; None after a dry run.
    """
    settings.package_url = settings.package_url or installed_from()
    check_request(settings)
    if is_page(Path(settings.model)):
        return Result(output=send(local_folder(settings.model), "space", settings))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(settings.output_dir or f"{temporary}/repository")
        with folder_lock(folder), atomic_folder(folder) as partial:
            build_folder(settings, partial)
        return Result(output=send(folder, "model", settings))


def is_page(folder: Path) -> bool:
    """Whether `neobert-hf export --space` wrote a folder."""
    return all((folder / name).is_file() for name in ("index.html", "app.js", "settings.json"))


def installed_from() -> str | None:
    """The address in [project.urls] of the installed package, unless it is still the example."""
    urls = [url.split(", ")[-1] for url in metadata("neobert_hf").get_all("Project-URL") or []]
    return next((url for url in urls if "example.com" not in url), None)


def check_request(settings: PublishSettings) -> None:
    """Refuse what cannot be built or pushed, before work starts.

    Raises:
        ValueError: naming the setting.
        OSError: if the user is not logged in to the Hub; a dry run does not check this.
    """
    try:
        validate_repo_id(settings.repo_id)
    except HFValidationError as error:
        raise ValueError(f"`repo_id` is {settings.repo_id!r}, which the Hub does not allow: {error}") from error
    if "/" not in settings.repo_id:
        raise ValueError(f"The repository is {settings.repo_id!r}; it must be OWNER/NAME.")
    if settings.output_dir is not None and Path(settings.output_dir).exists():
        raise ValueError(
            f"{settings.output_dir} exists. Delete it, or send it as it is: hf upload {settings.repo_id} "
            f"{settings.output_dir}"
        )
    if settings.dry_run:
        return
    if settings.package_url is None and not is_page(Path(settings.model)):
        raise ValueError(
            "The card has to say where others get this package: give the address of its source repository as "
            "`--package_url`, or write it into [project.urls] of pyproject.toml and install the package again."
        )
    with asking_the_hub("The login"):
        HfApi().whoami()


def build_folder(settings: PublishSettings, folder: Path) -> None:
    """Write everything that a repository holds into an empty folder, and check it.

    Raises:
        ValueError: if the checkpoint or the folder is not healthy, or lacks a tokenizer.
    """
    # 1. Read
    source = local_folder(settings.model)
    config = read_config(source)
    facts = read_facts(settings.card)
    tokenizer = read_tokenizer(source, config)
    # That of the tensors, since that of the config might round them.
    dtype = next(iter(read_tensors(source).values())).dtype

    # 2. Weights with config and code, tokenizer, modules, and the checkpoint's own card
    text_length = config.max_length
    if sentence_class(source):
        sentences = load_sentence_model(source, dtype)
        model, text_length = sentences[0].model.eval(), sentences.max_seq_length or text_length
        sentences.save_pretrained(str(folder), model_name=settings.repo_id)
    else:
        model = load_model(find_class(config), source, dtype=dtype, attn_implementation="sdpa")
        model.save_pretrained(folder)
        if (source / "README.md").is_file():
            shutil.copyfile(source / "README.md", folder / "README.md")
    if (source / TEACHER_FILE).is_file():
        shutil.copyfile(source / TEACHER_FILE, folder / TEACHER_FILE)
    tokenizer.save_pretrained(folder)
    # The weights may be stored in fewer bits than the model computes in, as those of `models/distilled`.
    if config.dtype not in (None, dtype) and torch.promote_types(dtype, config.dtype) == config.dtype:
        values = read_json(folder / "config.json")
        write_json(folder / "config.json", values | {"dtype": str(config.dtype).removeprefix("torch.")})

    # 3. Card and outputs
    address = settings.package_url or PLACEHOLDER
    build_card(folder, model, text_length, settings.repo_id, address, facts).save(folder / "README.md")
    if links := dead_links(folder):
        print(f"note: the card links to {', '.join(links)}, which is not sent: give `https://` addresses.", flush=True)
    write_json(folder / GOLDEN_FILE, record_outputs(model.float(), tokenizer))

    # 4. Check
    findings = diagnose(folder)
    print(*findings, sep="\n", flush=True)
    if failed := [finding.check for finding in findings if finding.status == FAIL]:
        raise ValueError(f"Nothing is sent: the check of {', '.join(failed)} failed.")


def send(folder: Path, kind: str, settings: PublishSettings) -> str | None:
    """Print what a folder holds and, unless it is a dry run, send it in one commit and print the commit's address.

    Args:
        kind: `model` or `space`, the repository to create if there is none.

    Raises:
        OSError: if the Hub refuses the push.
    """
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        print(f"{file.stat().st_size:>15,}  {file.relative_to(folder).as_posix()}", flush=True)
    if settings.dry_run:
        print("Not sent.")
        if settings.output_dir is not None:
            print(f"{settings.output_dir} holds the files.")
        if kind == "model":
            print("A push deletes what an earlier model left there: weights, ONNX files, tokenizer, modules.")
        if kind == "model" and settings.package_url is None:
            print(f"In the card {PLACEHOLDER} stands for the address of this package: a push asks for `--package_url`.")
        return None
    api = HfApi(library_name="neobert_hf")
    with asking_the_hub(f"The push to {settings.repo_id}"):
        # An existing repository stays as it is.
        api.create_repo(
            settings.repo_id,
            private=not settings.public,
            exist_ok=True,
            repo_type=kind,
            space_sdk="static" if kind == "space" else None,
        )
        commit = api.upload_folder(
            repo_id=settings.repo_id,
            repo_type=kind,
            folder_path=folder,
            create_pr=settings.pr,
            commit_message="Publish with neobert_hf",
            delete_patterns=STALE if kind == "model" else None,
        )
    address = commit.pr_url or commit.commit_url
    print(address)
    return address
