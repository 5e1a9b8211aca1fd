"""The model card: the template `hub_card.md`, filled with the known facts. Parts about unknown facts are left out."""

import json
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import validate_repo_id

import neobert_hf
from neobert_hf import NeoBERTConfig, NeoBERTContextualConfig, NeoBERTPreTrainedModel
from neobert_hf.common.settings import nearest, read_yaml
from neobert_hf.embeddings.instructions import describe_prompts
from neobert_hf.hub.golden_outputs import GOLDEN_FILE, read_outputs
from neobert_hf.hub.model_folder import (
    SENTENCE_CONFIG,
    ModelFolder,
    read_mapping,
    text_length,
)
from neobert_hf.modeling_neobert import swiglu_width
from neobert_hf.training.run_checkpoints import COMPLETE, complete_checkpoints


# What `common.fingerprints` makes, or the commit of a Hub repository.
FINGERPRINT = re.compile("[0-9a-f]{32,64}")

TEMPLATE = Path(neobert_hf.__file__).with_name("hub_card.md")

# By class: the Hub's name for its task, and the beginning of its card.
DESCRIPTIONS = {
    "NeoBERTModel": ("feature-extraction", "A"),
    "NeoBERTForMaskedLM": ("fill-mask", "A masked language model on a"),
    "NeoBERTForSequenceClassification": ("text-classification", "A text classifier on a"),
    "NeoBERTForTokenClassification": ("token-classification", "A token classifier on a"),
    "NeoBERTForQuestionAnswering": ("question-answering", "A question-answering model on a"),
    "NeoBERTForMultipleChoice": ("multiple-choice", "A multiple-choice model on a"),
    "SentenceTransformer": ("sentence-similarity", "An embedding model on a"),
    "SparseEncoder": ("feature-extraction", "A sparse embedding model on a"),
    "MultiVectorEncoder": ("feature-extraction", "A multi-vector embedding model on a"),
    "CrossEncoder": ("text-ranking", "A reranker on a"),
    # Not `sentence-similarity`: the Hub's tools that compare sentences pass no context.
    "NeoBERTContextualModel": ("feature-extraction", "A contextual embedding model, whose two stages are each a"),
}
# Metadata that is taken from an earlier card of the same model.
HUB_KEYS = ("license", "license_name", "license_link", "language", "base_model", "datasets", "eval_results")
# Facts for which the Hub has no key are stored under this key, so that publishing again finds them.
PACKAGE_KEY = "neobert_hf"
PACKAGE_KEYS = ("training_data", "hyperparameters", "limits", "citation")
# The keys of a result of `evaluation.mteb`.
RESULT_KEYS = {"task", "type", "metric", "score", "settings", "result"}


@strict
@dataclass
class CardFacts:
    """Facts about a model that are not in the checkpoint itself.

    Args:
        license: the Hub's identifier, such as `mit`; `other` needs the two settings that follow.
        license_name, license_link: name and address of a licence that the Hub does not know.
        language: ISO 639-1 codes.
        base_model: Hub ids of the models that it was trained from.
        datasets: Hub ids of the training data.
        training_data: Markdown about the training data.
        hyperparameters: hyperparameters by name.
        eval_results: results for the metadata (`model-index`) and the table.
        limits: Markdown that follows the limits that every NeoBERT has.
        citation: BibTeX, shown before that of NeoBERT.
    """

    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    language: list[str] = field(default_factory=list)
    base_model: list[str] = field(default_factory=list)
    datasets: list[str] = field(default_factory=list)
    training_data: str | None = None
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    eval_results: list[EvalResult] = field(default_factory=list)
    limits: str | None = None
    citation: str | None = None

    def validate_license(self):
        if self.license == "other" and not (self.license_name and self.license_link):
            raise ValueError("`license: other` needs `license_name` and `license_link`.")

    def validate_repositories(self):
        for name in (*self.base_model, *self.datasets):
            validate_repo_id(name)

    def validate_eval_results(self):
        required = ("task_type", "dataset_type", "dataset_name", "metric_type", "metric_value")
        for result in self.eval_results:
            if empty := [name for name in required if getattr(result, name) is None]:
                raise ValueError(f"`eval_results` has no value for `{empty[0]}` of {result.dataset_name}.")


