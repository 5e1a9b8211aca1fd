"""Pseudo-perplexity: equal to the definition written out, whatever is sampled, batched, scaled or interrupted."""

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
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSequenceClassification, PreTrainedModel

from neobert_hf import NeoBERTForMaskedLM
from neobert_hf.common.run import MARKER, SettingsMismatch
from neobert_hf.common.settings import parse_config
from neobert_hf.evaluation.pseudo_perplexity import (
    PseudoPerplexityArguments,
    choose_positions,
    curves,
    masked_losses,
    pseudo_perplexity,
    scale_rope,
)
from tests.helpers.models import ROOT, small_model
from tests.helpers.other_encoders import ENCODERS
from tests.helpers.small_tokenizer import small_tokenizer
from tests.helpers.task_runs import write_json_lines


MODULE = "neobert_hf.evaluation.pseudo_perplexity"
# Letters of each document; [CLS] and [SEP] come on top. The model was trained on 16 tokens.
LETTERS = (12, 38, 8, 22, 38)
OTHERS = ("bert", "modernbert", "nomicbert", "roberta")
MODELS = ("neobert", *OTHERS)


def other_model(name: str, positions: int = 64) -> PreTrainedModel:
    """With predictions far from uniform, so that a wrong position shows."""
    torch.manual_seed(3)
    sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 48, "max_position_embeddings": positions, "initializer_range": 0.5}
    return AutoModelForMaskedLM.from_config(ENCODERS[name](**sizes, pad_token_id=0)).eval()


def save(model: PreTrainedModel, folder: Path) -> str:
    model.save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return str(folder)


def make_texts() -> list[str]:
    generator = random.Random(0)
    return [" ".join(generator.choices(string.ascii_lowercase, k=letters)) for letters in LETTERS]


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    """A folder for each model, and documents."""
    folder = tmp_path_factory.mktemp("material")
    save(small_model(NeoBERTForMaskedLM, max_length=16), folder / "neobert")
    for name in OTHERS:
        save(other_model(name), folder / name)
    Dataset.from_dict({"body": make_texts()}).to_parquet(folder / "documents.parquet")
    return folder


def run(material: Path, output: Path, *more: str, models=("neobert",)) -> list[dict]:
    source = ["--source", str(material / "documents.parquet"), "--text_column", "body", "--device", "cpu"]
    pairs = [f"{name}={material / name}" for name in models]
    pseudo_perplexity.main(["--models", *pairs, *source, "--output_dir", str(output), *more])
    return Dataset.from_parquet(str(output / "scores.parquet")).to_list()


