"""Pseudo-perplexity: equal to the definition written out, whatever is sampled, batched, scaled or interrupted."""

import json
import math
import random
import shutil
import string
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    DebertaV2Config,
    ElectraConfig,
    ModernBertConfig,
    NomicBertConfig,
    PreTrainedModel,
    RobertaConfig,
)

from neobert_hf import NeoBERTForMaskedLM
from neobert_hf.common.fingerprints import SettingsMismatch
from neobert_hf.common.report import mean_interval
from neobert_hf.common.settings import parse_config
from neobert_hf.evaluation.pseudo_perplexity import recipe
from neobert_hf.evaluation.pseudo_perplexity.recipe import PseudoPerplexityArguments, load_model, load_tokenizer
from neobert_hf.evaluation.pseudo_perplexity.report import curves, table
from neobert_hf.evaluation.pseudo_perplexity.rope_scaling import scale_rope
from neobert_hf.evaluation.pseudo_perplexity.scoring import choose_positions, masked_losses
from tests.helpers.examples import load_example
from tests.helpers.models import small_model
from tests.helpers.small_tokenizer import small_tokenizer


pseudo_perplexity = load_example("pseudo_perplexity")


# Letters of each document; [CLS] and [SEP] come on top. The model was trained on 16 tokens.
LETTERS = (12, 38, 8, 22, 38)
OTHERS = {
    "bert": BertConfig,
    "deberta_v2": DebertaV2Config,
    "electra": ElectraConfig,
    "modernbert": ModernBertConfig,
    "nomic_bert": NomicBertConfig,
    "roberta": RobertaConfig,
}