def gather_facts(source: Path, file: str | None = None, mteb_results: str | None = None) -> CardFacts:
    """Collect the known facts about a checkpoint.

    Args:
        source: a folder; facts come from the metadata of its card and the settings of the training run that wrote it.
        file: YAML with fields of `CardFacts`, which override the others. `eval_results` is a list of entries with the
            fields of `huggingface_hub.EvalResult`.
        mteb_results: folder with the model's results from `examples/run_mteb.py`. They are added to the other results
            and replace earlier ones of the same tasks.

    Raises:
        ValueError: if the file or the card does not have this form, or the results are of another model.
    """
    try:
        facts = facts_of_run(source) | facts_of_card(source)
        if file is not None:
            facts |= read_facts(file)
        if mteb_results is not None:
            results = read_mteb_results(Path(mteb_results), source)
            measured = {_what_is_measured(result) for result in results}
            others = [result for result in facts.get("eval_results", []) if _what_is_measured(result) not in measured]
            facts["eval_results"] = [*others, *results]
        return CardFacts(**facts)
    except StrictDataclassError as error:
        raise ValueError(f"{file or source / 'README.md'}: {error}") from error


def check_card(folder: Path) -> None:
    """Refuse metadata that the Hub would refuse, as far as this can be checked offline.

    Raises:
        ValueError: naming the key.
    """
    try:
        CardFacts(**facts_of_card(folder))
    except StrictDataclassError as error:
        raise ValueError(f"{folder / 'README.md'}: {error}") from error


def _what_is_measured(result: EvalResult) -> tuple:
    return result.dataset_type, result.dataset_config, result.dataset_split, result.metric_type


def read_facts(file: str) -> dict[str, Any]:
    """The fields of `CardFacts` that a YAML file holds."""
    values = read_yaml(file)
    known = [entry.name for entry in fields(CardFacts)]
    if unknown := [str(key) for key in values if key not in known]:
        raise ValueError(f"{file} has the unknown key {unknown[0]!r}{nearest(unknown[0], known)}")
    if "eval_results" in values:
        try:
            values["eval_results"] = [EvalResult(**result) for result in values["eval_results"]]
        except TypeError as error:
            form = "a list of entries with the fields of `huggingface_hub.EvalResult`"
            raise ValueError(f"{file}: `eval_results` must be {form}: {error}") from error
    return values


def read_mteb_results(folder: Path, model: Path) -> list[EvalResult]:
    """One result for each task, all measured on this model in its present state."""
    files = sorted(folder.glob("*.json"))
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    if not all(result.keys() >= RESULT_KEYS for result in results) or not results:
        raise ValueError(f"{folder} holds no results of examples/run_mteb.py: give the folder of one model in it.")
    # Not imported at the top: importing Sentence Transformers takes ten seconds, and most cards do not need it.
    from neobert_hf.embeddings.inference import embedding_fingerprint, load_embedding_model

    fingerprints, names = {}, []
    for file, result in zip(files, results):
        measured, dtype, kept = (result["settings"].get(name) for name in ("model", "dtype", "truncate_dim"))
        if kept is not None:
            raise ValueError(
                f"{file} was measured with `truncate_dim` {kept}, but the card would show it as the score of whole "
                "embeddings. Put it into the `card` file under a name that says so, or remove it from this folder."
            )
        if dtype not in fingerprints:
            loaded = load_embedding_model(str(model), getattr(torch, dtype), device="cpu")
            fingerprints[dtype] = embedding_fingerprint(loaded)
            own_limit = loaded.max_seq_length
        if fingerprints[dtype] != measured:
            raise ValueError(
                f"{file} is not a result of {model} in its present state: weights, tokenizer or prompts were "
                "different. Evaluate this model."
            )
        limit = result["settings"].get("max_length")
        names.append(f"MTEB {result['task']}" + (f", texts cut at {limit:,} tokens" if limit != own_limit else ""))
    return [
        EvalResult(
            task_type=result["type"].lower(),
            dataset_type=result["task"],
            dataset_name=name,
            dataset_revision=result["result"]["dataset_revision"],
            metric_type=result["metric"],
            metric_value=result["score"],
        )
        for name, result in zip(names, results)
    ]


