"""Every block of the guides and pages runs, in order, on small models and data; what is too large is read only."""

import re
import shlex
import shutil

from transformers import AutoConfig

from tests.helpers.models import ROOT
from tests.helpers.pages import blocks_of, not_printed, pages


def test_readme(runner, capsys):
    """The first lines search with the model of the package; the others take a small one in place of the published."""
    runner.run(ROOT / "README.md")
    assert not_printed(ROOT / "README.md", capsys.readouterr().out, digits=True) == []
    names = runner.names
    scores = names["model"].similarity(
        names["model"].encode_query("why does my kitten nap so much?"), names["model"].encode_document(names["texts"])
    )
    assert scores.argmax() == 0 and scores[0, 0] > 0.5
    assert names["states"].shape[-1] == 64 and (names["states"][1, 8:] == 0).all()


def test_a_command_and_a_guide_for_every_want_of_the_readme(runner):
    """Each command is read by its own script, to the last flag."""
    row = r"^\| .* \| `(.*)` \| \[.*\]\(docs/guides/\w+\.md.*\) \|$"
    commands = re.findall(row, (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(commands) >= 13
    runner.read_only = ("python", "accelerate", "neobert-hf")
    for command in commands:
        runner.run_command(shlex.split(command))


def test_embed(runner, workplace):
    """Also the contextual model that begins from the model of the page."""
    shutil.rmtree(workplace / "runs/embeddings")
    runner.run(ROOT / "docs/guides/embed.md")
    assert (workplace / "runs/embeddings/model/modules.json").is_file()
    assert runner.names["scores"].shape == (1, len(runner.names["corpus"]))


def test_distil(runner, capsys):
    runner.run(ROOT / "docs/guides/distil.md")
    assert "eval_cosine" in capsys.readouterr().out


def test_search(runner, workplace, capsys):
    """One's own documents are the pages of these guides: the chapters of the test's data have too few pairs."""
    base = ROOT / "configs/embeddings/own_documents.yaml"
    settings = f"extends: {base}\nreport_to: none\nper_device_train_batch_size: 8\n"
    (workplace / "tiny.yaml").write_text(settings)
    reduced = {"max_steps": 2, "training": "tiny.yaml", "documents": "docs/guides", "model": "runs/tiny/model"}
    runner.reduced |= {"retrieval_from_documents": reduced}
    # The teacher is on the Hub.
    runner.read_only += ("neobert-hf index --index runs/teacher", "neobert-hf query --index runs/teacher")
    runner.read_only += ("neobert-hf retrieval_from_documents",)
    runner.run(ROOT / "docs/guides/search.md")
    printed = capsys.readouterr().out
    assert "after learning" in printed and "names looked up" in printed
    # The passages that it quotes are of other data.
    assert all(line.startswith(" " * 9) for line in not_printed(ROOT / "docs/guides/search.md", printed))


def test_fine_tune(runner, workplace, capsys):
    runner.run(ROOT / "docs/guides/fine_tune.md")
    assert "{'label': '" in capsys.readouterr().out
    assert re.search(r"^ *operator +[01]\.\d", (workplace / "runs/code/report.md").read_text(), re.M)


def test_lora(runner):
    """Each row of the last batch has an adapter of its own."""
    runner.run(ROOT / "docs/guides/lora.md")
    assert runner.names["logits"].shape == (2, 2)


def test_pretrain(runner, workplace):
    """Adapting starts from the run before it."""
    for name in ("runs/tiny", "runs/domain"):
        shutil.rmtree(workplace / name)
    runner.run(ROOT / "docs/guides/pretrain.md")
    assert (workplace / "runs/tiny/curves.png").is_file()
    assert (workplace / "runs/domain/model/model.safetensors").is_file()
    assert "eval_loss_2" in (workplace / "runs/domain/log.json").read_text()


def test_pretrain_at_full_size(runner):
    runner.run(ROOT / "docs/guides/pretrain_at_full_size.md")


def test_tokenizers(runner, workplace):
    runner.run(ROOT / "docs/guides/tokenizers.md")
    assert (workplace / "data/own_tokenizer").is_dir()


def test_long_texts(runner, workplace):
    runner.read_only += ("neobert-hf pretrain",)
    shutil.copytree(workplace / "runs/tiny", workplace / "runs/length")
    scaled = AutoConfig.from_pretrained("runs/tiny/model", rope_parameters={"rope_type": "yarn", "factor": 2.0})
    scaled.save_pretrained("runs/length/model")
    runner.run(ROOT / "docs/guides/long_texts.md")
    assert "length" in (workplace / "runs/long_trained/pseudo_perplexity.md").read_text()
    assert runner.names["model"].config.max_length == 4 * 64


def test_evaluate(runner, workplace):
    runner.run(ROOT / "docs/guides/evaluate.md")
    assert not_printed(ROOT / "docs/guides/evaluate.md", (workplace / "runs/mteb_local/report.md").read_text()) == []
    assert "packages" in (workplace / "runs/packages_seeds/report.md").read_text()


def test_serve(runner, workplace):
    runner.run(ROOT / "docs/guides/serve.md")
    assert (workplace / "exported/onnx/model_quantized.onnx").is_file()


def test_publish(runner, workplace, capsys):
    shutil.copytree(workplace / "runs/tiny/model", workplace / "original/checkpoint")
    shutil.move(workplace / "original/checkpoint/config.json", workplace / "original")
    push = "neobert-hf publish models/distilled me/my-embeddings --card my/card.yaml --package_url"
    runner.read_only += (push,)
    runner.run(ROOT / "docs/guides/publish.md")
    printed = capsys.readouterr().out
    assert "FAIL" not in printed and not_printed(ROOT / "docs/guides/publish.md", printed, digits=True) == []
    assert (workplace / "runs/hub/README.md").is_file() and (workplace / "runs/state_dict").is_dir()


def test_architecture(runner):
    runner.run(ROOT / "docs/architecture.md")
    assert runner.names["loss"].isfinite()


def test_no_page_with_blocks_is_forgotten():
    tested = set(re.findall(r'ROOT / "([\w/]+\.md)"', (ROOT / "tests/docs/test_guides.py").read_text()))
    with_blocks = {page.name for page in pages() for block in blocks_of(page) if block.language in ("bash", "python")}
    assert with_blocks == {name.split("/")[-1] for name in tested} | {"CONTRIBUTING.md"}