def other_model(name: str, **changes) -> PreTrainedModel:
    torch.manual_seed(3)
    sizes = dict(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
    # Far from uniform predictions, so that a wrong position shows.
    config = OTHERS[name](**sizes, max_position_embeddings=64, pad_token_id=0, initializer_range=0.5, **changes)
    return AutoModelForMaskedLM.from_config(config).eval()


def save(model: PreTrainedModel, folder: Path) -> str:
    model.save_pretrained(folder)
    small_tokenizer(model_input_names=["input_ids", "attention_mask"]).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    """Folders `neobert` and `bert`, and documents."""
    folder = tmp_path_factory.mktemp("material")
    save(small_model(NeoBERTForMaskedLM, max_length=16), folder / "neobert")
    save(other_model("bert"), folder / "bert")
    generator = random.Random(0)
    texts = [" ".join(generator.choices(string.ascii_lowercase, k=letters)) for letters in LETTERS]
    Dataset.from_dict({"body": texts}).to_parquet(folder / "documents.parquet")
    return folder


def command(material: Path, output: Path, *more: str, models=("neobert",)) -> list[str]:
    pairs = [f"{name}={material / name}" for name in models]
    source = ["--source", str(material / "documents.parquet"), "--text_column", "body", "--device", "cpu"]
    return ["--models", *pairs, *source, "--output_dir", str(output), *more]


def run(material: Path, output: Path, *more: str, models=("neobert",)) -> list[dict]:
    pseudo_perplexity.main(command(material, output, *more, models=models))
    return Dataset.from_parquet(str(output / "scores.parquet")).to_list()


def losses_of(file: Path) -> list[float]:
    return [loss for line in file.read_text().splitlines()[1:] for loss in json.loads(line)]


@pytest.fixture(scope="module")
def exact(material, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("exact")
    run(material, output, models=("neobert", "bert"))
    return output


@torch.no_grad()
def plain_losses(model: PreTrainedModel, ids: list[int], mask_id: int = 4) -> list[float]:
    """The definition: mask one position, decode the whole sequence, cross-entropy of the token."""
    losses = []
    for position in range(1, len(ids) - 1):
        masked = torch.tensor([ids])
        masked[0, position] = mask_id
        logits = model(input_ids=masked, attention_mask=torch.ones_like(masked)).logits[0, position]
        losses.append(F.cross_entropy(logits, torch.tensor(ids[position])).item())
    return losses


@pytest.mark.parametrize("name", ["neobert", "bert"])
def test_equals_the_definition(material, exact, name):
    model = AutoModelForMaskedLM.from_pretrained(material / name).eval()
    tokenizer = load_tokenizer(str(material / name))
    rows = [row for row in Dataset.from_parquet(str(exact / "scores.parquet")) if row["model"] == name]
    texts = Dataset.from_parquet(str(material / "documents.parquet"))["body"]
    # The last document counts as well.
    assert sorted(row["document"] for row in rows) == [0, 1, 2, 3, 4]
    for row in rows:
        losses = plain_losses(model, tokenizer(texts[row["document"]])["input_ids"])
        assert row["tokens"] == LETTERS[row["document"]] + 2 and row["positions"] == len(losses) == row["maskable"]
        assert row["mean_loss"] == pytest.approx(np.mean(losses), abs=1e-5)
        assert row["pseudo_perplexity"] == row["low"] == row["high"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-5)
    assert len({round(row["mean_loss"], 4) for row in rows}) == 5


@pytest.mark.parametrize("name", OTHERS)
def test_the_decoder_runs_on_the_masked_position_only(name):
    model = other_model(name)
    text = choose_positions(0, np.array([2, *range(5, 20), 3]), [0, 1, 2, 3, 4])
    decoded = []
    model.get_output_embeddings().register_forward_pre_hook(lambda module, args: decoded.append(args[0].shape[:-1]))
    losses = masked_losses(model, [(text, position) for position in text.positions], 4)
    assert decoded == [(15, 1)]
    assert losses == pytest.approx(plain_losses(model, text.ids.tolist()), abs=1e-5)


def test_special_tokens_of_the_text_are_not_scored():
    assert choose_positions(0, np.array([2, 7, 3, 1, 8, 4, 3]), [0, 1, 2, 3, 4]).positions.tolist() == [1, 4]


@pytest.mark.parametrize("budget", [1, 100, 4000])
def test_token_budget_changes_nothing(material, exact, tmp_path, budget):
    """One row a batch, parts of a document, and both of one length at once."""
    run(material, tmp_path, "--batch_tokens", str(budget))
    file = Path("neobert", "native", "whole.jsonl")
    assert losses_of(tmp_path / file) == pytest.approx(losses_of(exact / file), abs=1e-5)
    batches = [len(json.loads(line)) for line in (tmp_path / file).read_text().splitlines()[1:]]
    assert max(batches) == {1: 1, 100: 8, 4000: 76}[budget]


def test_lengths_cut_documents_and_leave_out_shorter_ones(material, tmp_path):
    rows = run(material, tmp_path, "--lengths", "40", "10", "--max_documents", "4")
    found = [(row["document"], row["tokens"], row["cut"]) for row in rows]
    assert found == [(0, 10, 10), (1, 10, 10), (2, 10, 10), (3, 10, 10), (1, 40, 40)]
    model = AutoModelForMaskedLM.from_pretrained(material / "neobert").eval()
    tokenizer = load_tokenizer(str(material / "neobert"))
    ids = tokenizer(Dataset.from_parquet(str(material / "documents.parquet"))["body"][1])["input_ids"]
    assert rows[1]["mean_loss"] == pytest.approx(np.mean(plain_losses(model, ids[:9] + ids[-1:])), abs=1e-5)
    text = (tmp_path / "pseudo_perplexity.md").read_text()
    assert "| tokens | 10 | 40 |" in text and "| documents | 4 | 1 |" in text
    assert (tmp_path / "pseudo_perplexity.png").stat().st_size > 10_000


def test_max_length_cuts_and_min_tokens_leaves_out(material, tmp_path):
    rows = run(material, tmp_path, "--max_length", "20", "--min_tokens", "14", "--sample", "6")
    assert [(row["document"], row["tokens"], row["positions"]) for row in rows] == [
        (0, 14, 6), (1, 20, 6), (3, 20, 6), (4, 20, 6)
    ]  # fmt: skip


def test_sample_is_a_subset_that_depends_on_seed_and_document_only(material, exact, tmp_path):
    rows = run(material, tmp_path, "--sample", "10", "--rope", "native", "linear:2")
    assert [row["positions"] for row in rows[:5]] == [8, 10, 10, 10, 10]
    assert rows[0]["low"] == rows[0]["high"]  # all of its positions
    assert all(row["low"] < row["pseudo_perplexity"] < row["high"] for row in rows[1:5])
    everything = set(np.round(losses_of(exact / "neobert" / "native" / "whole.jsonl"), 4))
    assert set(np.round(losses_of(tmp_path / "neobert" / "native" / "whole.jsonl"), 4)) < everything
    ids = np.arange(5, 45)
    draws = [choose_positions(document, ids, [0], 10, seed).positions for document, seed in ((1, 0), (2, 0), (1, 1))]
    assert not np.array_equal(draws[0], draws[1]) and not np.array_equal(draws[0], draws[2])


@pytest.mark.parametrize("sample", [6, 30])
def test_interval_covers_the_exact_value(exact, sample):
    """As often as it says. At 30 of 38 only because it knows how few are left out: without that, 0.9995."""
    losses = np.array(losses_of(exact / "neobert" / "native" / "whole.jsonl")[-38:])
    ids, covered = np.arange(5, 43), []
    for seed in range(2000):
        positions = choose_positions(0, ids, [0], sample, seed=seed).positions
        _, low, high = mean_interval(losses[positions], 38)
        covered.append(low <= losses.mean() <= high)
    assert 0.92 < np.mean(covered) < 0.975


@pytest.mark.parametrize(
    "change, message",
    [
        (["--sample", "5"], "sample: None there, 5 now"),
        (["--dtype", "bfloat16"], "dtype: 'float32' there, 'bfloat16' now"),
        (["--max_length", "20"], "max_length: None there, 20 now"),
    ],
)
def test_other_settings_are_refused(material, exact, change, message):
    before = (exact / "neobert" / "native" / "whole.jsonl").read_bytes()
    with pytest.raises(SettingsMismatch, match=message):
        run(material, exact, *change)
    assert (exact / "neobert" / "native" / "whole.jsonl").read_bytes() == before


def test_other_weights_are_refused_and_a_model_that_moved_is_taken(material, exact, tmp_path, monkeypatch):
    model = NeoBERTForMaskedLM.from_pretrained(material / "neobert")
    model.decoder.bias.data[7] += 1e-3
    with pytest.raises(SettingsMismatch, match="model: "):
        run(material, exact, "--models", f"neobert={save(model, tmp_path)}")
    scores = shutil.copytree(exact, tmp_path / "copy") / "scores.parquet"
    moved, before = (
        shutil.copytree(material / "neobert", tmp_path / "moved"),
        Dataset.from_parquet(str(scores)).to_list(),
    )
    monkeypatch.setattr(recipe, "load_model", lambda *arguments: pytest.fail("scored again"))
    assert run(material, scores.parent, "--models", f"neobert={moved}") == before[:5]


def test_resumes_after_whatever_was_written(material, tmp_path):
    """Within a batch, or without the last line feed: in the end the same file to the byte."""
    file = tmp_path / "neobert" / "native" / "whole.jsonl"
    before = run(material, tmp_path, "--batch_tokens", "200")
    whole = file.read_bytes()
    for cut in (400, 1000, -1):
        file.write_bytes(whole[:cut])
        assert run(material, tmp_path, "--batch_tokens", "200") == before
        assert file.read_bytes() == whole


def test_rope_settings_equal_a_model_loaded_with_them(material, tmp_path):
    settings = ("native", "yarn:2", "yarn:4", "linear:2", "dynamic:8")
    rows = run(material, tmp_path, "--lengths", "40", "--max_documents", "2", "--rope", *settings)
    ids = load_tokenizer(str(material / "neobert"))(
        Dataset.from_parquet(str(material / "documents.parquet"))["body"][1]
    )["input_ids"]
    for row, setting in zip(rows, settings, strict=True):
        kind, _, factor = setting.partition(":")
        rope = {"rope_type": kind, "factor": float(factor)} if factor else {"rope_type": "default"}
        model = NeoBERTForMaskedLM.from_pretrained(material / "neobert", rope_parameters=rope).eval()
        assert row["rope"] == setting
        assert row["mean_loss"] == pytest.approx(np.mean(plain_losses(model, ids)), abs=1e-5)
    assert len({round(row["mean_loss"], 4) for row in rows}) == len(settings)
    text = (tmp_path / "pseudo_perplexity.md").read_text()
    assert "\n| neobert | " in text and "\n| neobert, yarn:4 | " in text


def test_dynamic_scaling_of_other_models_fits_every_length(material, tmp_path):
    """In Transformers frequencies grow with the longest sequence so far; here each length has its own."""
    save(other_model("nomic_bert"), tmp_path / "nomic")
    config = json.loads((tmp_path / "nomic" / "config.json").read_text()) | {"max_position_embeddings": 16}
    (tmp_path / "nomic" / "config.json").write_text(json.dumps(config))
    source = command(material, tmp_path / "out", "--rope", "dynamic:4")
    pseudo_perplexity.main([*source[2:], "--models", f"nomic={tmp_path / 'nomic'}"])
    rows = Dataset.from_parquet(str(tmp_path / "out" / "scores.parquet")).to_list()
    tokenizer = load_tokenizer(str(material / "neobert"))
    texts = Dataset.from_parquet(str(material / "documents.parquet"))["body"]
    (settings,) = parse_config(PseudoPerplexityArguments, args=source)
    for row in rows:
        fresh = load_model(str(tmp_path / "nomic"), "dynamic:4", settings)
        losses = plain_losses(fresh, tokenizer(texts[row["document"]])["input_ids"])
        assert row["mean_loss"] == pytest.approx(np.mean(losses), abs=1e-5)


def test_local_layers_keep_their_rope(tmp_path):
    save(other_model("modernbert"), tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    scale_rope(config, "yarn:4")
    assert config.rope_parameters["sliding_attention"]["rope_type"] == "default"
    assert config.rope_parameters["full_attention"]["rope_type"] == "yarn"
    assert config.rope_parameters["full_attention"]["original_max_position_embeddings"] == 64


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--rope", "yarm:4"], "`rope` holds 'yarm:4'"),
        (["--rope", "yarn"], "`rope` holds 'yarn'"),
        (["--rope", "yarn:1"], "`rope` holds 'yarn:1'"),
        (["--text_column", "text"], "no column 'text'; it has 'body'"),
        (["--lengths", "10", "--max_length", "10"], "give one of them"),
        (["--lengths", "10", "400"], "No document of .* has at least 400 tokens; the longest read has 40"),
        (["--models", "neobert"], "`models` holds 'neobert'; write name=path"),
    ],
)
def test_wrong_settings_fail_before_work(material, tmp_path, flags, message):
    with pytest.raises(ValueError, match=message):
        run(material, tmp_path / "out", *flags)
    assert not (tmp_path / "out").exists()


def test_models_that_do_not_fit_are_refused(material, tmp_path):
    save(small_model(NeoBERTForMaskedLM, rope=False), tmp_path / "absolute")
    save(small_model(NeoBERTForMaskedLM, rope_parameters={"rope_type": "yarn", "factor": 2.0}), tmp_path / "scaled")
    save(small_model(NeoBERTForMaskedLM), tmp_path / "unmasked")
    small_tokenizer(mask_token=None).save_pretrained(tmp_path / "unmasked")
    classifier = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(material / "bert"))
    save(classifier, tmp_path / "classifier")
    for model, flags, message in (
        (material / "bert", ["--rope", "native", "yarn:2"], "bert has no RoPE"),
        (tmp_path / "absolute", ["--rope", "yarn:2"], "neobert has no RoPE"),
        (tmp_path / "scaled", ["--rope", "yarn:2"], "scaled already"),
        (tmp_path / "unmasked", [], "unmasked has no mask token"),
        (tmp_path / "classifier", [], "classifier .*cls.predictions"),
    ):
        with pytest.raises(ValueError, match=message):
            run(material, tmp_path / "out", "--models", f"other={model}", *flags)
    with pytest.raises(FileNotFoundError, match="runs/small/model"):
        run(material, tmp_path / "out", "--models", "other=runs/small/model")
    # Nor is there a file that would refuse the settings once they are right.
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["", None, "[MASK] [SEP]"])
def test_text_with_nothing_to_mask_is_an_error(material, tmp_path, text):
    Dataset.from_dict({"body": ["a b c", text]}).to_parquet(tmp_path / "empty.parquet")
    source = ["--source", str(tmp_path / "empty.parquet")]
    with pytest.raises(ValueError, match="Row 1 of .* holds nothing to mask"):
        run(material, tmp_path / "out", *source)
    assert len(run(material, tmp_path / "out", *source, "--min_tokens", "5")) == 1