def facts_of_card(source: Path) -> dict[str, Any]:
    """The facts in the metadata of a folder's card; empty if it has no card."""
    if not (source / "README.md").is_file():
        return {}
    try:
        data = ModelCard.load(source / "README.md").data
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(
            f"The metadata of {source / 'README.md'} cannot be read: {error} Correct or delete the file."
        ) from error
    found = {key: value for key in HUB_KEYS if (value := data.get(key))}
    for key in ("language", "base_model", "datasets"):
        if isinstance(found.get(key), str):
            found[key] = [found[key]]
    ours = data.get(PACKAGE_KEY)
    return found | {key: ours[key] for key in PACKAGE_KEYS if isinstance(ours, dict) and key in ours}


def facts_of_run(source: Path) -> dict[str, Any]:
    """Settings of the training run, by this package, that wrote a checkpoint or the `model` beside its checkpoints."""
    checkpoints = [source] if (source / COMPLETE).is_file() else []
    if source.name == "model":
        checkpoints = complete_checkpoints(source.parent)
    if not checkpoints:
        return {}
    # Only the settings are read: it does not matter here whether training could resume from this checkpoint.
    settings = read_mapping(checkpoints[-1] / COMPLETE).get("settings")
    if not isinstance(settings, dict):
        raise ValueError(f"{checkpoints[-1] / COMPLETE} is damaged: it has no `settings`. Delete this checkpoint.")
    facts = {"hyperparameters": {name: value for name, value in settings.items() if _is_shown(name, value)}}
    if isinstance(datasets := settings.get("datasets"), dict):
        rows = {name: data.get("rows") if isinstance(data, dict) else None for name, data in datasets.items()}
        names = [f"{name} ({count:,} rows)" if isinstance(count, int) else name for name, count in rows.items()]
        facts["training_data"] = f"Mixture of {', '.join(names)}."
    return facts


def _is_shown(name: str, value: Any) -> bool:
    """Whether the card shows a setting: no architecture, and no paths or fingerprints, which mean nothing elsewhere."""
    if name in {entry.name for entry in fields(NeoBERTConfig)}:
        return False
    is_name = isinstance(value, str) and "/" not in value and not FINGERPRINT.fullmatch(value)
    return isinstance(value, (bool, int, float)) or is_name


