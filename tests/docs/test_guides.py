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
# The recipes for other kinds of models have tests of their own, with runs.
READ_ONLY = ("python examples/train_sparse", "python examples/train_multi", "python examples/train_rerank")


@pytest.fixture
def guide_runner(runner):
    runner.reduced = REDUCED
    runner.read_only = READ_ONLY
    return runner


def run(guide_runner, name: str) -> None:
    guide_runner.run(ROOT / "docs" / name)


def test_embed(guide_runner, workplace):
    shutil.rmtree(workplace / "runs/embeddings")
    run(guide_runner, "guides/embed.md")
    assert (workplace / "runs/embeddings/model/modules.json").is_file()


def test_distil(guide_runner, capsys):
    run(guide_runner, "guides/distil.md")
    assert "eval_cosine" in capsys.readouterr().out


def test_contextual_embeddings(guide_runner, workplace, capsys):
    run(guide_runner, "guides/contextual_embeddings.md")
    assert guide_runner.names["scores"].shape == (1, len(guide_runner.names["corpus"]))
    assert "'read bytes': 3 passages" in capsys.readouterr().out


def test_classify(guide_runner, capsys):
    run(guide_runner, "guides/classify.md")
    assert "{'label': '" in capsys.readouterr().out


def test_glue(guide_runner, workplace):
    run(guide_runner, "guides/glue.md")
    assert "packages" in (workplace / "runs/packages_seeds/report.md").read_text()


def test_tag_and_answer(guide_runner, capsys):
    run(guide_runner, "guides/tag.md")
    run(guide_runner, "guides/answer.md")
    printed = capsys.readouterr().out
    assert "| operator |" in printed and "fine-tuned" in printed


def test_pretrain_and_adapt(guide_runner, workplace):
    """Adapting starts from the run before it."""
    for name in ("runs/tiny", "runs/domain"):
        shutil.rmtree(workplace / name)
    run(guide_runner, "guides/pretrain.md")
    assert (workplace / "runs/tiny/curves.png").is_file()
    run(guide_runner, "guides/adapt.md")
    assert (workplace / "runs/domain/model/model.safetensors").is_file()
    assert "eval_loss_2" in (workplace / "runs/domain/log.json").read_text()


def test_long_texts(guide_runner, workplace):
    guide_runner.read_only += ("python examples/pretrain.py",)
    run(guide_runner, "guides/long_texts.md")
    assert "yarn:4" in (workplace / "runs/long/pseudo_perplexity.md").read_text()


def test_search(guide_runner, capsys):
    run(guide_runner, "guides/search.md")
    found = capsys.readouterr().out
    assert ".md" in found and "read bytes" in found


def test_own_documents(guide_runner, workplace, capsys):
    """On the pages of these guides: the four chapters of the test's data have too few pairs for a batch."""
    settings = f"extends: {ROOT}/configs/embeddings/small.yaml\nreport_to: none\nper_device_train_batch_size: 8\n"
    (workplace / "tiny.yaml").write_text(settings)
    guide_runner.reduced |= {"retrieval_from_documents": "--max_steps 2 --training tiny.yaml --documents docs/guides"}
    run(guide_runner, "guides/own_documents.md")
    printed = capsys.readouterr().out
    assert "after, with hard negatives" in printed and "names looked up" in printed


def test_evaluate(guide_runner, workplace):
    run(guide_runner, "guides/evaluate.md")
    report = (workplace / "runs/mteb_local/report.md").read_text()
    assert "pretrained" in report and "fine-tuned" in report


def test_serve_and_publish(guide_runner, workplace, capsys):
    run(guide_runner, "guides/serve.md")
    assert (workplace / "exported/onnx/model_quantized.onnx").is_file()
    push = "neobert-hf publish runs/embeddings/model me/my-embeddings --card my/card.yaml --package_url"
    guide_runner.read_only += (push,)
    run(guide_runner, "guides/publish.md")
    assert (workplace / "runs/hub/README.md").is_file()


def test_checkpoints(guide_runner, workplace, capsys):
    shutil.copytree(workplace / "runs/tiny/model", workplace / "original/checkpoint")
    shutil.move(workplace / "original/checkpoint/config.json", workplace / "original")
    guide_runner.read_only += ("neobert-hf export",)
    run(guide_runner, "checkpoints.md")
    printed = capsys.readouterr().out
    assert "FAIL" not in printed and "Not sent." in printed
    assert (workplace / "runs/state_dict").is_dir()


def test_scaling(guide_runner):
    """Its scripts and settings are there; tests/benchmarks runs them."""
    guide_runner.read_only += tuple(f"python examples/{name}" for name in ("deduplicate", "prepare_data", "embed"))
    run(guide_runner, "scaling.md")


def test_lora(guide_runner):
    """Each row of the last batch has an adapter of its own."""
    run(guide_runner, "guides/lora.md")
    assert guide_runner.names["logits"].shape == (2, 2)


def test_tokenizers(guide_runner, workplace):
    run(guide_runner, "guides/tokenizers.md")
    assert (workplace / "data/mine").is_dir()


def test_attention(guide_runner):
    run(guide_runner, "attention.md")
    assert guide_runner.names["loss"].isfinite()


def test_no_page_with_blocks_is_forgotten():
    tested = set(re.findall(r'"((?:guides/)?\w+\.md)"', (ROOT / "tests/docs/test_guides.py").read_text()))
    with_blocks = {page.name for page in pages() for block in blocks_of(page) if block.language in ("bash", "python")}
    assert with_blocks == {name.split("/")[-1] for name in tested} | {"README.md", "CONTRIBUTING.md", "sample_data.md"}


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
