"""`neobert-hf publish`: a complete, checked repository, on a small Hub and off it."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
from huggingface_hub import EvalResult, ModelCard
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer
from transformers import AutoTokenizer

import neobert_hf
from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM
from neobert_hf.cli import main
from neobert_hf.embeddings.inference import embedding_fingerprint, load_embedding_model
from neobert_hf.hub.card import MARK, read_mteb_results
from neobert_hf.hub.publish import STALE, PublishSettings, build_folder
from tests.helpers.hub_server import TOKEN, HubServer
from tests.helpers.models import ROOT, small_model
from tests.helpers.small_tokenizer import small_tokenizer
from tests.hub.hub_clients import ADDRESS, TEXTS, outputs


AUTO_MAP = NeoBERTConfig.auto_classes
# Pushes of whole folders take a minute each where the machine is busy.
pytestmark = pytest.mark.slow


CARD = """
license: mit
language: [en]
datasets: [tiiuae/falcon-refinedweb]
text: The first thousand documents.
eval_results:
- {task_type: fill-mask, dataset_type: web, dataset_name: RefinedWeb, metric_type: perplexity, metric_value: 9.51234}
"""
CODE = {"modeling_neobert.py", "configuration_neobert.py", "cpu_neobert.py"}
FILES = {
    "README.md",
    "config.json",
    "golden.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
} | CODE
SENTENCE_FILES = {
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "1_Pooling/config.json",
}


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """Folders `mlm` and `embedder` as they leave training, what their cards shall say, and a `page`."""
    folder = tmp_path_factory.mktemp("publish")
    small_model(NeoBERTForMaskedLM, vocab_size=200).save_pretrained(folder / "mlm")
    small_tokenizer(200).save_pretrained(folder / "mlm")
    modules = [Transformer(str(folder / "mlm")), Pooling(64, pooling_mode="mean")]
    SentenceTransformer(modules=modules).save_pretrained(str(folder / "embedder"))
    # What is not of the model is not published.
    for name in ("1_Pooling/pytorch_model.bin", ".env", "optimizer.pt", "notes.txt", "id_rsa"):
        (folder / "embedder" / name).write_text("secret")
    (folder / "card.yaml").write_text(CARD)
    shutil.copytree(ROOT / "examples" / "browser", folder / "page")
    (folder / "page" / "model").mkdir()
    (folder / "page" / "model" / "model.onnx").write_bytes(b"a model")
    return folder


def files_of(folder: Path) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


# The Hub


def environment(hub: HubServer, work: Path, name: str) -> dict[str, str]:
    changes = {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(work / "cache" / name),
        "OMP_NUM_THREADS": "1",
    }
    return os.environ | changes


def run_client(python: str, hub: HubServer, work: Path, name: str, **changes) -> dict:
    command = [python, str(ROOT / "tests" / "hub" / "hub_clients.py"), name, str(work)]
    subprocess.run(command, check=True, env=environment(hub, work, name) | changes, timeout=1500)
    return torch.load(work / f"{name}.pt", weights_only=False)


@pytest.fixture(scope="module")
def published(work):
    """The server after all steps of `hub_clients.publisher`; what they gave, and what was loaded."""
    with HubServer() as hub:
        results = run_client(sys.executable, hub, work, "publisher")
        yield hub, results.pop("steps"), results


def between(hub: HubServer, results: dict, name: str) -> list[str]:
    """The requests of one step."""
    counts = [results["before"], *(count for step, (_, count) in list(results.items())[1:])]
    position = list(results).index(name)
    return hub.requests[counts[position - 1] : counts[position]]


def test_dry_run_sends_nothing(published):
    hub, results, _ = published
    assert results["dry run"][0] is None and between(hub, results, "dry run") == []


def test_a_model_is_sent_whole_and_nothing_else(published, work):
    hub, results, _ = published
    assert results["first"][0] is None and results["embedder"][0] is None
    mlm, embedder = hub.repositories["me/mlm"], hub.repositories["me/embedder"]
    assert mlm.private and set(mlm.main) == FILES | {".gitattributes"}
    assert not embedder.private and set(embedder.main) == FILES | SENTENCE_FILES | {".gitattributes"}
    (work / "weights.safetensors").write_bytes(mlm.main["model.safetensors"])
    sent, trained = load_file(work / "weights.safetensors"), load_file(work / "mlm" / "model.safetensors")
    assert sent.keys() == trained.keys() and all(torch.equal(sent[name], trained[name]) for name in sent)
    assert json.loads(mlm.main["config.json"])["auto_map"] == AUTO_MAP
    assert f"git+{ADDRESS}" in mlm.main["README.md"].decode()


def test_unchanged_folder_is_not_sent_again(published):
    hub, results, _ = published
    assert results["unchanged"][0] is None
    requests = between(hub, results, "unchanged")
    assert requests and not [one for one in requests if "/commit/" in one or one.startswith("PUT")]
    assert [one for one in between(hub, results, "first") if "/commit/" in one]


def test_a_pull_request_leaves_main_alone_and_files_of_an_earlier_model_go(published):
    """A masked LM in the place of an embedding model: with `modules.json` left it would load as one."""
    hub, results, _ = published
    assert results["other model"][0] is None
    repository = hub.repositories["me/embedder"]
    assert set(repository.refs) == {"main", "refs/pr/1"} and "modules.json" in repository.main
    assert set(repository.commits[repository.refs["refs/pr/1"]]) == FILES | {".gitattributes"}


def test_files_of_the_owner_stay():
    """Patterns of the Hub client match across folders."""
    sharded = ["model-00001-of-00002.safetensors", "pytorch_model-00001-of-00002.bin"]
    ours = ["model.safetensors", *sharded, "pytorch_model.bin", "onnx/model_fp16.onnx", "2_Dense/model.safetensors"]
    theirs = ["models/other.safetensors", "model-ab/c-of-other.safetensors", "pytorch_models/a.bin", "model-card.bin"]
    assert list(filter_repo_objects([*ours, *theirs, "my/model.py", "1_notes/a.md"], allow_patterns=STALE)) == ours


def test_a_page_is_sent_as_a_static_space(published, work):
    hub, results, _ = published
    assert results["page"][0] is None
    page = hub.repositories["me/page"]
    sent = {name: content for name, content in page.main.items() if name != ".gitattributes"}
    assert page.kind == "space"
    assert sent == {name: (work / "page" / name).read_bytes() for name in files_of(work / "page")}


def test_what_stops_before_work(published):
    """A wrong token, and a card that does not say where others get the package."""
    hub, results, _ = published
    assert "nvalid" in results["wrong token"][0]
    assert between(hub, results, "wrong token") == ["GET /api/whoami-v2"] and "me/other" not in hub.repositories
    assert "--package_url" in results["no address"][0] and between(hub, results, "no address") == []


def test_doctor_of_the_hub_repository(published):
    assert published[1]["doctor"][0] == 0


def check_loaded(results: dict, work: Path) -> None:
    model, tokenizer = NeoBERTForMaskedLM.from_pretrained(work / "mlm"), AutoTokenizer.from_pretrained(work / "mlm")
    embedder = SentenceTransformer(str(work / "embedder"))
    expected = {"logits": outputs(model, tokenizer), "states": outputs(model.model, tokenizer)}
    expected |= {"embeddings": embedder.encode(TEXTS, convert_to_tensor=True)}
    for name, tensor in expected.items():
        assert torch.equal(results[name], tensor), name
    assert files_of(Path(results["snapshot"])) == FILES | {".gitattributes"} and results["license"] == "mit"


def test_loading_with_the_package(published, work):
    results = published[2]
    check_loaded(results, work)
    # With trust in the remote code as well, the installed package is what runs.
    check_loaded(results["trusted"], work)
    assert results["module"] == results["trusted"]["module"] == "neobert_hf.modeling_neobert"


def test_loading_without_the_package(published, work):
    """In a virtual environment that has everything else, and saving from there."""
    venv.create(work / "venv", symlinks=True, with_pip=False)
    python = str(work / "venv" / "bin" / "python")
    (site,) = (work / "venv").glob("lib/python*/site-packages")
    # Only this folder: files there that point to an editable neobert_hf are not followed.
    (site / "others.pth").write_text(str(Path(torch.__file__).parent.parent) + "\n")
    results = run_client(python, published[0], work, "stranger", PYTHONPATH="")
    assert results["spec"] is None and "transformers_modules" in results["module"]
    assert "trust_remote_code=True" in results["untrusted"]
    check_loaded(results, work)
    assert torch.equal(results["again"], results["logits"])
    assert torch.equal(results["embeddings again"], results["embeddings"])
    for name in ("again", "again_and_again", "embedder_again"):
        assert json.loads((work / name / "config.json").read_text())["auto_map"] == AUTO_MAP
        assert CODE <= files_of(work / name)
    # What was saved there is read here.
    for folder in (work / "again", work / "again_and_again"):
        model = NeoBERTForMaskedLM.from_pretrained(folder)
        assert torch.equal(outputs(model, AutoTokenizer.from_pretrained(work / "mlm")), results["logits"])


# The code beside the weights


@pytest.mark.parametrize(
    "name", [reference.split(".")[1] for key, reference in AUTO_MAP.items() if key != "AutoConfig"]
)
def test_every_class_saves_the_whole_auto_map_and_its_code(name, tmp_path):
    small_model(getattr(neobert_hf, name)).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == AUTO_MAP
    assert files_of(tmp_path) == {"config.json", "model.safetensors", *CODE}


# The card


def build(work: Path, source: str, folder: Path, **options) -> ModelCard:
    folder.mkdir(parents=True)
    build_folder(PublishSettings(str(work / source), f"me/{source}", **options), folder)
    return ModelCard.load(folder / "README.md")


def result_of(name: str, value: float) -> EvalResult:
    return EvalResult(task_type="sts", dataset_type=name, dataset_name=name, metric_type="spearman", metric_value=value)


def test_card_tells_what_is_known_and_nothing_else(work, tmp_path, monkeypatch):
    """Whoever copies the lines out of it gets the model. Here `me/mlm` is a local folder."""
    card = build(work, "mlm", tmp_path / "me" / "mlm", card=str(work / "card.yaml"))
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
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(re.search(r"```python\n(.*?)```", card.text, re.DOTALL)[1], names)
    assert torch.equal(outputs(names["model"], names["tokenizer"]), outputs(model, names["tokenizer"]))


def test_the_card_of_sentence_transformers_is_joined(work, tmp_path):
    """Its text stays, with the model's name in its lines; ours follows, counts all modules and says where texts end."""
    model = SentenceTransformer(str(work / "embedder"), device="cpu")
    prompts = {"query": "Find it. ", "document": ""}
    model = SentenceTransformer(modules=[*model, Dense(64, 8)], prompts=prompts, device="cpu")
    model.max_seq_length = 16
    model.save(str(tmp_path / "short"))
    card = build(tmp_path, "short", tmp_path / "folder")
    theirs, ours = card.text.split(MARK)
    assert "## Training Details" in theirs and 'SentenceTransformer("me/short")' in theirs
    assert 'SentenceTransformer("me/short", trust_remote_code=True)' in ours
    assert f"{sum(tensor.numel() for tensor in model.state_dict().values()):,} parameters" in ours
    assert "up to 16 tokens" in ours and "64 tokens" not in ours
    assert card.data.library_name == "sentence-transformers" and card.data.pipeline_tag == "sentence-similarity"
    assert {"sentence-transformers", "dense", "neobert"} <= set(card.data.tags)
    assert card.data.license is None and str(tmp_path) not in card.content
    # The model that others load is the one that was trained.
    published = SentenceTransformer(str(tmp_path / "folder"), device="cpu")
    assert published.prompts == prompts and published.max_seq_length == 16
    assert (published.encode_query(TEXTS) == model.encode(TEXTS, prompt="Find it. ")).all()


