"""Make this model: from public text to its weights.

    pip install -e '.[embed]' gensim nltk lancedb
    python models/distilled/make.py sentence-transformers/all-MiniLM-L6-v2 runs/small

Called again after an interruption, it goes on. The result is `runs/small/shipped`. HOW.md says what of this was run in
other ways, how long it took, and what chose the shares of the means.
"""

import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path

import torch
import yaml
from sentence_transformers import SentenceTransformer

from neobert_hf.data.sources import stream_text
from neobert_hf.distillation import distil
from neobert_hf.embeddings import finetune_embeddings, make_pairs
from neobert_hf.embeddings.space import TEACHER_FILE
from neobert_hf.hub import average
from neobert_hf.modeling_neobert import NeoBERTSwiGLU, swiglu_width


ROOT = Path(__file__).parents[2]
DISTIL = str(ROOT / "configs/embeddings/distil.yaml")
PAIRS = {"config": str(ROOT / "configs/embeddings/small.yaml"), "eval_strategy": "no", "report_to": "none"}
LARGE_BATCHES = {"per_device_train_batch_size": 128, "warmup_steps": 0.06}
# By which the neurons of the one layer are chosen: so many beginnings of texts, of so many characters.
TEXTS, CHARACTERS = 600, 1_000
# Tokens that the shipped model reads, of which it was trained on the first 256.
MAX_LENGTH = 1_024


def make_data(data: Path, work: Path) -> None:
    """Texts and pairs, from packages of Debian and Python."""
    scripts = ROOT / "benchmarks"
    if not (data / "pos_brown").is_dir():
        subprocess.run([sys.executable, scripts / "data.py", "--output_dir", data], check=True)
    if not (work / "wordnet.parquet").exists():
        subprocess.run([sys.executable, scripts / "distil_data.py", data, data / "packages", work], check=True)


def make_model(teacher: str, data: Path, work: Path) -> Path:
    """Run all steps that have no result in the folder `work` yet; the folder of the model."""
    manuals = [str(data / "text/train.parquet"), str(work / "foldoc_texts.parquet")]
    foldoc, pairs = write_descriptions(data, work)

    def learn(name: str, recipe, **settings) -> Path:
        folder = work / name
        if not (folder / "model").is_dir():
            recipe(output_dir=folder, **settings)
        return folder / "model"

    def mean(name: str, *shares: tuple[Path, float]) -> Path:
        models, weights = zip(*shares)
        if not (work / name).is_dir():
            average(models=[str(model) for model in models], weights=list(weights), output=work / name)
        return work / name

    from_texts = {"recipe": distil, "config": DISTIL, "teacher": teacher, "texts": manuals}
    from_pairs = {"recipe": finetune_embeddings, **PAIRS}

    # 1. Two layers, on a GPU
    two = learn(
        "two_layers",
        **from_texts,
        passages=202_370,
        num_train_epochs=4.38,
        warmup_steps=0.04,
        num_hidden_layers=2,
        intermediate_size=768,
        per_device_train_batch_size=512,
        learning_rate=1.5e-3,
        embedding_learning_rate=3e-4,
    )
    # 2. The pairs of a dictionary
    two_tuned = learn("two_layers_foldoc", **from_pairs, datasets=foldoc, model=two, learning_rate=1e-4, max_steps=120)
    # 3. One layer of the mean's two
    two_mean = mean("two_layers_mean", (two, 0.5), (two_tuned, 0.5))
    if not (work / "one_layer").is_dir():
        one_layer(two_mean, manuals[0], work / "one_layer")
    # 4. More text
    first = learn("first", **from_texts, student=work / "one_layer", passages=72_000, warmup_steps=0.06)
    second = learn("second", **from_texts, student=first, passages=95_000, num_train_epochs=2, **LARGE_BATCHES)
    # 5. All pairs
    tuned = learn("pairs", **from_pairs, datasets=pairs, model=second, learning_rate=2e-4, max_steps=600)
    half = mean("mean", (second, 0.4), (tuned, 0.6))
    # 6. and 7. Both again
    third = learn("third", **from_texts, student=half, passages=76_000, num_train_epochs=2, **LARGE_BATCHES)
    again = {"alpha": 0, "learning_rate": 2e-4, "per_device_train_batch_size": 128}
    third_tuned = learn("pairs_again", **from_pairs, datasets=pairs, model=third, max_steps=600, **again)
    before = mean("before", (half, 0.5), (third, 0.2), (third_tuned, 0.3))
    # 8. Other kinds of text, and the teacher's nearest texts in the loss
    fresh = {"texts": work / "texts.parquet", "nearest_texts": 128, "passages": 19_000, "num_train_epochs": 2}
    fourth = learn("fourth", **from_texts | fresh, student=before, **LARGE_BATCHES)
    # 9. The pairs once more
    fourth_tuned = learn("pairs_once_more", **from_pairs, datasets=pairs, model=fourth, max_steps=150, **again)
    return ship(mean("after", (before, 0.3), (fourth, 0.4), (fourth_tuned, 0.3)), work / "shipped")


