"""Finding a fact in a long text: a statement somewhere in it, a question at its end.

    ... The name of the new package is marble. ... The name of the new package is [MASK].

The mask stands for the word of the statement, so a model can only fill it by looking back to the statement, however far
away it is. Pseudo-perplexity hardly shows this: most tokens can be guessed from those around them.

References:
    The passkeys of Mohtashami & Jaggi, arXiv 2305.16300, turned into a question for a masked language model.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from neobert_hf.common.results import check_same_settings, read_result, write_result
from neobert_hf.evaluation.pseudo_perplexity.recipe import (
    PseudoPerplexityArguments,
    plan_models,
    score_all,
    tokenizer_of,
)
from neobert_hf.evaluation.pseudo_perplexity.report import curve_name, curves


FACT = "The name of the new package is {}."
# Number of candidate words, each a single token. By chance, one guess in so many is right.
CANDIDATES = 100
SHORTEST_WORD = 5


@dataclass
class Question:
    """A text with a fact, and a mask that asks for it.

    Args:
        ids: int64 (tokens,), with special tokens.
        answer: index of the right candidate.
    """

    ids: torch.Tensor
    answer: int


def question_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The sentence of the fact with a mask for its word, without special tokens."""
    return tokenizer(FACT.format(tokenizer.mask_token), add_special_tokens=False)["input_ids"]


def choose_candidates(tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> list[int]:
    """Ids of words that are one token in the sentence of the fact.

    Raises:
        ValueError: if the vocabulary has too few of them.
    """
    frame = question_ids(tokenizer)
    ids, found = sorted(tokenizer.get_vocab().values()), []
    random.Random(seed).shuffle(ids)
    for number in ids:
        word = tokenizer.decode([number]).strip()
        if len(word) < SHORTEST_WORD or not word.isalpha():
            continue
        sentence = tokenizer(FACT.format(word), add_special_tokens=False)["input_ids"]
        if sentence == [number if each == tokenizer.mask_token_id else each for each in frame]:
            found.append(number)
        if len(found) == CANDIDATES:
            return found
    raise ValueError(
        f"The vocabulary holds {len(found)} words of {SHORTEST_WORD} letters or more; finding facts needs {CANDIDATES}."
    )


def ask(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[list[int]],
    candidates: Sequence[int],
    length: int,
    count: int,
    seed: int = 0,
) -> list[Question]:
    """Questions in texts of a given length, with the facts at evenly spaced depths.

    Args:
        texts: ids without special tokens, each of `length` or more; they take turns.
        candidates: ids of the words to use in facts.
        length: tokens of each text, including fact, question and special tokens.
    """
    frame, generator, questions = question_ids(tokenizer), random.Random(seed), []
    around = tokenizer(tokenizer.mask_token)["input_ids"]
    for number in range(count):
        answer = generator.randrange(len(candidates))
        fact = [candidates[answer] if each == tokenizer.mask_token_id else each for each in frame]
        text = texts[number % len(texts)][: length - len(fact) - len(frame) - 2]
        place = round(len(text) * (number + 0.5) / count)
        ids = [around[0], *text[:place], *fact, *text[place:], *frame, around[-1]]
        questions.append(Question(torch.tensor(ids), answer))
    return questions


@torch.inference_mode()
def find_facts(
    model: PreTrainedModel, questions: Sequence[Question], candidates: Sequence[int], mask_id: int, batch_tokens: int
) -> dict[str, float]:
    """How often the right candidate is the likeliest, and how likely it is.

    Args:
        questions: all of the same length.
        batch_tokens: most tokens of a batch, but at least one text.

    Returns:
        `found`, the share of the questions, and `fact_loss`, the mean of -log P(answer) among the candidates in nats
        (the log of their number by chance).
    """
    losses, found = [], []
    rows = max(1, batch_tokens // len(questions[0].ids))
    for first in range(0, len(questions), rows):
        batch = questions[first : first + rows]
        ids = torch.stack([question.ids for question in batch]).to(model.device)
        answers = torch.tensor([question.answer for question in batch], device=model.device)
        # The question is the last mask: the text may hold others.
        places = [int((question.ids == mask_id).nonzero()[-1]) for question in batch]
        logits = model(input_ids=ids).logits[range(len(batch)), places].float()
        chances = logits[:, list(candidates)].log_softmax(-1)
        losses += (-chances.gather(1, answers[:, None])[:, 0]).tolist()
        found += (chances.argmax(-1) == answers).float().tolist()
    return {"found": statistics.mean(found), "fact_loss": statistics.mean(losses)}


def measure_reading(settings: PseudoPerplexityArguments, facts: int) -> dict[str, dict[int, dict[str, float]]]:
    """Measure pseudo-perplexity and fact finding, for every model with every RoPE setting at each length.

    Facts are put into the documents on which pseudo-perplexity is measured. An interrupted measurement resumes.

    Returns:
        By name of the model (and its RoPE setting) and length: `pseudo_perplexity`, `found` and `fact_loss`.
    """
    models, found = plan_models(settings), {}
    score_all(models, settings)
    points = curves([row for scaled in models for row in scaled.scores()])
    for scaled in models:
        tokenizer, longest = tokenizer_of(scaled.path), scaled.jobs[-1]
        candidates = choose_candidates(tokenizer)
        texts = [text.ids[1:-1].tolist() for text in longest.texts]
        model = None
        curve = found[curve_name({"model": scaled.name, "rope": scaled.rope})] = {}
        for job in scaled.jobs:
            file, identity = job.file.with_suffix(".facts.json"), job.settings | {"facts": facts}
            if not file.exists():
                model = model or scaled.load(settings)
                questions = ask(tokenizer, texts, candidates, job.cut, facts)
                results = find_facts(model, questions, candidates, job.mask_id, settings.batch_tokens)
                write_result(file, {"settings": identity, "results": results})
            stored = read_result(file, {"settings", "results"})
            check_same_settings(file, stored["settings"], identity)
            curve[job.cut] = stored["results"]
    return {
        name: {
            length: found[name][length] | {"pseudo_perplexity": point["pseudo_perplexity"]}
            for length, point in curve.items()
        }
        for name, curve in points.items()
    }