def test_publishing_a_published_folder_changes_nothing(work, tmp_path):
    """What its card says need not be said again."""
    build(work, "embedder", tmp_path / "embedder", card=str(work / "card.yaml"))
    build(tmp_path, "embedder", tmp_path / "again")
    assert files_of(tmp_path / "embedder") == files_of(tmp_path / "again") == FILES | SENTENCE_FILES
    for name in FILES | SENTENCE_FILES:
        assert (tmp_path / "embedder" / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_an_own_card_and_results_of_mteb(work, tmp_path):
    """What the user wrote stays; scores of MTEB replace earlier ones of the same task, and must be of this model."""
    shutil.copytree(work / "mlm", tmp_path / "mlm")
    own = ModelCard("---\nlicense: apache-2.0\n---\n\n# Mine\n\nAbout it.\n")
    own.data.model_name, own.data.eval_results = "mlm", [result_of("STS12", 0.5), result_of("STS13", 0.6)]
    own.data.eval_results[0].dataset_revision = "abc"
    own.save(tmp_path / "mlm" / "README.md")
    loaded = load_embedding_model(str(work / "mlm"), torch.float32)
    settings = {"model": embedding_fingerprint(loaded), "dtype": "float32", "max_length": loaded.max_seq_length}
    result = {"task": "STS12", "type": "STS", "metric": "spearman", "score": 0.712345, "settings": settings}
    result["result"] = {"dataset_revision": "abc"}
    file = tmp_path / "results" / "STS12.json"
    file.parent.mkdir()
    file.write_text(json.dumps(result))
    card = build(tmp_path, "mlm", tmp_path / "folder", mteb_results=str(file.parent))
    assert card.text.lstrip().startswith("# Mine\n\nAbout it.\n") and card.data.license == "apache-2.0"
    found = {result.dataset_name: result.metric_value for result in card.data.eval_results}
    assert found == {"STS13": 0.6, "MTEB STS12": 0.7123}
    # Of texts that were cut to less than the model reads, the card says so.
    file.write_text(json.dumps(result | {"settings": settings | {"max_length": 16, "truncate_dim": 8}}))
    (found,) = read_mteb_results(file.parent, work / "mlm")
    assert "16 tokens" in found.dataset_name and "8 dimensions" in found.dataset_name
    file.write_text(json.dumps(result | {"settings": settings | {"model": "other"}}))
    with pytest.raises(ValueError, match="STS12.json"):
        read_mteb_results(file.parent, work / "mlm")
    with pytest.raises(ValueError, match=str(work)):
        read_mteb_results(work, work / "mlm")


# What is built, and what is refused


def test_weights_keep_their_dtype(work, tmp_path):
    """Also where the config says another, to which loading would round them."""
    shutil.copytree(work / "mlm", tmp_path / "mlm")
    edited("config.json", '"float32"', '"bfloat16"')(tmp_path / "mlm")
    build(tmp_path, "mlm", tmp_path / "folder")
    before, after = (load_file(folder / "model.safetensors") for folder in (work / "mlm", tmp_path / "folder"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((tmp_path / "folder" / "config.json").read_text())["dtype"] == "float32"


def with_nan(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["layer_norm.weight"][0] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edited(name: str, old: str, new: str):
    def edit(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return edit


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("token*"):
        file.unlink()


# What is done to an embedding model, and the name that the error says.
DAMAGES = {
    "NaN": (with_nan, "layer_norm.weight"),
    "no tokenizer": (without_tokenizer, "no tokenizer"),
    "tokenizer": (lambda folder: small_tokenizer(250).save_pretrained(folder), "vocab_size"),
    "config": (lambda folder: (folder / "config.json").write_text('{"model_type": "bert"}'), "'bert'"),
    "class": (edited("config.json", '"NeoBERTModel"', '"BertModel"'), "BertModel"),
    "link": (lambda folder: (folder / "secret.md").symlink_to("/etc/hostname"), "secret.md"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_unhealthy_checkpoints_are_not_published(damage, work, tmp_path):
    change, name = DAMAGES[damage]
    shutil.copytree(work / "embedder", tmp_path / "source")
    change(tmp_path / "source")
    output = tmp_path / "output"
    assert name in main(["publish", str(tmp_path / "source"), "me/model", "--dry_run", "--output_dir", str(output)])
    assert not list(tmp_path.glob("output*"))


@pytest.mark.parametrize(
    "arguments, name",
    [
        (["model"], "OWNER/NAME"),
        (["me/my model"], "my model"),
        (["me/model", "--output_dir", "."], "exists"),
        (["me/model", "--card", "absent.yaml"], "absent.yaml"),
        (["me/model", "--card", "card.yaml"], "'licence'"),
        (["me/model", "--dry"], "'--dry'"),
    ],
)
def test_wrong_requests_are_refused(arguments, name, work, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("card.yaml").write_text("licence: mit")
    assert name in main(["publish", str(work / "mlm"), *arguments, "--dry_run"])


def test_dry_run_prints_what_would_be_sent(work, tmp_path, capsys):
    output = tmp_path / "output"
    assert main(["publish", str(work / "mlm"), "me/mlm", "--dry_run", "--output_dir", str(output)]) is None
    printed = capsys.readouterr().out
    assert files_of(output) == FILES
    for name in FILES:
        assert re.search(rf"^ *{(output / name).stat().st_size:,}  {re.escape(name)}$", printed, re.MULTILINE), name


def test_original_checkpoint_becomes_a_repository(shared, tmp_path):
    """Its class names and its `auto_map`, which names code that is not there, give way to this package's."""
    source, folder = tmp_path / "published", tmp_path / "folder"
    source.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(shared / "reference" / "published" / name, source / name)
    small_tokenizer(500).save_pretrained(source)
    build(tmp_path, "published", folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["auto_map"] == AUTO_MAP and config["architectures"] == ["NeoBERTForMaskedLM"]
    before, after = (load_file(path / "model.safetensors") for path in (source, folder))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
