"""`neobert-hf publish`: a complete, checked repository, which others load with the package and without it."""

import json
import os
import re
import shutil
import subprocess
import venv
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
import torch
import yaml
from huggingface_hub import EvalResult, HfApi, ModelCard, constants
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM
from neobert_hf.hub.card import MARK
from neobert_hf.hub.model_folder import DOWNLOADED
from neobert_hf.hub.publishing import STALE, PublishSettings, build_folder
from tests.helpers.examples import status_of
from tests.helpers.models import CLASSES, ROOT, small_model
from tests.helpers.small_tokenizer import small_tokenizer
from tests.hub.hub_clients import TEXTS, both_stages, load_all, outputs
from tests.model.reference import write_reference


AUTO_MAP = NeoBERTConfig.auto_classes
ADDRESS = ["--package_url", "https://github.com/me/neobert_hf"]
CARD = """
license: mit
language: [en]
datasets: [tiiuae/falcon-refinedweb]
text: The first thousand documents.
eval_results:
- {task_type: fill-mask, dataset_type: web, dataset_name: RefinedWeb, metric_type: perplexity, metric_value: 9.51234}
"""
CODE = {"modeling_neobert.py", "configuration_neobert.py", "cpu_neobert.py"}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json"}
FILES = {"README.md", "config.json", "golden.json", "model.safetensors", *TOKENIZER, *CODE}
SENTENCE_FILES = {
    *("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "1_Pooling/config.json"),
    *("2_Dense/config.json", "2_Dense/model.safetensors", "3_Normalize/config.json"),
}


@pytest.fixture(scope="module")
def work(masked_lm, embedder, contextual, tmp_path_factory) -> Path:
    """Folders `mlm`, `embedder` and `contextual` as they leave training, what their cards shall say, and a `page`."""
    folder = tmp_path_factory.mktemp("publish")
    for name, source in {"mlm": masked_lm, "embedder": embedder, "contextual": contextual}.items():
        shutil.copytree(source, folder / name)
    # What is not of the model is not published.
    for name in ("1_Pooling/pytorch_model.bin", ".env", "optimizer.pt", "notes.txt", "id_rsa"):
        (folder / "embedder" / name).write_text("secret")
    (folder / "card.yaml").write_text(CARD)
    shutil.copytree(ROOT / "examples" / "browser", folder / "page")
    (folder / "page" / "model").mkdir()
    (folder / "page" / "model" / "model.onnx").write_bytes(b"a model")
    return folder


def content_of(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def equal_tensors(left: Path, right: Path) -> bool:
    before, after = (load_file(folder / "model.safetensors") for folder in (left, right))
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


# What is sent


@pytest.fixture
def api(monkeypatch):
    """The client of the Hub: it takes the calls that the real one takes, keeps what is uploaded, and sends nothing."""
    api = create_autospec(HfApi, instance=True)

    def upload_folder(folder_path, **options):
        api.sent = content_of(folder_path)
        return SimpleNamespace(pr_url=None, commit_url="the commit")

    api.upload_folder.side_effect = upload_folder
    monkeypatch.setattr("neobert_hf.hub.publishing.HfApi", lambda **options: api)
    return api


def test_a_model_is_sent_whole_and_nothing_else(api, work, tmp_path, capsys):
    output = ["--output_dir", str(tmp_path / "sent")]
    assert status_of(["publish", str(work / "embedder"), "me/embedder", *ADDRESS, *output]) == 0
    assert api.sent == content_of(tmp_path / "sent") and api.sent.keys() == FILES | SENTENCE_FILES
    assert equal_tensors(work / "embedder", tmp_path / "sent")
    assert json.loads(api.sent["config.json"])["auto_map"] == AUTO_MAP
    assert f"git+{ADDRESS[1]}" in api.sent["README.md"].decode()
    assert api.create_repo.call_args.kwargs["private"] is True
    assert api.upload_folder.call_args.kwargs["repo_id"] == "me/embedder"
    assert "the commit" in capsys.readouterr().out


def test_a_public_page_and_a_pull_request(api, work):
    """A page is sent as it is, as a static Space."""
    assert status_of(["publish", str(work / "page"), "me/page", "--public", "--pr"]) == 0
    assert api.sent == content_of(work / "page")
    created, sent = api.create_repo.call_args.kwargs, api.upload_folder.call_args.kwargs
    assert (created["repo_type"], created["space_sdk"], created["private"]) == ("space", "static", False)
    assert sent["repo_type"] == "space" and sent["create_pr"] is True and sent["delete_patterns"] is None


def test_dry_run_sends_nothing_and_prints_what_would_be_sent(api, work, tmp_path, capsys):
    output = tmp_path / "output"
    assert status_of(["publish", str(work / "mlm"), "me/mlm", "--dry_run", "--output_dir", str(output)]) == 0
    assert api.mock_calls == [] and content_of(output).keys() == FILES
    printed = capsys.readouterr().out
    assert all(f" {len(content):,}  {name}\n" in printed for name, content in content_of(output).items())


# What is given after the folder, and what the error names.
REFUSED = {
    "no address of the package": (["me/model"], "--package_url"),
    "a name with a space": (["me/my model", *ADDRESS], "`repo_id` is 'me/my model'"),
    "no owner": (["model", *ADDRESS], "OWNER/NAME"),
    "an output that is there": (["me/model", *ADDRESS, "--output_dir", "."], "exists"),
    "a card that is not": (["me/model", *ADDRESS, "--card", "absent.yaml"], "absent.yaml"),
    "a key of a card": (["me/model", *ADDRESS, "--card", "card.yaml"], "'licence'"),
    "a key of a result": (["me/model", *ADDRESS, "--card", "results.yaml"], "results.yaml: `eval_results`"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_requests_are_refused(case, api, work, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("card.yaml").write_text("licence: mit")
    Path("results.yaml").write_text("eval_results: [{metric: 1}]")
    arguments, name = REFUSED[case]
    assert name in status_of(["publish", str(work / "mlm"), *arguments]) and not api.create_repo.called


def test_a_wrong_token_stops_before_work(api, work):
    api.whoami.side_effect = OSError("Invalid token")
    assert "Invalid token" in status_of(["publish", str(work / "mlm"), "me/mlm", *ADDRESS])
    assert api.mock_calls == [("whoami",)]


@pytest.mark.parametrize("refused", ["whoami", "create_repo", "upload_folder"])
def test_what_the_hub_refuses_is_one_line(refused, api, work):
    getattr(api, refused).side_effect = HTTPError("403 Forbidden for url\n\nYou need write access.")
    status = status_of(["publish", str(work / "page"), "me/page"])
    assert status.startswith("publish: ") and status.endswith("403 Forbidden for url You need write access.")
    assert "\n" not in status


def test_an_unhealthy_checkpoint_is_not_published(work, tmp_path):
    shutil.copytree(work / "embedder", tmp_path / "source")
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    tensors["layer_norm.weight"][0] = torch.nan
    save_file(tensors, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    command = ["publish", str(tmp_path / "source"), "me/model", "--dry_run", "--output_dir", str(tmp_path / "output")]
    assert "layer_norm.weight" in status_of(command) and not list(tmp_path.glob("output*"))


def test_files_of_an_earlier_model_go_and_those_of_the_owner_stay():
    """With a `modules.json` that is left, a masked LM would load as an embedding model."""
    sharded = ["model-00001-of-00002.safetensors", "pytorch_model-00001-of-00002.bin"]
    ours = ["model.safetensors", *sharded, "modules.json", "onnx/model_fp16.onnx", "2_Dense/model.safetensors"]
    theirs = ["models/other.safetensors", "model-ab/c-of-other.safetensors", "pytorch_models/a.bin", "model-card.bin"]
    assert list(filter_repo_objects([*ours, *theirs, "my/model.py", "1_notes/a.md"], allow_patterns=STALE)) == ours


# Loading what was published


def build(work: Path, source: str, folder: Path, **options) -> ModelCard:
    folder.mkdir(parents=True)
    build_folder(PublishSettings(str(work / source), f"me/{source}", **options), folder)
    return ModelCard.load(folder / "README.md")


@pytest.fixture(scope="module")
def hub(work) -> Path:
    """A folder for `HF_HOME`, as a client of the Hub has it after downloading the models, which also lie in `me`."""
    for name in ("mlm", "embedder", "contextual"):
        build(work, name, work / "me" / name, card=str(work / "card.yaml"))
        cached, commit = work / "hf_home" / "hub" / f"models--me--{name}", "0123456789abcdef0123456789abcdef01234567"
        for file in filter_repo_objects(content_of(work / "me" / name), allow_patterns=DOWNLOADED):
            copy = cached / "snapshots" / commit / file
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(work / "me" / name / file, copy)
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text(commit)
    return work / "hf_home"


def check_loaded(results: dict, work: Path) -> None:
    model, tokenizer = NeoBERTForMaskedLM.from_pretrained(work / "mlm"), AutoTokenizer.from_pretrained(work / "mlm")
    embedder = SentenceTransformer(str(work / "embedder"), device="cpu")
    expected = {"logits": outputs(model, tokenizer), "states": outputs(model.model, tokenizer)}
    expected |= {"embeddings": embedder.encode(TEXTS, prompt="dogs and ", convert_to_tensor=True)}
    expected |= {"contextual": both_stages(SentenceTransformer(str(work / "contextual"), device="cpu"))}
    for name, tensor in expected.items():
        assert torch.equal(results[name], tensor), name
    assert len(results["contextual"].unique(dim=0)) == 8


def test_loading_with_the_package(hub, work, monkeypatch):
    """With trust in the code on the Hub as well, the installed package is what runs."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub / "hub"))
    assert status_of(["doctor", "me/mlm"]) == 0
    for trust in ({}, {"trust_remote_code": True}):
        results = load_all(**trust)
        check_loaded(results, work)
        assert results["module"] == "neobert_hf.modeling_neobert"


@pytest.mark.slow
def test_loading_without_the_package(hub, work):
    """In a virtual environment that has everything else, and saving from there."""
    venv.create(work / "venv", symlinks=True, with_pip=False)
    (site,) = (work / "venv").glob("lib/python*/site-packages")
    # Only this folder: files there that point to an editable neobert_hf are not followed.
    (site / "others.pth").write_text(str(Path(torch.__file__).parent.parent) + "\n")
    command = [work / "venv" / "bin" / "python", ROOT / "tests" / "hub" / "hub_clients.py", work]
    subprocess.run(command, check=True, env=os.environ | {"HF_HOME": str(hub), "PYTHONPATH": ""}, timeout=1500)
    results = torch.load(work / "results.pt", weights_only=True)
    assert "transformers_modules" in results["module"]
    check_loaded(results, work)
    for name in ("logits", "embeddings"):
        assert torch.equal(results[f"{name} again"], results[name])
    for name in ("again", "again_and_again", "embedder_again"):
        assert json.loads((work / name / "config.json").read_text())["auto_map"] == AUTO_MAP
        assert CODE <= content_of(work / name).keys()
    # What was saved there is read here.
    model = NeoBERTForMaskedLM.from_pretrained(work / "again_and_again")
    assert torch.equal(outputs(model, AutoTokenizer.from_pretrained(work / "mlm")), results["logits"])


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_saves_the_whole_auto_map_and_its_code(cls, tmp_path):
    small_model(cls).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == AUTO_MAP
    assert content_of(tmp_path).keys() == {"config.json", "model.safetensors", *CODE}


def test_publishing_a_published_folder_changes_nothing(hub, work, tmp_path):
    """What its card says need not be said again."""
    build(work / "me", "embedder", tmp_path / "again")
    assert content_of(tmp_path / "again") == content_of(work / "me" / "embedder")


def test_an_original_checkpoint_keeps_its_tensors_and_gets_the_code(tmp_path):
    """Its class names and its `auto_map`, which names code that is not there, give way to this package's."""
    source = write_reference(tmp_path / "published", "published")
    small_tokenizer(500).save_pretrained(source)
    # Loading would round the weights to what the config says.
    values = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(values | {"torch_dtype": "bfloat16"}))
    build(tmp_path, "published", tmp_path / "folder")
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert config["auto_map"] == AUTO_MAP and config["architectures"] == ["NeoBERTForMaskedLM"]
    assert equal_tensors(source, tmp_path / "folder") and config["dtype"] == "float32"


def test_weights_stored_in_fewer_bits_than_the_model_computes_in_stay_so(work, tmp_path):
    source = shutil.copytree(work / "mlm", tmp_path / "half")
    weights = {name: tensor.half() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    build(tmp_path, "half", tmp_path / "folder")
    assert equal_tensors(source, tmp_path / "folder")
    assert NeoBERTForMaskedLM.from_pretrained(tmp_path / "folder").dtype == torch.float32


def test_a_student_says_whose_vectors_it_learned(work, tmp_path):
    shutil.copytree(work / "embedder", tmp_path / "student")
    (tmp_path / "student" / "teacher.json").write_text('{"teacher": "a/teacher", "weights": "0"}')
    build(tmp_path, "student", tmp_path / "folder")
    assert (tmp_path / "folder" / "teacher.json").read_text() == (tmp_path / "student" / "teacher.json").read_text()
    # One that another model has left goes.
    assert "teacher.json" in STALE


# The card


def run_code_of(card: ModelCard, work: Path, monkeypatch) -> dict:
    """The names after the lines of Python below the mark. From the current folder, `me/...` are local folders."""
    monkeypatch.chdir(work)
    names: dict = {}
    for code in re.findall(r"```python\n(.*?)```", card.text.split(MARK)[1], re.DOTALL):
        exec(code, names)
    return names


def test_card_tells_what_is_known_and_nothing_else(hub, work, monkeypatch):
    """Whoever copies the lines out of it gets the model."""
    card = ModelCard.load(work / "me" / "mlm" / "README.md")
    data = card.data
    assert (data.license, data.language, data.pipeline_tag) == ("mit", ["en"], "fill-mask")
    assert (data.library_name, data.datasets) == ("transformers", ["tiiuae/falcon-refinedweb"])
    (result,) = data.eval_results
    assert (result.dataset_name, result.metric_type, result.metric_value) == ("RefinedWeb", "perplexity", 9.5123)
    assert data.to_dict()["model-index"][0]["name"] == "mlm"
    model = NeoBERTForMaskedLM.from_pretrained(work / "mlm")
    for text in (f"{model.num_parameters():,} parameters", "The first thousand documents.", "git+PACKAGE_URL"):
        assert text in card.text, text
    assert not re.search(r"{{|{%|None", card.text)
    names = run_code_of(card, work, monkeypatch)
    assert torch.equal(outputs(names["model"], names["tokenizer"]), outputs(model, names["tokenizer"]))


def test_the_card_of_a_contextual_folder_says_how_it_is_used(hub, work, monkeypatch):
    card = ModelCard.load(work / "me" / "contextual" / "README.md")
    assert card.data.pipeline_tag == "feature-extraction" and "contextual" in card.data.tags
    names = run_code_of(card, work, monkeypatch)
    assert names["queries"].shape == (1, 64) and names["documents"].shape == (2, 64)


def test_the_card_of_sentence_transformers_is_joined(hub, work):
    """Its text stays, with the model's name in its lines; ours follows, counts all modules and says where texts end."""
    model, card = SentenceTransformer(str(work / "embedder")), ModelCard.load(work / "me" / "embedder" / "README.md")
    theirs, ours = card.text.split(MARK)
    assert "## Training Details" in theirs and 'SentenceTransformer("me/embedder")' in theirs
    assert 'SentenceTransformer("me/embedder", trust_remote_code=True)' in ours
    assert f"{sum(tensor.numel() for tensor in model.state_dict().values()):,} parameters" in ours
    assert "up to 32 tokens" in ours and "64 tokens" not in ours and str(work) not in card.content
    assert card.data.library_name == "sentence-transformers" and card.data.pipeline_tag == "sentence-similarity"
    assert {"sentence-transformers", "dense", "neobert"} <= set(card.data.tags)


def test_an_own_card_and_its_results(work, tmp_path, capsys):
    """What the user wrote stays; a score replaces the earlier one of the same task and data.

    A link to a file that is not sent is named.
    """

    def result_of(name: str, value: float) -> EvalResult:
        return EvalResult("sts", dataset_type=name, dataset_name=name, metric_type="spearman", metric_value=value)

    shutil.copytree(work / "mlm", tmp_path / "mlm")
    own = ModelCard(
        "---\nlicense: apache-2.0\n---\n\n# Mine\n\nAbout it, as [here](../notes.md#top) and [there](https://a.b).\n"
    )
    own.data.model_name, own.data.eval_results = "mlm", [result_of("STS12", 0.5), result_of("STS13", 0.6)]
    own.save(tmp_path / "mlm" / "README.md")
    (tmp_path / "facts.yaml").write_text(yaml.safe_dump({"eval_results": [vars(result_of("STS12", 0.712345))]}))
    card = build(tmp_path, "mlm", tmp_path / "folder", card=str(tmp_path / "facts.yaml"))
    assert "links to ../notes.md, which" in capsys.readouterr().out
    assert card.text.lstrip().startswith("# Mine\n\nAbout it, as [here]") and card.data.license == "apache-2.0"
    assert {each.dataset_name: each.metric_value for each in card.data.eval_results} == {"STS13": 0.6, "STS12": 0.7123}