def test_loss_that_is_not_finite_is_an_error(material):
    model = small_model(NeoBERTForMaskedLM)
    model.decoder.bias.data[7] = math.inf
    text = choose_positions(0, np.array([2, 7, 3]), [2, 3])
    with pytest.raises(FloatingPointError, match="document 0 are not finite"):
        masked_losses(model, [(text, 1)], 4)


def test_curves_are_geometric_means_by_length():
    rows = [
        {"model": "m", "rope": "native", "cut": None, "tokens": tokens, "mean_loss": loss}
        for tokens, loss in ((60, 1.0), (64, 3.0), (65, 2.0))
    ]
    points = curves(rows)["m"]
    assert points[64]["pseudo_perplexity"] == pytest.approx(math.exp(2)) and points[64]["documents"] == 2
    assert points[64]["low"] < math.exp(2) < points[64]["high"] and points[128]["documents"] == 1
    rows = ["| tokens | 64 | 128 |", "| --- | --- | --- |", "| m | 7.4 | 7.4 |", "| documents | 2 | 1 |"]
    assert table({"m": points}).splitlines() == rows
    other = table({"m": points, "n": {64: points[128]}}).splitlines()
    assert other[3:] == ["| n | 7.4 | - |", "| documents of m | 2 | 1 |", "| documents of n | 1 | 0 |"]
