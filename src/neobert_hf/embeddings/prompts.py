"""The prompts that a fine-tuned model is saved with, so that it is used with the prompts of its training.

Sentence Transformers keeps them in `config_sentence_transformers.json`, by name:

| Name | |
| --- | --- |
| `query` | what `encode_query`, search and MTEB put before a query: the instruction of one of the datasets |
| `document` | what they put before a document: the same dataset's `document_instruction`, nothing if it has none |
| the name of a dataset | its instruction, if there are several datasets: `encode_query(texts, prompt_name="FEVER")` |
| that name with `-document` | the same for documents |

Each prompt ends with the separator between instruction and text in training (`separator` in the file of datasets).

`encode` puts nothing before a text. A reranker has one method for all texts, and each of its pairs has a query, so
`predict` uses `query` by default (`default_prompt_name`).
"""

from pathlib import Path
from typing import Literal

from sentence_transformers import CrossEncoder
from sentence_transformers.base.model import BaseModel

from neobert_hf.embeddings.contextual import is_contextual
from neobert_hf.embeddings.datasets import PairDataset
from neobert_hf.embeddings.inference import prompt_of
from neobert_hf.embeddings.instructions import describe_prompts
from neobert_hf.embeddings.recipe import TrainingData


def dataset_of_queries(data: TrainingData) -> tuple[PairDataset, str]:
    """The training dataset whose instruction is the prompt `query`, and the reason, in words.

    It is the first of these that exists: the dataset that is marked as the `default`, a dataset with the instruction
    that retrieval is evaluated with, the largest dataset.
    """
    datasets = list(data.descriptions.values())
    if len(datasets) == 1:
        return datasets[0], "it is the only dataset"
    for dataset in datasets:
        if dataset.default:
            return dataset, "it is the `default`"
    for dataset in datasets:
        if "retrieval" in data.evaluation and dataset.prompt == data.evaluation["retrieval"].prompt:
            return dataset, "retrieval is evaluated with it"
    return max(datasets, key=lambda dataset: len(data.train[dataset.name])), "it is the largest dataset"


def prompts_to_save(data: TrainingData) -> dict[str, str]:
    """The prompts by the names that the model keeps them under."""
    prompts = {}
    if len(data.descriptions) > 1:
        # Also an empty one: for a task that has the name of a dataset, MTEB's own wrapper would otherwise put the query
        # prompt before documents, too.
        prompts |= {f"{name}-document": dataset.document_prompt for name, dataset in data.descriptions.items()}
        prompts |= {name: dataset.prompt for name, dataset in data.descriptions.items()}
    default, _ = dataset_of_queries(data)
    return prompts | {"query": default.prompt, "document": default.document_prompt}


def set_prompts(model: BaseModel, data: TrainingData) -> None:
    """Give a model the prompts that it is about to be trained with, in place of those that it came with."""
    model.prompts = prompts_to_save(data)
    model.default_prompt_name = "query" if isinstance(model, CrossEncoder) else None


def describe_choice(data: TrainingData) -> str:
    """The prompt of queries and where it is from, and whether retrieval is evaluated with another one."""
    dataset, reason = dataset_of_queries(data)
    line = f"queries get the prompt {dataset.prompt!r}, that of {dataset.name}: {reason}"
    retrieval = data.evaluation.get("retrieval")
    if retrieval is not None and retrieval.prompt != dataset.prompt:
        line += f"\nnote: retrieval is evaluated with another prompt than the model's own: {retrieval.prompt!r}"
    return line


def add_to_card(card: Path, model: BaseModel, data: TrainingData) -> None:
    """Put the prompts, and which dataset `query` is from, into the card that Sentence Transformers has written."""
    kind = "contextual" if is_contextual(model) else type(model).__name__
    if not (prompts := describe_prompts(model.prompts, kind)):
        return
    dataset, reason = dataset_of_queries(data)
    section = f"### Prompts\n\n{prompts}\n\n`query` is the instruction of {dataset.name}: {reason}.\n\n"
    before, heading, after = card.read_text(encoding="utf-8").partition("## Training Details\n")
    card.write_text(before + section + heading + after, encoding="utf-8")


def prompts_of_helper(who: str, model: BaseModel, description: PairDataset) -> tuple[str, str]:
    """The prompts with which a helper, such as a miner, reads the queries and documents of a dataset."""
    name = description.name
    if model.prompts.get(name) == description.prompt and f"{name}-document" in model.prompts:
        # It was trained on this dataset among others, and gets the prompts of that training, even an empty one.
        return description.prompt, model.prompts[f"{name}-document"]
    query = prompt_of_helper(who, model, description.prompt, "query")
    return query, prompt_of_helper(who, model, description.document_prompt, "document")


def prompt_of_helper(who: str, model: BaseModel, prompt: str, kind: Literal["query", "document"]) -> str:
    """This prompt if the helper was saved with it, otherwise its own for this kind of text. A note says so."""
    if prompt and prompt in model.prompts.values():
        return prompt
    own = prompt_of(model, kind)
    if own != prompt:
        print(f"note: the {who} reads each {kind} with its own prompt {own!r}, not with {prompt!r}.", flush=True)
    return own