def write_descriptions(data: Path, work: Path) -> tuple[Path, Path]:
    """Files that describe FOLDOC's pairs, and all pairs, for `finetune_embeddings`."""
    sources = {name: work / f"{name}.parquet" for name in ("foldoc", "wordnet", "text_pairs")}
    if not sources["text_pairs"].exists():
        make_pairs(source=data / "text/train.parquet", output=sources["text_pairs"])
    described = {
        name: {"source": str(file.resolve()), "query": "query", "positive": "positive", "instruction": ""}
        for name, file in sources.items()
    }
    files = work / "foldoc.yaml", work / "pairs.yaml"
    for file, names in zip(files, (["foldoc"], sources)):
        file.write_text(yaml.safe_dump({"train": {name: described[name] for name in names}}))
    return files


@torch.no_grad()
def one_layer(folder: Path, source: str, output: Path) -> None:
    """One layer of a model's two: the attention of the first, and the MLPs of both side by side.

    Three quarters of their neurons stay: those that add most to the output for some of the texts.
    """
    model = SentenceTransformer(str(folder), device="cpu")
    encoder = model[0].model
    first, second = blocks = encoder.transformer_encoder
    squares = {block.ffn.w3: torch.zeros(block.ffn.w3.in_features) for block in blocks}

    def add_squares(layer: torch.nn.Linear, inputs: tuple[torch.Tensor]) -> None:
        squares[layer] += inputs[0].flatten(0, -2).square().sum(0)

    hooks = [layer.register_forward_pre_hook(add_squares) for layer in squares]
    model.encode_document([text[:CHARACTERS] for text in islice(stream_text(source, "text"), TEXTS)])
    for hook in hooks:
        hook.remove()
    # The second MLP has a norm of its own, whose weight goes into its matrix.
    ratio = second.ffn_norm.weight / first.ffn_norm.weight
    gates, ups = zip(first.ffn.w12.weight.chunk(2), (second.ffn.w12.weight * ratio).chunk(2))
    outputs = torch.cat([block.ffn.w3.weight for block in blocks], dim=1)
    encoder.config.num_hidden_layers = 1
    encoder.config.intermediate_size = 3 * encoder.config.intermediate_size // 2
    kept = (
        (torch.cat(list(squares.values())) * outputs.square().sum(0))
        .topk(swiglu_width(encoder.config))
        .indices.sort()
        .values
    )
    first.ffn = NeoBERTSwiGLU(encoder.config)
    first.ffn.w12.weight.copy_(torch.cat([torch.cat(gates)[kept], torch.cat(ups)[kept]]))
    first.ffn.w3.weight.copy_(outputs[:, kept])
    encoder.transformer_encoder = encoder.transformer_encoder[:1]
    model.save(str(output), create_model_card=False)


def ship(folder: Path, output: Path) -> Path:
    """A copy in float16 that reads long texts."""
    model = SentenceTransformer(str(folder), device="cpu")
    model.max_seq_length = model[0].model.config.max_length = MAX_LENGTH
    model.half().save(str(output), create_model_card=False)
    # Which teacher's vectors it can search.
    shutil.copy(folder / TEACHER_FILE, output)
    return output


if __name__ == "__main__":
    work, data = Path(sys.argv[2]), ROOT / "data/benchmark"
    make_data(data, work)
    print(make_model(sys.argv[1], data, work))
