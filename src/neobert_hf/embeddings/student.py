"""A small student whose vectors lie in its teacher's space: the second part of examples/distil.py.

The student is a NeoBERT with mean pooling, a linear layer to the teacher's dimensions, and vectors of length 1. It does
not begin with random weights:

1. The teacher's token states, divided by their root mean square length, are described in their principal axes.
2. The embedding of a token begins as the mean of the teacher's last states of that token, in the first `width - 1`
   axes. One more number makes all embeddings equally long, so that the final RMSNorm does not change them.
3. The linear layer begins as these axes, and every block begins with an output of zero.

So the student begins as a table of token vectors. With MiniLM as teacher, their means have a cosine of 0.70 to the
teacher's vectors before any training.
"""

from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from torch import nn

from neobert_hf import NeoBERTConfig, NeoBERTModel
from neobert_hf.common.tokenizers import clear_truncation
from neobert_hf.embeddings.prompts import prompt_of
from neobert_hf.embeddings.teacher import Answers, states_alone


# Of the similarities within a batch, in the loss.
TEMPERATURE = 0.05
# The state of a token alone counts as much as this many of its states in texts.
COUNT_ALONE = 3
# Texts by which the linear layer is fitted to a teacher whose vectors are not the means of its token states.
FITTED_TEXTS = 2_000


