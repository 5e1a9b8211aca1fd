"""The model card: what the checkpoint's own card says, joined by the template `hub_card.md`.

The checkpoint's own card is that of Sentence Transformers, of a recipe of this package, or of the user. Its text stays
as it is; what follows `MARK` is written anew whenever the model is published. Metadata are joined key by key.
"""

import inspect
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from safetensors.torch import load_file

import neobert_hf
from neobert_hf import NeoBERTContextualConfig, NeoBERTPreTrainedModel
from neobert_hf.common.settings import nearest, read_yaml
from neobert_hf.hub.golden_outputs import GOLDEN_FILE
from neobert_hf.hub.model_folder import read_json, read_tokenizer, sentence_class, text_length
from neobert_hf.modeling_neobert import swiglu_width
from neobert_hf.training.run_checkpoints import stored_settings


TEMPLATE = Path(neobert_hf.__file__).with_name("hub_card.md")
MARK = "<!-- Written by `neobert-hf publish`, which replaces all that follows. What is above stays. -->"
EMPTY = "---\nlibrary_name: transformers\n---\n"

# By class: the Hub's name for its task, and the beginning of its description.
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
# The keys of a result of `evaluation.mteb`.
RESULT_KEYS = {"task", "type", "metric", "score", "settings", "result"}


def build_card(
    repo_id: str,
    package_url: str,
    model: NeoBERTPreTrainedModel,
    folder: Path,
    facts: dict[str, Any],
    onnx: list,
) -> ModelCard:
    """The card of a built folder.

    Args:
        package_url: where this package can be cloned from.
        model: the model of the folder.
        folder: with weights, tokenizer, `golden.json` and, if there is one, the checkpoint's own card.
        facts: from `gather_facts`.
        onnx: the `ExportedFile`s.
    """
    own = ModelCard.load(folder / "README.md") if (folder / "README.md").is_file() else ModelCard(EMPTY)
    own_text = own.text.partition(MARK)[0].strip() or f"# {repo_id}"
    if (text := (facts.get("text") or "").strip()) and text not in own_text:
        title, _, rest = own_text.partition("\n")
        own_text = f"{title}\n\n{text}\n{rest}".rstrip()
    name = sentence_class(folder)
    class_name = type(model).__name__
    is_contextual = isinstance(model.config, NeoBERTContextualConfig)
    task, kind = DESCRIPTIONS[class_name if is_contextual else name or class_name]
    data = join_metadata(own.data, facts, repo_id)
    data.library_name = "sentence-transformers" if name else "transformers"
    data.pipeline_tag = task
    tags = [*(data.tags or []), "neobert", *(["contextual"] if is_contextual else [])]
    data.tags = list(dict.fromkeys([*tags, *(["onnx", "transformers.js"] if onnx else [])]))
    golden = read_json(folder / GOLDEN_FILE)
    output = next(iter(golden["outputs"].values()))
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        own_text=own_text,
        mark=MARK,
        repo_id=repo_id,
        package_url=package_url,
        kind=kind,
        class_name=class_name,
        auto_class=auto_class_of(type(model)),
        sentence_class=name,
        context=describe_context(model.config) if is_contextual else None,
        onnx=onnx,
        results=data.eval_results,
        hyperparameters=facts.get("hyperparameters"),
        golden_text=repr(golden["text"]),
        golden_values=", ".join(f"{value:.4f}" for value in output["first"][:4]),
        text_length=f"{text_length(folder, model.config, read_tokenizer(folder, model.config)):,}",
        parameters=f"{count_parameters(folder):,}",
        **describe_architecture(model),
    )


def gather_facts(source: Path, file: str | None = None, mteb_results: str | None = None) -> dict[str, Any]:
    """What is known about a checkpoint beside its own card: keys of `ModelCardData`, `text` and `hyperparameters`.

    Args:
        source: the checkpoint's folder. If a training run of this package wrote it, its settings are read.
        file: YAML with keys of `huggingface_hub.ModelCardData` (`license`, `language`, `datasets`, ...), and `text`,
            Markdown for the card. `eval_results` is a list of entries with the fields of `huggingface_hub.EvalResult`.
        mteb_results: folder with the model's results from `examples/run_mteb.py`.

    Raises:
        ValueError: on a misspelt key, and on results of another model.
    """
    facts = {"hyperparameters": settings_of_run(source), "eval_results": []}
    if file is not None:
        values = read_yaml(file)
        known = [*inspect.signature(ModelCardData).parameters, "text"]
        if unknown := [str(key) for key in values if key not in known]:
            raise ValueError(f"{file} has the unknown key {unknown[0]!r}{nearest(unknown[0], known)}")
        facts |= values
        facts["eval_results"] = [EvalResult(**result) for result in values.get("eval_results") or []]
    if mteb_results is not None:
        facts["eval_results"] += read_mteb_results(Path(mteb_results), source)
    return facts