def build_card(
    repo_id: str, model: NeoBERTPreTrainedModel, folder: ModelFolder, onnx: list, facts: CardFacts
) -> ModelCard:
    """Fill the template, with metadata that the Hub can read.

    Args:
        repo_id: the repository of the card.
        model: the model with its weights.
        folder: the model's folder, with `golden.json`.
        onnx: the `ExportedFile`s.
        facts: facts that the other arguments do not contain.
    """
    class_name = type(model).__name__
    sentence_class = folder.sentence_class
    task, kind = DESCRIPTIONS[class_name if folder.is_contextual else sentence_class or class_name]
    golden = read_outputs(folder.path / GOLDEN_FILE)

    library, tags = "transformers", ["neobert"]
    if sentence_class:
        library = "sentence-transformers"
        tags.append(library)
    if folder.is_contextual:
        tags.append("contextual")
    if onnx:
        tags += ["onnx", "transformers.js"]
    metadata = {key: getattr(facts, key) or None for key in HUB_KEYS}
    metadata[PACKAGE_KEY] = {key: value for key in PACKAGE_KEYS if (value := getattr(facts, key))} or None
    if facts.eval_results:
        metadata["model_name"] = repo_id.split("/")[-1]
    return ModelCard.from_template(
        ModelCardData(library_name=library, pipeline_tag=task, tags=tags, **metadata),
        template_path=str(TEMPLATE),
        repo_id=repo_id,
        kind=kind,
        class_name=class_name,
        auto_class=auto_class_of(type(model)),
        context=context_of(model.config) if folder.is_contextual else None,
        sentence_class=sentence_class,
        prompts=prompts_of(folder),
        onnx=onnx,
        results=facts.eval_results,
        **{key: getattr(facts, key) for key in PACKAGE_KEYS},
        golden_ids=golden["input_ids"],
        golden_values=", ".join(f"{value:.4f}" for value in golden["outputs"]["last_hidden_state"]["first"][:4]),
        text_length=f"{tokens_read(folder):,}",
        **describe(model),
    )


def tokens_read(folder: ModelFolder) -> int:
    """The number of tokens of a text that the model takes, including any limit of Sentence Transformers."""
    if not folder.sentence_class:
        return folder.config.max_length
    return text_length(folder.transformer_settings, folder.config, folder.tokenizer)


def auto_class_of(cls: type[NeoBERTPreTrainedModel]) -> str:
    """The Auto class that loads models of a class."""
    references = cls.config_class.auto_classes.items()
    return next(auto_class for auto_class, reference in references if reference.split(".")[-1] == cls.__name__)


def context_of(config: NeoBERTContextualConfig) -> dict[str, Any]:
    """The template's variables for a contextual model."""
    beside = config.context_size + config.soft_prompts
    return {
        "size": f"{config.context_size:,}",
        "vectors": f"{beside:,}",
        # Embedding without a context works only if the model was trained for it.
        "optional": config.context_dropout > 0,
        "costs": {length: f"{(beside + length) / length:.1f}" for length in (20, 128, 512)},
    }


def prompts_of(folder: ModelFolder) -> str:
    """The card's text about the prompts saved with a Sentence Transformers model; empty for other models."""
    if folder.sentence_class is None or not (folder.path / SENTENCE_CONFIG).is_file():
        return ""
    prompts = read_mapping(folder.path / SENTENCE_CONFIG).get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(prompt, str | None) for prompt in prompts.values()):
        raise ValueError(f"`prompts` in {folder.path / SENTENCE_CONFIG} must hold a text for each name.")
    return describe_prompts(prompts, "contextual" if folder.is_contextual else folder.sentence_class)


def describe(model: NeoBERTPreTrainedModel) -> dict[str, Any]:
    """The template's variables that describe the model."""
    config = model.config
    positions = "learned"
    if config.rope:
        rope = config.rope_parameters
        positions = f"RoPE, base {rope['rope_theta']:,g}"
        if rope["rope_type"] != "default":
            positions += f", {rope['rope_type']}, factor {rope.get('factor', 1):g}"
    width = swiglu_width(config) if config.hidden_act == "swiglu" else config.intermediate_size
    labels = config.id2label if type(model).__name__.endswith(("SequenceClassification", "TokenClassification")) else {}
    return {
        "parameters": f"{sum(parameter.numel() for parameter in model.parameters()):,}",
        "dtype": str(model.dtype).removeprefix("torch."),
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "heads": config.num_attention_heads,
        "activation": f"{'SwiGLU' if config.hidden_act == 'swiglu' else 'GELU'} of width {width:,}",
        "norm": "RMSNorm" if config.rms_norm else "LayerNorm",
        "rope": config.rope,
        "positions": positions,
        "max_length": f"{config.max_length:,}",
        "vocabulary": f"{config.vocab_size:,}",
        "labels": ", ".join(labels.values()),
    }
