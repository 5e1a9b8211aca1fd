"""A small student whose vectors lie in its teacher's space: the second half of examples/distil.py.

The student is a NeoBERT with mean pooling, a linear layer to the teacher's dimensions, and vectors of length 1. It does
not begin with random weights:

1. The teacher's token states, divided by their root mean square length, are described in their principal axes.
2. The embedding of a token begins as the mean of the teacher's last states of that token, in the first `width - 1`
   axes. One more number makes all embeddings equally long, so that the final RMSNorm does not change them.
3. The linear layer begins as these axes, and every block begins with an output of zero.

So the student begins as a table of token vectors. With MiniLM as teacher, their means have a cosine of 0.70 to the
teacher's vectors before any training.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from torch import nn
from transformers import PreTrainedTokenizerBase

from neobert_hf import NeoBERTConfig, NeoBERTModel
from neobert_hf.common.tokenizers import clear_truncation, load_tokenizer
from neobert_hf.embeddings.inference import prompt_of
from neobert_hf.embeddings.teacher import Answers, Text, states_alone


# The state of a token alone counts as much as this many of its states in texts.
COUNT_ALONE = 3
# Texts by which the linear layer is fitted to a teacher whose vectors are not the means of its token states.
FITTED_TEXTS = 2_000


def used_entries(tokenizer: PreTrainedTokenizerBase, answers: Answers) -> np.ndarray:
    """The ids that occur in the texts, those of special tokens and of single characters, in ascending order.

    With all single characters, no word becomes [UNK] that was none before.
    """
    used = {*tokenizer.all_special_ids}.union(*(np.unique(file["ids"].numpy()).tolist() for file in answers.files))
    used |= {number for entry, number in tokenizer.get_vocab().items() if len(entry.removeprefix("##")) == 1}
    return np.array(sorted(used))


def prune_vocabulary(tokenizer: PreTrainedTokenizerBase, kept: np.ndarray) -> PreTrainedTokenizerBase:
    """A WordPiece tokenizer with a part of the entries, which are numbered anew in the same order.

    WordPiece always takes the longest entry that fits. So a text of which the old tokenizer makes kept entries only is
    divided in the same way by the new one.

    Args:
        kept: ids of the entries to keep, in ascending order, with those of all special tokens.

    Raises:
        ValueError: if the tokenizer is not a WordPiece tokenizer.
    """
    numbers = {int(old): new for new, old in enumerate(kept)}
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        file = Path(folder) / "tokenizer.json"
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["model"]["type"] != "WordPiece":
            raise ValueError(
                f"`vocabulary` is 'used' and the teacher's tokenizer is {content['model']['type']}; only WordPiece can "
                "be pruned: set `vocabulary` to 'all'."
            )
        vocab = content["model"]["vocab"]
        content["model"]["vocab"] = {entry: numbers[old] for entry, old in vocab.items() if old in numbers}
        content["added_tokens"] = [
            each | {"id": numbers[each["id"]]} for each in content["added_tokens"] if each["id"] in numbers
        ]
        # The ids of [CLS] and [SEP], which are put around a text.
        processor = content["post_processor"] or {}
        for token in processor.get("special_tokens", {}).values():
            token["ids"] = [numbers[old] for old in token["ids"]]
        for name in {"cls", "sep"} & processor.keys():
            processor[name][1] = numbers[processor[name][1]]
        file.write_text(json.dumps(content), encoding="utf-8")
        (Path(folder) / "vocab.txt").unlink(missing_ok=True)
        return load_tokenizer(folder)


@dataclass
class Student:
    """The model in training.

    Args:
        model: encoder, mean pooling, linear layer and normalisation.
        head: maps the encoder's token states to the teacher's, divided by `scale`. It is the model's own linear layer
            if the teacher's vectors are the means of its token states; otherwise it is left out of the saved model.
        numbers: the student's id of each of the teacher's ids, or -1.
        scale: root mean square length of the teacher's token states.
    """

    model: SentenceTransformer
    head: nn.Linear
    numbers: torch.Tensor
    scale: float = 1.0

    @property
    def encoder(self) -> NeoBERTModel:
        return self.model[0].model

    @property
    def linear(self) -> nn.Linear:
        return self.model[2].linear

    def read(self, ids: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token states in the teacher's space, (tokens of all texts, teacher's width), and vectors of length 1,
        (texts, dimensions), of texts given as the teacher's token ids."""
        rows = [self.numbers[each.long()] for each in ids]
        padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.encoder.config.pad_token_id)
        lengths = torch.tensor([len(row) for row in rows])
        mask = torch.arange(padded.shape[1])[None] < lengths[:, None]
        inputs = {"input_ids": padded, "attention_mask": mask.long()}
        outputs = self.model({name: each.to(self.model.device) for name, each in inputs.items()})
        states = outputs["token_embeddings"][mask.to(self.model.device)]
        return self.head(states), outputs["sentence_embedding"]

    def state_dict(self) -> dict:
        return {"model": self.model.state_dict(), "head": self.head.state_dict(), "scale": self.scale}

    def load_state_dict(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.head.load_state_dict(state["head"])
        self.scale = state["scale"]


def build_student(
    sizes: dict[str, int], kept: np.ndarray | None, teacher: SentenceTransformer, answers: Answers
) -> Student:
    """A student with the teacher's tokenizer, prompts and longest text. Its weights are still random.

    Args:
        sizes: of the encoder, as `NeoBERTConfig` calls them.
        kept: as for `prune_vocabulary`; None for the whole vocabulary.
    """
    clear_truncation(teacher.tokenizer)
    tokenizer = teacher.tokenizer if kept is None else prune_vocabulary(teacher.tokenizer, kept)
    old_size = 1 + max(teacher.tokenizer.get_vocab().values())
    numbers = torch.arange(old_size)
    if kept is not None:
        numbers = torch.full((old_size,), -1)
        numbers[torch.from_numpy(kept)] = torch.arange(len(kept))
    config = NeoBERTConfig(
        vocab_size=old_size if kept is None else len(kept), max_length=512, pad_token_id=tokenizer.pad_token_id, **sizes
    )
    with TemporaryDirectory() as folder:
        NeoBERTModel(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        transformer = Transformer(folder, max_seq_length=teacher.max_seq_length)
    _, states, vector = answers[0]
    width = config.hidden_size
    dense = Dense(width, len(vector), bias=False, activation_function=nn.Identity())
    head = dense.linear if means_are_vectors(answers) else nn.Linear(width, states.shape[1], bias=False)
    model = SentenceTransformer(
        modules=[transformer, Pooling(width, pooling_mode="mean"), dense, Normalize()],
        prompts=teacher.prompts,
        default_prompt_name=teacher.default_prompt_name,
        similarity_fn_name="cosine",
        device=teacher.device,
    )
    return Student(model, head.to(teacher.device), numbers)


def means_are_vectors(answers: Answers) -> bool:
    """Whether the teacher's vectors are the means of its token states, up to their length."""
    found = [answers[number] for number in range(min(len(answers.lengths), 100))]
    if found[0][1].shape[1] != len(found[0][2]):
        return False
    cosines = [F.cosine_similarity(states.float().mean(0), vector, dim=0) for _, states, vector in found]
    return min(cosines).item() > 0.999


@torch.no_grad()
def initialise(student: Student, teacher: SentenceTransformer, answers: Answers) -> None:
    """Begin as the table of token vectors that the top of this file describes."""
    old_ids = torch.argsort(student.numbers, stable=True)[(student.numbers < 0).sum() :]
    means, axes, student.scale = _token_means(answers, states_alone(teacher, old_ids.tolist()), student.numbers)
    width = student.encoder.config.hidden_size
    axes = axes[:, : width - 1]
    rows = torch.zeros(len(means), width)
    rows[:, : axes.shape[1]] = means / student.scale @ axes
    rows[:, -1] = (1 - rows.square().sum(1)).clamp(min=1e-4).sqrt()
    student.encoder.encoder.weight.copy_(rows)
    # RMSNorm makes a row of length 1 as long as the square root of its width.
    weight = torch.zeros(len(axes), width)
    weight[:, : axes.shape[1]] = axes / width**0.5
    student.head.weight.copy_(weight)
    for block in student.encoder.transformer_encoder:
        block.wo.weight.zero_()
        block.ffn.w3.weight.zero_()
    if student.head is not student.linear:
        _fit_linear_layer(student, answers)


def _token_means(
    answers: Answers, alone: torch.Tensor, numbers: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The mean state of each of the student's tokens, the principal axes of all states as columns, and the root mean
    square length of a state."""
    sums, counts = COUNT_ALONE * alone, torch.full((len(alone),), float(COUNT_ALONE))
    moments = torch.zeros(alone.shape[1], alone.shape[1], dtype=torch.float64)
    measured = 0
    for file in answers.files:
        states, ids = file["states"].float(), numbers[file["ids"].long()]
        sums.index_add_(0, ids, states)
        counts += torch.bincount(ids, minlength=len(alone))
        # Every fourth state is enough for the axes, and takes a quarter of the time.
        some = states[::4]
        moments += (some.T @ some).double()
        measured += len(some)
    _, axes = torch.linalg.eigh(moments)
    return sums / counts[:, None], axes.flip(1).float(), (moments.trace() / measured).sqrt().item()


def _fit_linear_layer(student: Student, answers: Answers) -> None:
    """The linear layer after the pooling that brings the vectors nearest to the teacher's, by ridge regression."""
    numbers = range(min(len(answers.lengths), FITTED_TEXTS))
    pooled, wanted = [], []
    for number in numbers:
        ids, _, vector = answers[number]
        rows = F.embedding(student.numbers[ids.long()].to(student.model.device), student.encoder.encoder.weight)
        pooled.append(rows.mean(0) * rows.shape[1] ** 0.5)
        wanted.append(F.normalize(vector, dim=0))
    x, y = torch.stack(pooled).double().cpu(), torch.stack(wanted).double()
    gram = x.T @ x
    penalty = 1e-3 * gram.trace() / len(gram) * torch.eye(len(gram))
    student.linear.weight.copy_(torch.linalg.solve(gram + penalty, x.T @ y).T)


def cosine_to_teacher(student: Student, texts: list[Text], answers: Answers) -> float:
    """The mean cosine of the vectors of student and teacher, where both tokenise the texts themselves."""
    model, cosines = student.model, []
    for is_query, kind in ((False, "document"), (True, "query")):
        rows = [row for row, text in enumerate(texts) if text.is_query == is_query]
        words = [texts[row].words for row in rows]
        found = model.encode(words, prompt=prompt_of(model, kind), convert_to_tensor=True).float().cpu()
        cosines.append(F.cosine_similarity(found, torch.stack([answers[row][2] for row in rows])))
    return torch.cat(cosines).mean().item()
