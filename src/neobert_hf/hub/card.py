"""The model card: what the checkpoint's own card says, joined by the template `hub_card.md`.

The checkpoint's own card is that of Sentence Transformers, of a recipe of this package, or of the user. Its text stays
as it is; what follows `MARK` is written anew whenever the model is published. Metadata are joined key by key.
"""

import inspect
import re
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from safetensors.torch import load_file

import neobert_hf
from neobert_hf import NeoBERTContextualConfig, NeoBERTPreTrainedModel
from neobert_hf.common.settings import nearest, read_yaml
from neobert_hf.hub.model_folder import sentence_class


TEMPLATE = Path(neobert_hf.__file__).with_name("hub_card.md")
MARK = "<!-- Written by `neobert-hf publish`, which replaces all that follows. What is above stays. -->"

# The Hub's name for the task of a class.
PIPELINE_TAGS = {
    "NeoBERTModel": "feature-extraction",
    "NeoBERTForMaskedLM": "fill-mask",
    "NeoBERTForSequenceClassification": "text-classification",
    "NeoBERTForTokenClassification": "token-classification",
    "NeoBERTForQuestionAnswering": "question-answering",
    "NeoBERTForMultipleChoice": "multiple-choice",
    "SentenceTransformer": "sentence-similarity",
    "SparseEncoder": "feature-extraction",
    "MultiVectorEncoder": "feature-extraction",
    "CrossEncoder": "text-ranking",
    # Not `sentence-similarity`: the Hub's tools that compare sentences pass no context.
    "NeoBERTContextualModel": "feature-extraction",
}


def build_card(
    folder: Path, model: NeoBERTPreTrainedModel, text_length: int, repo_id: str, package_url: str, facts: dict[str, Any]
) -> ModelCard:
    """The card of a built folder, which holds weights and, if there is one, the checkpoint's own card.

    Args:
        model: the model of the folder, in its own dtype.
        text_length: the most tokens of a text.
        package_url: where this package can be cloned from.
        facts: from `read_facts`. Its results replace those of the same task and data in the own card.
    """
    class_name, loader = type(model).__name__, sentence_class(folder)
    is_contextual = isinstance(model.config, NeoBERTContextualConfig)

    # 1. What is there, and what the user says
    file = folder / "README.md"
    own = ModelCard.load(file) if file.is_file() else ModelCard("---\nlibrary_name: transformers\n---\n")
    own_text = own.text.partition(MARK)[0].strip() or f"# {repo_id}"
    if (text := facts.get("text", "").strip()) and text not in own_text:
        title, _, rest = own_text.partition("\n")
        own_text = f"{title}\n\n{text}\n{rest}".rstrip()
    data = own.data
    for key in facts.keys() - {"text", "eval_results"}:
        data[key] = facts[key]
    add_results(data, facts["eval_results"], repo_id)

    # 2. What the model is
    data.library_name = "sentence-transformers" if loader else "transformers"
    data.pipeline_tag = PIPELINE_TAGS[class_name if is_contextual else loader or class_name]
    tags = [*(data.tags or []), "neobert", *(["contextual"] if is_contextual else [])]
    data.tags = list(dict.fromkeys(tags))
    references = model.config.auto_classes.items()
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        own_text=own_text,
        mark=MARK,
        repo_id=repo_id,
        package_url=package_url,
        auto_class=next(name for name, reference in references if reference.split(".")[-1] == class_name),
        sentence_class=loader,
        config=model.config,
        is_contextual=is_contextual,
        text_length=f"{text_length:,}",
        parameters=f"{count_parameters(folder):,}",
        dtype=str(model.dtype).removeprefix("torch."),
    )


def dead_links(folder: Path) -> list[str]:
    """What the card of a folder links to as a file beside it, and the folder does not hold."""
    links = re.findall(r"\]\(([^)#\s]+)", (folder / "README.md").read_text(encoding="utf-8"))
    return [link for link in links if not re.match(r"[a-z]+:", link) and not (folder / link).exists()]


def add_results(data: ModelCardData, results: list[EvalResult], repo_id: str) -> None:
    """Add results to a card's metadata, in place of earlier ones of the same task and data; scores with four digits."""
    joined = {result.unique_identifier: result for result in [*(data.eval_results or []), *results]}
    for result in joined.values():
        if isinstance(result.metric_value, float):
            result.metric_value = round(result.metric_value, 4)
    if joined:
        data.eval_results, data.model_name = list(joined.values()), repo_id.split("/")[-1]


def count_parameters(folder: Path) -> int:
    """Of all modules: a linear layer of Sentence Transformers after the pooling has its own file."""
    return sum(tensor.numel() for file in folder.rglob("*.safetensors") for tensor in load_file(file).values())


def read_facts(file: str | None) -> dict[str, Any]:
    """What a user says about a model, in YAML: keys of `huggingface_hub.ModelCardData`, and `text`, in Markdown.

    Returns:
        The keys of the file, and `eval_results`, which may be empty.

    Raises:
        ValueError: on a misspelt key, also of a result.
    """
    facts = read_yaml(file, "card") if file else {}
    known = [*inspect.signature(ModelCardData).parameters, "text"]
    if unknown := [str(key) for key in facts if key not in known]:
        raise ValueError(f"{file} has the unknown key {unknown[0]!r}{nearest(unknown[0], known)}")
    try:
        return facts | {"eval_results": [EvalResult(**result) for result in facts.get("eval_results") or []]}
    except TypeError as error:  # A key that is missing or misspelt.
        raise ValueError(f"{file}: `eval_results` holds no `huggingface_hub.EvalResult`: {error}.") from error
