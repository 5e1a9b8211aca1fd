"""A small student whose vectors lie in its teacher's space, and its loss.

A student may begin as some layers of the teacher, and then keeps the teacher's pooling, also when it goes on. Any
other is a NeoBERT with mean pooling, a linear layer to the teacher's dimensions, and vectors of length 1. A new one
does not begin with random weights:

1. The teacher's token states, divided by their root mean square length, are described in their principal axes.
2. The embedding of a token begins as the mean of the teacher's last states of that token, in the first `width - 1`
   axes. One more number makes all embeddings equally long, so that the final RMSNorm does not change them.
3. The linear layer begins as these axes, and every block begins with an output of zero.

So the student begins as a table of token vectors. With MiniLM as teacher, their means have a cosine of 0.70 to the
teacher's vectors before any training.

The loss is the sum of four parts: the squared distance of the token states, whose root mean square length is 1; twice
one minus the cosine of the vectors, as in Sentence Transformers' `EmbedDistillLoss`; and half the KL divergence of the
similarities within a batch, and to the teacher's vectors of other texts. With vectors alone, the cosine to MiniLM ended
at 0.737 instead of 0.816. Cosines do not depend on lengths, so teachers may normalise their vectors or not.

A student that is trained already learns more about search from the texts nearest to each, which a search must tell
apart: with `nearest_texts`, the last part compares each text with those, and weighs four times as much.

References:
    https://arxiv.org/abs/1909.10351 (TinyBERT: hidden states), https://arxiv.org/abs/2004.09813 (vectors), and
    https://arxiv.org/abs/2010.11386 (KL of similarities in a batch).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from torch import nn
from tqdm.auto import tqdm
from transformers import AutoTokenizer, BertModel, PreTrainedModel, PreTrainedTokenizerBase

from neobert_hf import NeoBERTConfig, NeoBERTModel
from neobert_hf.common.fingerprints import weights_fingerprint
from neobert_hf.common.settings import check_numbers
from neobert_hf.common.tokenizers import clear_truncation
from neobert_hf.data.tokenizer import INPUTS
from neobert_hf.distillation.teacher import Targets, states_alone
from neobert_hf.embeddings.models import load_trained_model
from neobert_hf.embeddings.prompts import prompt_of
from neobert_hf.embeddings.space import teacher_of
from neobert_hf.training.arguments import fast_bfloat16


# Of the similarities in the loss. 0.05 and 0.03 make their part of it so large that vectors come less near to the
# teacher's: cosine 0.803 and 0.763 in place of 0.832, and 0.44 and 0.42 of its ten best definitions in place of 0.46.
TEMPERATURE = 0.1
# So many other texts, drawn for each batch, are compared with its texts. With them, at a temperature of 0.05, a student
# without layers found 0.303 in place of 0.292 of the ten passages that its teacher finds, one of two layers 0.400 in
# place of 0.397.
OTHERS = 4_096
# In place of them, the nearest texts and as many others are compared at this temperature and with this weight.
NEAREST_TEMPERATURE, NEAREST_WEIGHT = 0.03, 2.0
# Texts whose nearest are looked for at a time.
ROWS = 512
# In which the texts of a batch are read by a student that computes padding.
PARTS = 5
# The state of a token alone counts as much as this many of its states in texts.
COUNT_ALONE = 3
# Texts by which the linear layer is fitted to a teacher whose vectors are not the means of its token states.
FITTED_TEXTS = 2_000


@dataclass
class StudentSettings:
    """What learns: a new encoder of these sizes, or a model that exists."""

    student: str | None = field(
        default=None,
        metadata={
            "help": "an embedding model of the teacher's vocabulary to go on with: on a NeoBERT, or on a BERT the "
            "teacher or a student that began as it; its sizes count",
            "path": "or Hub id",
        },
    )
    layers: list[int] = field(
        default_factory=list, metadata={"help": "the layers of `student` that are kept, from 0; all if none is named"}
    )
    vocabulary: Literal["teacher", "used"] = field(
        default="teacher", metadata={"help": "of a new student: the teacher's, or what the texts use of it (WordPiece)"}
    )
    num_hidden_layers: int = field(default=1, metadata={"help": "0 for a mere table of token vectors"})
    hidden_size: int = field(default=384, metadata={"help": "width of the student"})
    num_attention_heads: int = field(default=6, metadata={"help": "must divide the width"})
    intermediate_size: int = field(default=1152, metadata={"help": "width of the MLP; SwiGLU uses two thirds of it"})

    def __post_init__(self):
        ranges = dict.fromkeys(("hidden_size", "num_attention_heads", "intermediate_size"), "1 or more")
        check_numbers(self, ranges | {"num_hidden_layers": "0 or more", "layers": "0 or more"})
        if self.student is None:
            # Refuses a width that does not fit.
            NeoBERTConfig(**self.sizes())

    def sizes(self) -> dict[str, int]:
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        return {name: getattr(self, name) for name in names}


class Student(nn.Module):
    """The model in training, with its loss.

    Args:
        model: encoder, pooling, perhaps a linear layer, and normalisation.
        head: maps the encoder's token states to the teacher's, divided by `scale`. None if the model's own linear layer
            does, which is so if the teacher's vectors are the means of its token states, or if the states need no map.
            It is not in the saved model.
        targets: of the texts that it learns from.
        entries: the ids of the teacher's vocabulary that it knows, in ascending order.
        nearest_texts: with so many texts that are nearest to it for the teacher, and as many others, each is compared;
            0 for `OTHERS` alone.
        of_teacher: whether the model is made of layers of the teacher, whose states need no map.

    Attributes:
        numbers: the student's id of each of the teacher's ids.
        scale: root mean square length of the teacher's token states.
        others: the teacher's vectors of all texts that the student learns from, (all texts, dimensions), of length 1.
        nearest: the numbers of the texts nearest to each, (all texts, `nearest_texts`), itself among them. None if 0.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        head: nn.Linear | None,
        targets: Targets,
        entries: Sequence[int],
        nearest_texts: int = 0,
        of_teacher: bool = False,
    ):
        super().__init__()
        self.model, self.head, self.of_teacher = model, head, of_teacher
        numbers = torch.zeros(entries[-1] + 1, dtype=torch.long)
        numbers[list(entries)] = torch.arange(len(entries))
        self.register_buffer("numbers", numbers, persistent=False)
        vectors = torch.cat([file["vectors"] for file in targets.files]).to(model.device)
        self.register_buffer("others", F.normalize(vectors, dim=1), persistent=False)
        nearest = find_nearest(self.others, nearest_texts) if nearest_texts else None
        self.register_buffer("nearest", nearest, persistent=False)
        self.register_buffer("scale", torch.tensor(1.0))

    @property
    def encoder(self) -> PreTrainedModel:
        return self.model[0].model

    @property
    def linear(self) -> nn.Linear:
        return self.model[2].linear

    def forward(
        self,
        numbers: torch.Tensor,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        states: torch.Tensor,
        vectors: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """The loss of a batch, see the top of this file.

        Shape:
            `numbers` of the texts in `Targets` (texts,), which are sorted by length; the teacher's `input_ids` and
            `attention_mask` (texts, longest); its `states` of all tokens, one text after the other, (tokens, teacher's
            width); its `vectors` (texts, dimensions).
        """
        found_states, found = self.read(self.numbers[input_ids], attention_mask)
        found_states = found_states / self.scale if self.of_teacher else (self.head or self.linear)(found_states)
        with torch.autocast(input_ids.device.type, enabled=False):
            found_states, found = found_states.float(), found.float()
            wanted_states, wanted = states.float() / self.scale, F.normalize(vectors.float(), dim=1)
            of_states = (found_states - wanted_states).square().sum(1).mean()
            of_vectors = 1 - (found * wanted).sum(1).mean()
            itself = torch.eye(len(found), dtype=torch.bool, device=found.device)
            within_batch = difference(found @ found.T, wanted @ wanted.T, itself, TEMPERATURE)
            to_others = self.difference_to_others(numbers, found, wanted)
        return {"loss": of_states + 2 * of_vectors + 0.5 * within_batch + to_others}

    def read(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The encoder's states of all tokens (tokens, width), and the vectors (texts, dimensions)."""
        # BERT computes padding, of which texts of about one length have little.
        parts = 1 if isinstance(self.encoder, NeoBERTModel) else PARTS
        states, vectors = [], []
        for ids, mask in zip(input_ids.chunk(parts), attention_mask.chunk(parts)):
            mask = mask[:, : mask.sum(1).max()]
            outputs = self.model({"input_ids": ids[:, : mask.shape[1]], "attention_mask": mask})
            states.append(outputs["token_embeddings"][mask.bool()])
            vectors.append(outputs["sentence_embedding"])
        return torch.cat(states), torch.cat(vectors)

    def difference_to_others(self, numbers: torch.Tensor, found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """How differently student and teacher see the teacher's vectors of other texts, with its weight in the loss."""
        count = OTHERS if self.nearest is None else self.nearest.shape[1]
        others = self.others[torch.randint(len(self.others), (count,), device=found.device)]
        of_student, of_teacher = found @ others.T, wanted @ others.T
        if self.nearest is not None:
            near = self.others[self.nearest[numbers]].transpose(1, 2)
            of_student = torch.cat([(found[:, None] @ near)[:, 0], of_student], dim=1)
            of_teacher = torch.cat([(wanted[:, None] @ near)[:, 0], of_teacher], dim=1)
        itself = of_teacher > 0.9999
        if self.nearest is None:
            return 0.5 * difference(of_student, of_teacher, itself, TEMPERATURE)
        return NEAREST_WEIGHT * difference(of_student, of_teacher, itself, NEAREST_TEMPERATURE)


def find_nearest(vectors: torch.Tensor, count: int) -> torch.Tensor:
    """The numbers of the `count` nearest vectors of each, by their cosine, or of all if there are fewer."""
    count = min(count, len(vectors))
    # The time grows with the square of the texts. Of 128 found so among 5,395, 127.2 were those of float32 in the mean.
    vectors = vectors.bfloat16() if fast_bfloat16(vectors.device) else vectors
    parts = tqdm(vectors.split(ROWS), unit=" parts", desc="the nearest texts are found")
    return torch.cat([(rows @ vectors.T).topk(count).indices for rows in parts])


def difference(found: torch.Tensor, wanted: torch.Tensor, itself: torch.Tensor, temperature: float) -> torch.Tensor:
    """The KL divergence of two distributions over other texts, given as cosines, (texts, others); the mean over texts.

    Args:
        itself: where a text would be compared with itself, which does not count.
    """

    # Not minus infinity: its product with a probability of zero is not a number.
    def logarithms(cosines: torch.Tensor) -> torch.Tensor:
        return (cosines / temperature).masked_fill(itself, -1e4).log_softmax(1)

    return F.kl_div(logarithms(found), logarithms(wanted), log_target=True, reduction="batchmean")


def build_student(
    settings: StudentSettings,
    teacher: SentenceTransformer,
    targets: Targets,
    start: SentenceTransformer | None = None,
    nearest_texts: int = 0,
    of_teacher: bool = False,
) -> Student:
    """A student with the teacher's prompts; a new one begins as the top of this file describes.

    Args:
        targets: of the texts that it will learn from.
        start: the model that it begins as, from `load_student`.
        nearest_texts: see `Student`.
        of_teacher: whether `start` is the teacher, or some of its layers.
    """

    def model_of(modules: list[nn.Module]) -> SentenceTransformer:
        return SentenceTransformer(
            modules=modules,
            prompts=teacher.prompts,
            default_prompt_name=teacher.default_prompt_name,
            similarity_fn_name="cosine",
            device=teacher.device,
        )

    entries: Sequence[int] = range(vocabulary_size(teacher.tokenizer))
    if of_teacher:
        normalised = [*start] if isinstance(start[-1], Normalize) else [*start, Normalize()]
        student = Student(model_of(normalised), None, targets, entries, nearest_texts, of_teacher).to(teacher.device)
        student.scale.fill_(length_of_states(targets))
        return student
    if start is not None:
        transformer, *others = start
    else:
        if settings.vocabulary == "used":
            entries = used_entries(teacher, targets)
        transformer, others = new_encoder(settings.sizes(), teacher, entries), []
    width, (_, _, states, vector) = transformer.model.config.hidden_size, targets[0]
    fitting = [module for module in others if isinstance(module, Dense) and module.out_features == len(vector)]
    dense = fitting[0] if fitting else Dense(width, len(vector), bias=False, activation_function=nn.Identity())
    model = model_of([transformer, Pooling(width, pooling_mode="mean"), dense, Normalize()])
    head = None if means_are_vectors(targets) else nn.Linear(width, states.shape[1], bias=False)
    student = Student(model, head, targets, entries, nearest_texts).to(teacher.device)
    if start is None:
        fill_table(student, teacher, targets, entries)
    else:
        student.scale.fill_(length_of_states(targets))
        if head is not None:
            fit_linear_layer(head, student, targets, of_states=True)
    # With one linear layer, `fill_table` has filled it.
    if not fitting and (start is not None or head is not None):
        fit_linear_layer(dense.linear, student, targets, of_states=head is None)
    return student


def new_encoder(sizes: dict[str, int], teacher: SentenceTransformer, entries: Sequence[int]) -> Transformer:
    """A NeoBERT of random weights with these entries of the teacher's tokenizer."""
    tokenizer = teacher.tokenizer
    clear_truncation(tokenizer)
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        if len(entries) < vocabulary_size(tokenizer):
            file = Path(folder, "tokenizer.json")
            file.write_text(json.dumps(with_entries(json.loads(file.read_text(encoding="utf-8")), entries)))
        saved = AutoTokenizer.from_pretrained(folder, model_input_names=INPUTS)
        saved.save_pretrained(folder)
        config = NeoBERTConfig(vocab_size=len(entries), max_length=512, pad_token_id=saved.pad_token_id, **sizes)
        NeoBERTModel(config).save_pretrained(folder)
        return Transformer(folder, max_seq_length=teacher.max_seq_length)


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    return 1 + max(tokenizer.get_vocab().values())


def check_vocabulary(settings: StudentSettings, teacher: SentenceTransformer) -> None:
    """Refuse to leave entries of a tokenizer other than WordPiece out: it would cut the words of texts differently."""
    kind = json.loads(teacher.tokenizer.backend_tokenizer.to_str())["model"]["type"]
    if settings.student is None and settings.vocabulary == "used" and kind != "WordPiece":
        raise ValueError(
            f"`vocabulary` is 'used', but the teacher's tokenizer is of the kind {kind}; only WordPiece can lose "
            "entries. Set it to 'teacher'."
        )


def used_entries(teacher: SentenceTransformer, targets: Targets) -> list[int]:
    """The ids that occur in texts, those of special tokens, and those of single characters, by which a WordPiece
    tokenizer spells words that it does not know.
    """
    written = json.loads(teacher.tokenizer.backend_tokenizer.to_str())
    used = {token["id"] for token in written["added_tokens"]}
    used |= {number for word, number in written["model"]["vocab"].items() if len(word.removeprefix("##")) == 1}
    return sorted(used.union(*(file["ids"].unique().tolist() for file in targets.files)))


def with_entries(written: dict[str, Any], entries: Sequence[int]) -> dict[str, Any]:
    """A tokenizer, as `tokenizers` writes it, with these entries alone, numbered anew in their order."""
    number_of = {entry: number for number, entry in enumerate(entries)}
    vocabulary = written["model"]["vocab"].items()
    written["model"]["vocab"] = {word: number_of[entry] for word, entry in vocabulary if entry in number_of}
    for token in written["added_tokens"]:
        token["id"] = number_of[token["id"]]
    after = written["post_processor"]
    for token in after.get("special_tokens", {}).values():
        token["ids"] = [number_of[entry] for entry in token["ids"]]
    # Of the kinds BertProcessing and RobertaProcessing.
    for name in {"cls", "sep"} & after.keys():
        after[name][1] = number_of[after[name][1]]
    return written


def load_student(
    settings: StudentSettings, teacher: SentenceTransformer, name: str
) -> tuple[SentenceTransformer | None, bool]:
    """The model that the student begins as, with those of its layers that are kept. None for a new student.

    Args:
        name: folder or Hub id of the teacher.

    Returns:
        The model, and whether it is made of layers of the teacher: it is the teacher, or a BERT that learned from it.

    Raises:
        ValueError: if it has another encoder, another vocabulary than the teacher, or no such layers.
    """
    path, layers = settings.student, settings.layers
    if not path:
        return None, False
    model = load_trained_model(path, "student").float()
    encoder = getattr(model[0], "model", None)
    on_bert = isinstance(encoder, BertModel)
    of_teacher = path == name
    if on_bert and (learned_from := teacher_of(path)):
        # A student that `distil` makes is on a BERT only if it began as its teacher.
        of_teacher |= learned_from["weights"] == weights_fingerprint(name)
    if not isinstance(encoder, NeoBERTModel) and not (of_teacher and on_bert):
        raise ValueError(
            f"`student` is {path!r}, a model on {type(encoder).__name__}; it must be one on a NeoBERT, or on a BERT "
            f"the teacher, {name!r}, or a student that began as it."
        )
    if model.tokenizer.get_vocab() != teacher.tokenizer.get_vocab():
        raise ValueError(f"`student` is {path!r}, whose vocabulary is not the teacher's; it must be the same.")
    blocks = blocks_of(encoder)
    if not all(0 <= number < len(blocks) for number in layers):
        raise ValueError(f"`layers` is {layers}, but {path!r} has the layers 0 to {len(blocks) - 1}.")
    if layers:
        kept = [blocks[number] for number in layers]
        del blocks[:]
        blocks.extend(kept)
        encoder.config.num_hidden_layers = len(layers)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            # What the teacher computed is the same each time.
            module.p = 0.0
    return model, of_teacher


def blocks_of(encoder: PreTrainedModel) -> nn.ModuleList:
    """The layers of a NeoBERT or a BERT."""
    return encoder.transformer_encoder if isinstance(encoder, NeoBERTModel) else encoder.encoder.layer


def means_are_vectors(targets: Targets) -> bool:
    """Whether the teacher's vectors are the means of its token states, up to their length."""
    found = [targets[number] for number in range(min(len(targets), 100))]
    if found[0][2].shape[1] != len(found[0][3]):
        return False
    cosines = [F.cosine_similarity(states.float().mean(0), vector, dim=0) for _, _, states, vector in found]
    return min(cosines).item() > 0.999


@torch.no_grad()
def fill_table(student: Student, teacher: SentenceTransformer, targets: Targets, entries: Sequence[int]) -> None:
    """Give the weights the values that the top of this file describes."""
    encoder, head, width = student.encoder, student.head or student.linear, student.encoder.config.hidden_size
    means, axes, scale = _token_means(targets, states_alone(teacher, range(vocabulary_size(teacher.tokenizer))))
    student.scale.fill_(scale)
    axes = axes[:, : width - 1]
    rows = torch.zeros(len(entries), width)
    rows[:, : axes.shape[1]] = means[list(entries)] / scale @ axes
    rows[:, -1] = (1 - rows.square().sum(1)).clamp(min=1e-4).sqrt()
    encoder.encoder.weight.copy_(rows)
    # RMSNorm makes a row of length 1 as long as the square root of its width.
    weight = torch.zeros(len(axes), width)
    weight[:, : axes.shape[1]] = axes / width**0.5
    head.weight.copy_(weight)
    for block in encoder.transformer_encoder:
        block.wo.weight.zero_()
        block.ffn.w3.weight.zero_()


def _token_means(targets: Targets, alone: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The mean state of each token, the principal axes of all states as columns, and their root mean square length."""
    sums, counts = COUNT_ALONE * alone, torch.full((len(alone),), float(COUNT_ALONE))
    moments = torch.zeros(alone.shape[1], alone.shape[1], dtype=torch.float64)
    measured = 0
    for file in targets.files:
        states, ids = file["states"].float(), file["ids"].long()
        sums.index_add_(0, ids, states)
        counts += torch.bincount(ids, minlength=len(alone))
        # Every fourth state is enough for the axes, and takes a quarter of the time.
        some = states[::4]
        moments += (some.T @ some).double()
        measured += len(some)
    _, axes = torch.linalg.eigh(moments)
    return sums / counts[:, None], axes.flip(1).float(), (moments.trace() / measured).sqrt().item()


def length_of_states(targets: Targets) -> float:
    """The root mean square length of the teacher's token states."""
    squares = torch.cat([file["states"][::4].float().square().sum(1) for file in targets.files])
    return squares.double().mean().sqrt().item()


@torch.no_grad()
def fit_linear_layer(linear: nn.Linear, student: Student, targets: Targets, of_states: bool) -> None:
    """The weight that brings a linear layer nearest to the teacher's token states or vectors, by ridge regression."""
    inputs, wanted = [], []
    for number in range(min(len(targets), FITTED_TEXTS)):
        _, ids, states, vector = targets[number]
        ids = student.numbers[ids.long().to(student.numbers.device)]
        found = student.encoder(ids[None]).last_hidden_state[0].cpu()
        inputs.append(found if of_states else found.mean(0, keepdim=True))
        wanted.append(states / student.scale.cpu() if of_states else F.normalize(vector, dim=0)[None])
    x, y = torch.cat(inputs).double(), torch.cat(wanted).double()
    gram = x.T @ x
    penalty = 1e-3 * gram.trace() / len(gram) * torch.eye(len(gram))
    linear.weight.copy_(torch.linalg.solve(gram + penalty, x.T @ y).T)


def cosine_to_teacher(model: SentenceTransformer, targets: Targets) -> float:
    """The mean cosine of the vectors of a student and its teacher, where both tokenise the texts themselves."""
    cosines = []
    for is_query, kind in ((False, "document"), (True, "query")):
        rows = [row for row, text in enumerate(targets.texts) if text.is_query == is_query]
        texts = [targets.texts[row].content for row in rows]
        found = model.encode(texts, prompt=prompt_of(model, kind), convert_to_tensor=True).float().cpu()
        cosines.append(F.cosine_similarity(found, torch.stack([targets[row][3] for row in rows])))
    return torch.cat(cosines).mean().item()