def losses_of(folder: Path) -> list[float]:
    files = sorted((folder / "neobert" / "native" / "whole").glob("*.parquet"))
    return [loss for row in Dataset.from_parquet(list(map(str, files))) for loss in row["losses"]]


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def exact(material, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("exact")
    run(material, output, models=MODELS)
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


def expected_loss(model: PreTrainedModel, document: int, tokens: int | None = None) -> float:
    ids = small_tokenizer()(make_texts()[document], truncation=tokens is not None, max_length=tokens)["input_ids"]
    return pytest.approx(np.mean(plain_losses(model, ids)), abs=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_definition(material, exact, name):
    model = AutoModelForMaskedLM.from_pretrained(material / name).eval()
    rows = [row for row in Dataset.from_parquet(str(exact / "scores.parquet")) if row["model"] == name]
    assert sorted(row["document"] for row in rows) == [0, 1, 2, 3, 4]
    for row in rows:
        assert row["positions"] == LETTERS[row["document"]] == row["tokens"] - 2
        assert row["mean_loss"] == expected_loss(model, row["document"])
        assert row["pseudo_perplexity"] == pytest.approx(np.exp(row["mean_loss"]), rel=1e-5)


def test_which_documents_and_how_much_of_them_is_scored(material, exact, tmp_path):
    rows = run(material, tmp_path / "whole", "--max_length", "20", "--min_tokens", "14", "--sample", "6")
    found = [(row["document"], row["tokens"], row["positions"]) for row in rows]
    assert found == [(0, 14, 6), (1, 20, 6), (3, 20, 6), (4, 20, 6)]
    # A sample is a subset that depends on the document only.
    run(material, tmp_path / "sample", "--sample", "10")
    assert set(np.round(losses_of(tmp_path / "sample"), 4)) < set(np.round(losses_of(exact), 4))
    ids = np.arange(5, 45)
    first, again, other = (choose_positions(document, ids, [0], 10).positions.tolist() for document in (1, 1, 2))
    assert first == again != other
    rows = run(material, tmp_path, "--lengths", "40", "10", "--max_documents", "4")
    found = [(row["document"], row["tokens"], row["cut"]) for row in rows]
    assert found == [(0, 10, 10), (1, 10, 10), (2, 10, 10), (3, 10, 10), (1, 40, 40)]
    model = AutoModelForMaskedLM.from_pretrained(material / "neobert").eval()
    assert rows[1]["mean_loss"] == expected_loss(model, 1, tokens=10)
    # How many documents, beside each value.
    text = (tmp_path / "pseudo_perplexity.md").read_text()
    assert "| tokens | 10 | 40 |" in text and f"{rows[4]['pseudo_perplexity']:,.1f} (1) |" in text and "(4)" in text
    assert (tmp_path / "pseudo_perplexity.png").stat().st_size > 10_000


@pytest.mark.parametrize("name, value", [("sample", "5"), ("dtype", "bfloat16"), ("max_length", "20"), ("model", None)])
def test_losses_of_other_settings_or_weights_are_refused_by_name(material, exact, tmp_path, name, value):
    before = content(exact)
    flags = [f"--{name}", value]
    if value is None:
        model = NeoBERTForMaskedLM.from_pretrained(material / "neobert")
        model.decoder.bias.data[7] += 1e-3
        flags = ["--models", f"neobert={save(model, tmp_path)}"]
    with pytest.raises(SettingsMismatch, match=f"\n  identity.{name}: "):
        run(material, exact, *flags)
    assert content(exact) == before


def test_losses_of_a_model_that_moved_are_taken(material, exact, tmp_path, monkeypatch):
    copy, before = shutil.copytree(exact, tmp_path / "copy"), Dataset.from_parquet(str(exact / "scores.parquet"))
    moved = shutil.copytree(material / "neobert", tmp_path / "moved")
    monkeypatch.setattr(f"{MODULE}.load_model", lambda *arguments: pytest.fail("loaded to score again"))
    assert run(material, copy, "--models", f"neobert={moved}") == before.to_list()[:5]


def test_killed_within_any_part_it_ends_with_the_same_bytes(material, exact, tmp_path, monkeypatch):
    """The budget of tokens, here parts of a document and two of one length at once, changes nothing."""
    monkeypatch.setattr(f"{MODULE}.POSITIONS_OF_PART", 80)
    run(material, tmp_path / "whole", "--batch_tokens", "200")
    assert losses_of(tmp_path / "whole") == pytest.approx(losses_of(exact), abs=1e-5)
    scored = []

    def stop(model, batch, mask_id):
        scored.append(batch[0][0].document)
        if len(scored) in (3, 20):
            raise KeyboardInterrupt
        return masked_losses(model, batch, mask_id)

    monkeypatch.setattr(f"{MODULE}.masked_losses", stop)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(material, tmp_path / "run", "--batch_tokens", "200")
    again = len(scored)
    run(material, tmp_path / "run", "--batch_tokens", "200")
    assert content(tmp_path / "run") == content(tmp_path / "whole")
    # What had its file was not scored again: the documents of 10 and 14 tokens are the first part.
    assert not {0, 2} & set(scored[again:])


def test_called_with_a_table_it_gives_what_the_command_gives(material, exact, tmp_path):
    models = [f"{name}={material / name}" for name in MODELS]
    rows = [{"body": text} for text in make_texts()]
    result = pseudo_perplexity(models=models, source=rows, text_column="body", device="cpu", output_dir=tmp_path)
    assert content(tmp_path) == content(exact)
    (length, value), *_ = result.scores["neobert"].items()
    assert f"| {value:,.1f} (" in (tmp_path / "pseudo_perplexity.md").read_text() and length == 16


def test_rope_settings_equal_a_model_loaded_with_them(material, tmp_path):
    settings = ("native", "yarn:4", "linear:2", "dynamic:8")
    rows = run(material, tmp_path, "--lengths", "40", "--max_documents", "2", "--rope", *settings)
    for row, setting in zip(rows, settings, strict=True):
        kind, _, factor = setting.partition(":")
        rope = {"rope_type": kind, "factor": float(factor)} if factor else {"rope_type": "default"}
        model = NeoBERTForMaskedLM.from_pretrained(material / "neobert", rope_parameters=rope).eval()
        assert row["rope"] == setting and row["mean_loss"] == expected_loss(model, 1)
    assert len({round(row["mean_loss"], 4) for row in rows}) == len(settings)
    text = (tmp_path / "pseudo_perplexity.md").read_text()
    assert "\n| neobert | " in text and "\n| neobert, yarn:4 | " in text


def test_dynamic_scaling_of_other_models_fits_every_length(material, tmp_path):
    """In Transformers frequencies grow with the longest sequence so far; here each length has its own."""
    nomic = save(other_model("nomicbert", 16), tmp_path / "nomic")
    # A text of 40 tokens stands before one of 24.
    flags = ["--rope", "dynamic:4", "--min_tokens", "20"]
    for row in run(material, tmp_path / "out", "--models", f"nomic={nomic}", *flags):
        config = AutoConfig.from_pretrained(nomic)
        scale_rope(config, "dynamic:4")
        fresh = AutoModelForMaskedLM.from_pretrained(nomic, config=config).eval()
        assert row["mean_loss"] == expected_loss(fresh, row["document"])


def test_local_layers_keep_their_rope():
    config = ENCODERS["modernbert"]()
    scale_rope(config, "yarn:4")
    assert config.rope_parameters["sliding_attention"]["rope_type"] == "default"
    assert config.rope_parameters["full_attention"]["rope_type"] == "yarn"


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--rope", "yarm:4"], "yarm:4"),
        (["--text_column", "text"], "no column 'text'.*'body'"),
        (["--lengths", "10", "--max_length", "10"], "`lengths` and `max_length`"),
        (["--lengths", "10", "400"], "400 tokens; the longest read has 40"),
        (["--models", "neobert"], "'neobert'; write name=path"),
        (["--models", "other=runs/small/model"], "runs/small/model"),
        (["--models", "other=bert", "--rope", "yarn:2"], "bert has no unscaled RoPE"),
        (["--models", "other=classifier"], "classifier .*cls.predictions"),
        (["--source", "empty.jsonl"], "Row 1 of 'empty.jsonl'"),
    ],
)
def test_wrong_settings_and_models_fail_before_work(material, tmp_path, monkeypatch, flags, message):
    bert = shutil.copytree(material / "bert", tmp_path / "bert")
    save(AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(bert)), tmp_path / "classifier")
    write_json_lines(tmp_path / "empty.jsonl", [{"body": "a b c"}, {"body": "[SEP]"}])
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run(material, tmp_path / "out", *flags)
    # Nor is there a file that would refuse the settings once they are right.
    assert {file.name for file in (tmp_path / "out").rglob("*") if file.is_file()} <= {MARKER}


def test_a_loss_that_is_not_finite_is_an_error():
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
    assert curves(rows) == {"m": {64: (2, pytest.approx(math.exp(2))), 128: (1, pytest.approx(math.exp(2)))}}


def test_the_configuration_is_the_papers():
    """2,467 sequences of more than 1,024 tokens, every token masked."""
    flags = ["--config", str(ROOT / "configs" / "pseudo_perplexity.yaml")]
    (settings,) = parse_config(PseudoPerplexityArguments, args=flags)
    assert (settings.max_documents, settings.min_tokens, settings.sample) == (2467, 1025, None)