def settings_of_run(source: Path) -> dict[str, Any]:
    """The numbers and names among the settings of the training run that wrote `source`, the `model` in its folder.

    Sentence Transformers has written those of its models into their card.
    """
    if source.name != "model" or sentence_class(source):
        return {}
    architecture = neobert_hf.NeoBERTConfig().to_dict()
    # Paths and fingerprints mean nothing elsewhere.
    return {
        name: value
        for name, value in stored_settings(source.parent).items()
        if name not in architecture
        and (isinstance(value, (bool, int, float)) or isinstance(value, str) and "/" not in value and len(value) < 32)
    }


def read_mteb_results(folder: Path, model: Path) -> list[EvalResult]:
    """One result for each task, all measured on this model in its present state.

    Raises:
        ValueError: naming the file of a result that is not of this model.
    """
    # Imported here: Sentence Transformers takes ten seconds, and most cards do not need it.
    from neobert_hf.embeddings.inference import embedding_fingerprint, load_embedding_model

    results = []
    fingerprints = {}
    for file in sorted(folder.glob("*.json")):
        result = read_json(file)
        if not result.keys() >= RESULT_KEYS:
            raise ValueError(f"{file} is not a result of examples/run_mteb.py: give the folder of one model's results.")
        settings, dtype = result["settings"], result["settings"]["dtype"]
        if dtype not in fingerprints:
            loaded = load_embedding_model(str(model), getattr(torch, dtype), device="cpu")
            fingerprints[dtype], own_length = embedding_fingerprint(loaded), loaded.max_seq_length
        if settings["model"] != fingerprints[dtype]:
            raise ValueError(
                f"{file} is not a result of {model} in its present state: weights, tokenizer or prompts were "
                "different. Evaluate this model."
            )
        name = f"MTEB {result['task']}"
        if settings["max_length"] != own_length:
            name += f", texts cut at {settings['max_length']:,} tokens"
        if dimensions := settings.get("truncate_dim"):
            name += f", first {dimensions:,} dimensions"
        results.append(
            EvalResult(
                task_type=result["type"].lower(),
                dataset_type=result["task"],
                dataset_name=name,
                dataset_revision=result["result"]["dataset_revision"],
                metric_type=result["metric"],
                metric_value=result["score"],
            )
        )
    if not results:
        raise ValueError(f"{folder} holds no results of examples/run_mteb.py: give the folder of one model in it.")
    return results


def join_metadata(data: ModelCardData, facts: dict[str, Any], repo_id: str) -> ModelCardData:
    """The metadata of the checkpoint's own card, in which facts replace what they name; scores with four digits."""
    for key, value in facts.items():
        if key not in ("text", "hyperparameters", "eval_results"):
            data[key] = value
    measured = {result.unique_identifier for result in facts["eval_results"]}
    kept = [result for result in data.eval_results or [] if result.unique_identifier not in measured]
    results = [*kept, *facts["eval_results"]]
    for result in results:
        if isinstance(result.metric_value, float):
            result.metric_value = round(result.metric_value, 4)
    if results:
        data.eval_results, data.model_name = results, repo_id.split("/")[-1]
    return data


def auto_class_of(cls: type[NeoBERTPreTrainedModel]) -> str:
    """The Auto class that loads models of a class."""
    references = cls.config_class.auto_classes.items()
    return next(auto_class for auto_class, reference in references if reference.split(".")[-1] == cls.__name__)


def count_parameters(folder: Path) -> int:
    """Of all modules: a linear layer of Sentence Transformers after the pooling has its own file."""
    return sum(tensor.numel() for file in folder.rglob("*.safetensors") for tensor in load_file(file).values())


def describe_context(config: NeoBERTContextualConfig) -> dict[str, Any]:
    """The template's variables for a contextual model."""
    beside = config.context_size + config.soft_prompts
    return {
        "size": f"{config.context_size:,}",
        "vectors": f"{beside:,}",
        # Embedding without a context works only if the model was trained for it.
        "optional": config.context_dropout > 0,
        "costs": {length: f"{(beside + length) / length:.1f}" for length in (20, 128, 512)},
    }


def describe_architecture(model: NeoBERTPreTrainedModel) -> dict[str, Any]:
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
