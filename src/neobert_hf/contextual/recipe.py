"""The recipe for contextual document embeddings (CDE) on any NeoBERT (paper, section 5.2.2 and appendix G)."""

from dataclasses import dataclass, field

from neobert_hf.common.recipe import Result, recipe
from neobert_hf.common.settings import check_numbers
from neobert_hf.contextual.clusters import add_clusters
from neobert_hf.contextual.model import build_contextual_encoder
from neobert_hf.contextual.training import ContextualLoss, ContextualRetrievalEvaluator, ContextualTrainer
from neobert_hf.embeddings.arguments import EmbeddingArguments, PairSettings
from neobert_hf.embeddings.recipe import prepare_training, retrieval_evaluator


@dataclass
class ContextualSettings(PairSettings):
    """The model, the data and the context. The help texts say where a default comes from."""

    temperature: float = field(
        default=0.02, metadata={"help": "the cosine similarities are divided by this (reference code)"}
    )
    mini_batch_size: int = field(
        default=32, metadata={"help": "texts computed at a time; the trained weights do not depend on it"}
    )
    max_negatives: int | None = field(
        default=0, metadata={"help": "use at most this many hard negatives of a row (paper: none); all if unset"}
    )
    context_size: int = field(default=512, metadata={"help": "documents in a context (paper)"})
    context_dropout: float = field(
        default=0.005,
        metadata={"help": "share of the context that is hidden in training (Morris and Rush; reference code: 0)"},
    )
    soft_prompts: int = field(default=8, metadata={"help": "learned vectors after the context (reference code)"})
    text_position: int = field(
        default=0, metadata={"help": "position of a text's first token: 0 (ours) or `context_size` (reference code)"}
    )
    first_model: str = field(
        kw_only=True,
        metadata={"help": "embedding model that finds clusters and false negatives", "path": "or Hub id"},
    )
    false_negative_margin: float | None = field(
        default=0.0,
        metadata={
            "help": "a document is not used as a negative of a query if the first model scores it above the right "
            "document's score minus this (ours; the paper does not say); if unset, all documents are used"
        },
    )

    def __post_init__(self):
        super().__post_init__()
        ranges = {"temperature": "above 0", "mini_batch_size": "1 or more", "context_size": "1 or more"}
        ranges |= {"context_dropout": "0 or more and below 1", "soft_prompts": "0 or more"}
        check_numbers(self, ranges | {"text_position": "0 or more", "false_negative_margin": "a number"})

    @property
    def context(self) -> dict[str, float]:
        """Those of the settings that the model's config holds."""
        names = ("context_size", "context_dropout", "soft_prompts", "text_position")
        return {name: getattr(self, name) for name in names}


@recipe
def train_contextual(settings: ContextualSettings, arguments: EmbeddingArguments) -> Result:
    """Train contextual document embeddings (CDE) on pairs of a query and a right text.

    Called again after an interruption, it goes on from the newest complete checkpoint, on a CPU bit for bit.
    `output_dir` gets `clusters/`, checkpoints, `model/` (for `SentenceTransformer(...)`, with a model card) and
    `log.json`.

    Returns:
        The model's folder; `scores` of the retrieval of held-out queries, and those `before` training.
    """
    rows = arguments.per_device_train_batch_size
    if settings.context_size > rows:
        raise ValueError(
            f"`context_size` is {settings.context_size}, but a batch, whose documents are the context, has {rows} "
            f"rows: set it to {rows} or less, or `per_device_train_batch_size` to {settings.context_size}."
        )
    # 1. Data, with an instruction for the queries of each dataset, and the checkpoint to go on from
    with prepare_training("train_contextual", settings, arguments) as training:
        # 2. Clusters of similar rows, and the vectors by which false negatives are recognised
        add_clusters(training)

        # 3. Two stages that start from the same encoder, a loss that trains both, and an evaluation with a context
        model = build_contextual_encoder(settings.model, settings.max_length, **settings.context)
        loss = ContextualLoss(model, settings.temperature, settings.mini_batch_size)
        evaluator = retrieval_evaluator(training.data, ContextualRetrievalEvaluator)

        # 4. Training to the end; then the model, its card and the log are saved
        return ContextualTrainer(model, training, loss=loss, evaluator=evaluator).complete()
