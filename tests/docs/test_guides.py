"""Every block of the guides and pages runs, in order, on small models and data; what is too large is read only."""

import re
import shutil

import pytest

from tests.helpers.models import ROOT
from tests.helpers.pages import blocks_of, links_of, pages


# A model of one layer, for two steps.
PRETRAINING = (
    "--max_steps 2 --warmup_steps 0 --num_hidden_layers 1 --hidden_size 48 --max_length 32 --micro_batch_tokens 64 "
    "--global_batch_tokens 64 --eval_steps 2 --report_to none"
)
TASK = "--max_length 32 --max_steps 2 --eval_steps 1 --per_device_train_batch_size 4"
REDUCED = {
    "pretrain": PRETRAINING,
    "finetune_embeddings": "--max_steps 2 --eval_steps 2 --per_device_train_batch_size 8 --report_to none",
    # A teacher that is there, in place of one on the Hub.
    "distil": "--teacher runs/embeddings/model --passages 60 --num_train_epochs 1 --num_hidden_layers 1 "
    "--hidden_size 24 --num_attention_heads 2 --intermediate_size 48",
    "train_contextual": "--max_steps 2 --eval_steps 2 --context_size 4 --mini_batch_size 4 --report_to none "
    "--per_device_train_batch_size 8",
    "run_glue": "--max_length 32 --num_train_epochs 1 --max_steps 2 --eval_steps 1 --report_to none",
    "run_classification": TASK,
    "run_token_classification": TASK,
    "run_question_answering": f"{TASK} --max_length 64 --stride 1",
    "pseudo_perplexity": "--lengths 16 32 --min_tokens 32 --max_documents 2 --sample 2",
}


@pytest.fixture
def guide_runner(runner):
    runner.reduced = REDUCED
    return runner


def run(guide_runner, name: str) -> None:
    guide_runner.run(ROOT / "docs" / name)


def test_embed(guide_runner, workplace):
    """Also the contextual model that begins from the model of the page."""
    shutil.rmtree(workplace / "runs/embeddings")
    run(guide_runner, "guides/embed.md")
    assert (workplace / "runs/embeddings/model/modules.json").is_file()
    assert guide_runner.names["scores"].shape == (1, len(guide_runner.names["corpus"]))


def test_distil(guide_runner, capsys):
    run(guide_runner, "guides/distil.md")
    assert "eval_cosine" in capsys.readouterr().out


def test_search(guide_runner, workplace, capsys):
    """One's own documents are the pages of these guides: the chapters of the test's data have too few pairs."""
    settings = f"extends: {ROOT}/configs/embeddings/small.yaml\nreport_to: none\nper_device_train_batch_size: 8\n"
    (workplace / "tiny.yaml").write_text(settings)
    reduced = "--max_steps 2 --training tiny.yaml --documents docs/guides --model runs/tiny/model"
    guide_runner.reduced |= {"retrieval_from_documents": reduced}
    run(guide_runner, "guides/search.md")
    printed = capsys.readouterr().out
    assert "after, with hard negatives" in printed and "names looked up" in printed


def test_fine_tune(guide_runner, capsys):
    run(guide_runner, "guides/fine_tune.md")
    printed = capsys.readouterr().out
    assert "{'label': '" in printed and re.search(r"^ *operator +[01]\.\d", printed, re.M)


def test_lora(guide_runner):
    """Each row of the last batch has an adapter of its own."""
    run(guide_runner, "guides/lora.md")
    assert guide_runner.names["logits"].shape == (2, 2)


def test_pretrain(guide_runner, workplace):
    """Adapting starts from the run before it."""
    for name in ("runs/tiny", "runs/domain"):
        shutil.rmtree(workplace / name)
    run(guide_runner, "guides/pretrain.md")
    assert (workplace / "runs/tiny/curves.png").is_file()
    assert (workplace / "runs/domain/model/model.safetensors").is_file()
    assert "eval_loss_2" in (workplace / "runs/domain/log.json").read_text()


def test_tokenizers(guide_runner, workplace):
    run(guide_runner, "guides/tokenizers.md")
    assert (workplace / "data/own_tokenizer").is_dir()


def test_long_texts(guide_runner, workplace):
    guide_runner.read_only += ("python examples/pretrain.py",)
    shutil.copytree(workplace / "runs/tiny", workplace / "runs/length")
    run(guide_runner, "guides/long_texts.md")
    assert "yarn:4" in (workplace / "runs/long/pseudo_perplexity.md").read_text()
    assert guide_runner.names["model"].config.max_length == 4 * 64


def test_evaluate(guide_runner, workplace):
    run(guide_runner, "guides/evaluate.md")
    assert "distilled" in (workplace / "runs/mteb_local/report.md").read_text()
    assert "packages" in (workplace / "runs/packages_seeds/report.md").read_text()


def test_serve(guide_runner, workplace):
    run(guide_runner, "guides/serve.md")
    assert (workplace / "exported/onnx/model_quantized.onnx").is_file()


def test_publish(guide_runner, workplace, capsys):
    shutil.copytree(workplace / "runs/tiny/model", workplace / "original/checkpoint")
    shutil.move(workplace / "original/checkpoint/config.json", workplace / "original")
    push = "neobert-hf publish models/distilled me/my-embeddings --card my/card.yaml --package_url"
    guide_runner.read_only += (push,)
    run(guide_runner, "guides/publish.md")
    printed = capsys.readouterr().out
    assert "FAIL" not in printed and "Not sent." in printed
    assert (workplace / "runs/hub/README.md").is_file() and (workplace / "runs/state_dict").is_dir()


def test_architecture(guide_runner):
    run(guide_runner, "architecture.md")
    assert guide_runner.names["loss"].isfinite()


def test_no_page_with_blocks_is_forgotten():
    tested = set(re.findall(r'"((?:guides/)?\w+\.md)"', (ROOT / "tests/docs/test_guides.py").read_text()))
    with_blocks = {page.name for page in pages() for block in blocks_of(page) if block.language in ("bash", "python")}
    assert with_blocks == {name.split("/")[-1] for name in tested} | {"README.md", "CONTRIBUTING.md"}


def test_files_named_in_pages_exist():
    found = 0
    for page in pages():
        names = re.findall(r"(?<![\w/.])(?:configs|examples|tests|benchmarks)/[\w/]+\.\w+", page.read_text())
        found += len(names)
        for name in names:
            assert (ROOT / name).is_file(), f"{page}: {name}"
    assert found > 50


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in links_of(page):
        assert (page.parent / link).exists(), link