class Student(nn.Module):
    """The model in training, with its loss.

    Args:
        model: encoder, mean pooling, linear layer and normalisation.
        head: maps the encoder's token states to the teacher's, divided by `scale`. None if the model's own linear layer
            does, which is so if the teacher's vectors are the means of its token states. It is not in the saved model.

    Attributes:
        scale: root mean square length of the teacher's token states.
    """

    def __init__(self, model: SentenceTransformer, head: nn.Linear | None):
        super().__init__()
        self.model, self.head = model, head
        self.register_buffer("scale", torch.tensor(1.0))

    @property
    def encoder(self) -> NeoBERTModel:
        return self.model[0].model

    @property
    def linear(self) -> nn.Linear:
        return self.model[2].linear

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, states: torch.Tensor, vectors: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The loss of a batch, see the top of `distil.py`.

        Shape:
            `input_ids` and `attention_mask` (texts, longest); the teacher's `states` of all tokens, one text after the
            other, (tokens, teacher's width); its `vectors` (texts, dimensions).
        """
        outputs = self.model({"input_ids": input_ids, "attention_mask": attention_mask})
        found_states = (self.head or self.linear)(outputs["token_embeddings"][attention_mask.bool()])
        with torch.autocast(input_ids.device.type, enabled=False):
            found_states, found = found_states.float(), outputs["sentence_embedding"].float()
            wanted_states, wanted = states.float() / self.scale, F.normalize(vectors.float(), dim=1)
            of_states = (found_states - wanted_states).square().sum(1).mean()
            of_vectors = 1 - (found * wanted).sum(1).mean()
            near, right = log_similarities(found), log_similarities(wanted)
            of_similarities = F.kl_div(near, right, log_target=True, reduction="batchmean")
        return {"loss": of_states + 2 * of_vectors + 0.5 * of_similarities}


def log_similarities(vectors: torch.Tensor) -> torch.Tensor:
    """Logarithms of the softmax over the other texts of a batch, (texts, texts)."""
    cosines = vectors @ vectors.T / TEMPERATURE
    # Not minus infinity: its product with a probability of zero is not a number.
    return cosines.masked_fill(torch.eye(len(cosines), dtype=torch.bool, device=cosines.device), -1e4).log_softmax(1)


def build_student(sizes: dict[str, int], teacher: SentenceTransformer, answers: Answers) -> Student:
    """A student with the teacher's tokenizer, prompts and longest text, which begins as the top of this file describes.

    Args:
        sizes: of the encoder, as `NeoBERTConfig` calls them.
        answers: to the texts that it will learn from.
    """
    tokenizer, vocab_size = teacher.tokenizer, 1 + max(teacher.tokenizer.get_vocab().values())
    clear_truncation(tokenizer)
    config = NeoBERTConfig(vocab_size=vocab_size, max_length=512, pad_token_id=tokenizer.pad_token_id, **sizes)
    with TemporaryDirectory() as folder:
        NeoBERTModel(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        transformer = Transformer(folder, max_seq_length=teacher.max_seq_length)
    _, states, vector = answers[0]
    width = config.hidden_size
    dense = Dense(width, len(vector), bias=False, activation_function=nn.Identity())
    model = SentenceTransformer(
        modules=[transformer, Pooling(width, pooling_mode="mean"), dense, Normalize()],
        prompts=teacher.prompts,
        default_prompt_name=teacher.default_prompt_name,
        similarity_fn_name="cosine",
        device=teacher.device,
    )
    head = None if means_are_vectors(answers) else nn.Linear(width, states.shape[1], bias=False)
    student = Student(model, head).to(teacher.device)
    fill_table(student, teacher, answers)
    return student


def means_are_vectors(answers: Answers) -> bool:
    """Whether the teacher's vectors are the means of its token states, up to their length."""
    found = [answers[number] for number in range(min(len(answers), 100))]
    if found[0][1].shape[1] != len(found[0][2]):
        return False
    cosines = [F.cosine_similarity(states.float().mean(0), vector, dim=0) for _, states, vector in found]
    return min(cosines).item() > 0.999


@torch.no_grad()
def fill_table(student: Student, teacher: SentenceTransformer, answers: Answers) -> None:
    """Give the weights the values that the top of this file describes."""
    encoder, head = student.encoder, student.head or student.linear
    width, vocab_size = encoder.config.hidden_size, encoder.config.vocab_size
    means, axes, scale = _token_means(answers, states_alone(teacher, range(vocab_size)))
    student.scale.fill_(scale)
    axes = axes[:, : width - 1]
    rows = torch.zeros(vocab_size, width)
    rows[:, : axes.shape[1]] = means / scale @ axes
    rows[:, -1] = (1 - rows.square().sum(1)).clamp(min=1e-4).sqrt()
    encoder.encoder.weight.copy_(rows)
    # RMSNorm makes a row of length 1 as long as the square root of its width.
    weight = torch.zeros(len(axes), width)
    weight[:, : axes.shape[1]] = axes / width**0.5
    head.weight.copy_(weight)
    for block in encoder.transformer_encoder:
        block.wo.weight.zero_()
        block.ffn.w3.weight.zero_()
    if student.head is not None:
        _fit_linear_layer(student, answers)


def _token_means(answers: Answers, alone: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The mean state of each token, the principal axes of all states as columns, and the root mean square length of a
    state."""
    sums, counts = COUNT_ALONE * alone, torch.full((len(alone),), float(COUNT_ALONE))
    moments = torch.zeros(alone.shape[1], alone.shape[1], dtype=torch.float64)
    measured = 0
    for file in answers.files:
        states, ids = file["states"].float(), file["ids"].long()
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
    table, pooled, wanted = student.encoder.encoder.weight.cpu(), [], []
    for number in range(min(len(answers), FITTED_TEXTS)):
        ids, _, vector = answers[number]
        pooled.append(table[ids.long()].mean(0) * table.shape[1] ** 0.5)
        wanted.append(F.normalize(vector, dim=0))
    x, y = torch.stack(pooled).double(), torch.stack(wanted).double()
    gram = x.T @ x
    penalty = 1e-3 * gram.trace() / len(gram) * torch.eye(len(gram))
    student.linear.weight.copy_(torch.linalg.solve(gram + penalty, x.T @ y).T)


def cosine_to_teacher(model: SentenceTransformer, answers: Answers) -> float:
    """The mean cosine of the vectors of a student and its teacher, where both tokenise the texts themselves."""
    cosines = []
    for is_query, kind in ((False, "document"), (True, "query")):
        rows = [row for row, text in enumerate(answers.texts) if text.is_query == is_query]
        words = [answers.texts[row].words for row in rows]
        found = model.encode(words, prompt=prompt_of(model, kind), convert_to_tensor=True).float().cpu()
        cosines.append(F.cosine_similarity(found, torch.stack([answers[row][2] for row in rows])))
    return torch.cat(cosines).mean().item()
