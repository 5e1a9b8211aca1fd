"""`neobert-hf publish`: a complete, checked repository, on a small Hub and off it."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import venv
from pathlib import Path

import pytest
import torch
from huggingface_hub import EvalResult, ModelCard
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer
from transformers import AutoConfig, AutoTokenizer

import neobert_hf
from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM, NeoBERTForSequenceClassification
from neobert_hf.cli import main
from neobert_hf.embeddings.inference import embedding_fingerprint, load_embedding_model
from neobert_hf.hub.card import MARK, gather_facts
from neobert_hf.hub.publish import STALE, PublishSettings, build_folder
from tests.helpers.examples import load_example
from tests.helpers.hub_clients import ADDRESS, TEXTS, outputs
from tests.helpers.hub_server import TOKEN, HubServer
from tests.helpers.models import ROOT, small_config, small_model
from tests.helpers.small_tokenizer import small_tokenizer


AUTO_MAP = NeoBERTConfig.auto_classes
# Pushes of whole folders take a minute each where the machine is busy.
pytestmark = pytest.mark.slow


CARD = """
license: mit
language: [en]
datasets: [tiiuae/falcon-refinedweb]
text: The first thousand documents.
eval_results:
- {task_type: fill-mask, dataset_type: refinedweb, dataset_name: RefinedWeb, metric_type: perplexity, metric_value: 9.5}
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
    """Folders `mlm` and `embedder` as they leave training, and what their cards shall say."""
    folder = tmp_path_factory.mktemp("publish")
    small_model(NeoBERTForMaskedLM, vocab_size=200).save_pretrained(folder / "mlm")
    small_tokenizer(200).save_pretrained(folder / "mlm")
    modules = [Transformer(str(folder / "mlm")), Pooling(64, pooling_mode="mean")]
    SentenceTransformer(modules=modules).save_pretrained(str(folder / "embedder"))
    # What is not of the model is not published.
    for name in ("1_Pooling/pytorch_model.bin", ".env", "optimizer.pt", "notes.txt", "id_rsa"):
        (folder / "embedder" / name).write_text("secret")
    (folder / "card.yaml").write_text(CARD)
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
    command = [python, str(ROOT / "tests" / "helpers" / "hub_clients.py"), name, str(work)]
    subprocess.run(command, check=True, env=environment(hub, work, name) | changes, timeout=1500)
    return torch.load(work / f"{name}.pt", weights_only=False)


@pytest.fixture(scope="module")
def published(work):
    """The server after a killed push and all steps of `hub_clients.publisher`; what they gave, and what it loaded."""
    with HubServer() as hub:
        hub.hold = threading.Event()
        command = [sys.executable, "-m", "neobert_hf.cli", "publish", str(work / "mlm"), "me/mlm"]
        command += ["--card", str(work / "card.yaml"), "--package_url", ADDRESS]
        process = subprocess.Popen(command, env=environment(hub, work, "killed"))
        try:
            while not hub.held.wait(1):
                assert process.poll() is None, "it ended before the upload began"
        finally:
            process.kill()
            process.wait()
        hub.hold.set()
        after_kill = (dict(hub.repositories["me/mlm"].main), dict(hub.objects))
        results = run_client(sys.executable, hub, work, "publisher")
        yield hub, results.pop("steps"), after_kill, results


def between(hub: HubServer, results: dict, name: str) -> list[str]:
    """The requests of one step."""
    counts = [results["before"], *(count for step, (_, count) in list(results.items())[1:])]
    position = list(results).index(name)
    return hub.requests[counts[position - 1] : counts[position]]


def test_killed_push_changes_nothing_and_is_repeated(published, work):
    hub, results, (files, objects), _ = published
    assert set(files) == {".gitattributes"} and not objects
    assert results["repeated"][0] is None
    repository = hub.repositories["me/mlm"]
    assert repository.private and set(repository.main) == FILES | {".gitattributes"}
    weights, sent = work / "weights.safetensors", repository.main["model.safetensors"]
    weights.write_bytes(sent)
    for name, tensor in load_file(work / "mlm" / "model.safetensors").items():
        assert torch.equal(load_file(weights)[name], tensor), name
    assert json.loads(repository.main["config.json"])["auto_map"] == AUTO_MAP
    assert f"git+{ADDRESS}" in repository.main["README.md"].decode()


def test_dry_run_sends_nothing(published):
    hub, results, *_ = published
    assert results["dry run"][0] is None and between(hub, results, "dry run") == []


def test_unchanged_folder_is_not_sent_again(published):
    hub, results, *_ = published
    assert results["unchanged"][0] is None
    requests = between(hub, results, "unchanged")
    assert requests and not [one for one in requests if "/commit/" in one or one.startswith("PUT")]
    assert [one for one in between(hub, results, "repeated") if "/commit/" in one]


def test_branch_and_pull_request_leave_main_alone(published):
    hub, results, *_ = published
    assert results["branch"][0] is None and results["pull request"][0] is None
    repository = hub.repositories["me/mlm"]
    assert set(repository.refs) == {"main", "v2", "refs/pr/2"}
    assert repository.commits[repository.refs["v2"]] == repository.main
    proposed = repository.commits[repository.refs["refs/pr/2"]]
    assert set(proposed) == FILES | SENTENCE_FILES | {".gitattributes"} and "modules.json" not in repository.main
    # Of a file that lies there already nothing is sent.
    assert results["pull request again"][0] is None
    requests = between(hub, results, "pull request again")
    assert requests and not [one for one in requests if one.startswith("PUT") or "/branch/" in one]


def test_what_stops_before_work(published):
    """A wrong token, and a card that does not say where others get the package."""
    hub, results, *_ = published
    assert "nvalid" in results["wrong token"][0]
    assert between(hub, results, "wrong token") == ["GET /api/whoami-v2"] and "me/other" not in hub.repositories
    assert "--package_url" in results["no address"][0] and between(hub, results, "no address") == []


def test_refused_upload_and_broken_connection_are_errors(published):
    hub, results, *_ = published
    assert "The storage is full" in results["refused"][0] and "Run the same command again" in results["refused"][0]
    assert set(hub.repositories["me/refused"].main) == {".gitattributes"}
    assert "disconnected" in results["dropped"][0]


def test_files_of_the_owner_stay():
    """Patterns of the Hub client match across folders."""
    sharded = ["model-00001-of-00002.safetensors", "pytorch_model-00001-of-00002.bin"]
    ours = ["model.safetensors", *sharded, "pytorch_model.bin", "onnx/model_fp16.onnx", "2_Dense/model.safetensors"]
    theirs = ["models/other.safetensors", "model-ab/c-of-other.safetensors", "pytorch_models/a.bin", "model-card.bin"]
    assert list(filter_repo_objects([*ours, *theirs, "my/model.py", "1_notes/a.md"], allow_patterns=STALE)) == ours


def test_embedding_model_on_the_hub(published):
    hub, results, *_ = published
    repository = hub.repositories["me/embedder"]
    assert results["embedder"][0] is None and not repository.private
    assert set(repository.main) == FILES | SENTENCE_FILES | {".gitattributes"}


def test_files_of_an_earlier_model_go(published):
    """A masked LM in the place of an embedding model: with `modules.json` left it would load as one."""
    hub, results, *_ = published
    repository = hub.repositories["me/embedder"]
    assert results["other model"][0] is None
    assert set(repository.commits[repository.refs["mlm"]]) == FILES | {".gitattributes"}


def test_doctor_of_the_hub_repository(published):
    assert published[1]["doctor"][0] == 0


def check_loaded(results: dict, work: Path) -> None:
    model, tokenizer = NeoBERTForMaskedLM.from_pretrained(work / "mlm"), AutoTokenizer.from_pretrained(work / "mlm")
    embedder = SentenceTransformer(str(work / "embedder"))
    expected = {"logits": outputs(model, tokenizer), "states": outputs(model.model, tokenizer)}
    expected |= {"branch": expected["logits"], "embeddings": embedder.encode(TEXTS, convert_to_tensor=True)}
    for name, tensor in expected.items():
        assert torch.equal(results[name], tensor), name
    assert files_of(Path(results["snapshot"])) == FILES | {".gitattributes"} and results["license"] == "mit"


def test_loading_with_the_package(published, work):
    results = published[3]
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


def test_auto_map_is_what_the_package_registers(tmp_path):
    import transformers

    for auto_class, reference in AUTO_MAP.items():
        module, name = reference.split(".")
        assert getattr(sys.modules[f"neobert_hf.{module}"], name) is getattr(neobert_hf, name)
        if auto_class != "AutoConfig":
            assert getattr(transformers, auto_class)._model_mapping[NeoBERTConfig].__name__ == name
    stale = small_config(auto_map={"AutoModel": "model.NeoBERT", "AutoModelForCausalLM": "model.NeoBERT"})
    stale.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).auto_map == AUTO_MAP


# The card


def build(work: Path, source: str, folder: Path, **options) -> ModelCard:
    folder.mkdir(parents=True)
    build_folder(PublishSettings(str(work / source), f"me/{source}", **options), folder)
    return ModelCard.load(folder / "README.md")


def result_of(name: str, value: float) -> EvalResult:
    return EvalResult(task_type="sts", dataset_type=name, dataset_name=name, metric_type="spearman", metric_value=value)


def test_card_tells_what_is_known(work, tmp_path):
    card = build(work, "mlm", tmp_path / "folder", card=str(work / "card.yaml"))
    data = card.data
    assert (data.license, data.language, data.pipeline_tag) == ("mit", ["en"], "fill-mask")
    assert (data.library_name, data.datasets) == ("transformers", ["tiiuae/falcon-refinedweb"])
    (result,) = data.eval_results
    assert (result.dataset_name, result.metric_type, result.metric_value) == ("RefinedWeb", "perplexity", 9.5)
    assert data.to_dict()["model-index"][0]["name"] == "mlm"
    parameters = sum(one.numel() for one in NeoBERTForMaskedLM.from_pretrained(work / "mlm").parameters())
    for text in (
        f"{parameters:,} parameters",
        "2 layers x 64, 2 heads, SwiGLU of width 64, RMSNorm",
        "RoPE, base 10,000",
        "The first thousand documents.",
        "| RefinedWeb | perplexity | 9.5 |",
        'AutoModelForMaskedLM.from_pretrained("me/mlm")',
        "git+PACKAGE_URL",
        "lebreton2025neobert",
    ):
        assert text in card.text, text
    assert "{{" not in card.text and "{%" not in card.text


def test_card_leaves_out_what_is_not_known(work, tmp_path):
    card = build(work, "mlm", tmp_path / "folder")
    assert card.data.license is None and card.data.eval_results is None and card.data.language is None
    assert not re.search(r"# (Settings of the training|Results)|None", card.text)


def test_the_card_of_sentence_transformers_is_joined(work, tmp_path):
    """Its text stays, with the model's name in its lines; ours follows, counts all modules and says where texts end."""
    model = SentenceTransformer(str(work / "embedder"), device="cpu")
    modules = [*model, Dense(64, 8)]
    prompts = {"query": "Find it. ", "document": ""}
    model = SentenceTransformer(modules=modules, prompts=prompts, device="cpu")
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
    assert str(tmp_path) not in card.content
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


def test_the_values_of_the_card_hold(work, tmp_path, capsys, monkeypatch):
    """Whoever copies the lines out of the card sees what it says. Here its `me/mlm` is a local folder."""
    card = build(work, "mlm", tmp_path / "me" / "mlm")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", card.text, re.DOTALL) if "tokens = " in block)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exec(code, {})
    values = torch.tensor([float(value) for value in re.search(r":4\]\)  # (.*)", card.text)[1].split(",")])
    found = torch.tensor(json.loads(re.search(r"tensor\((\[.*?\])", capsys.readouterr().out)[1]))
    assert (found - values).abs().max() < 1e-4  # four decimals


def test_settings_of_the_run_and_an_own_card(work, tmp_path):
    """The checkpoints beside the model, and what the user wrote; paths of this machine are nobody's business."""
    run = tmp_path / "run"
    shutil.copytree(work / "mlm", run / "model")
    (run / "checkpoint-9").mkdir()
    settings = {"learning_rate": 0.001, "model": "/home/me/encoder", "hidden_size": 64, "bf16": False}
    complete = {"engine": "plain", "settings": settings, "cursor": {}}
    (run / "checkpoint-9" / "complete.json").write_text(json.dumps(complete))
    own = ModelCard("---\nlicense: apache-2.0\n---\n\n# Mine\n\nAbout it.\n")
    own.data.eval_results, own.data.model_name = [result_of("sts", 0.7)], "earlier"
    own.save(run / "model" / "README.md")
    card = build(run, "model", tmp_path / "folder")
    assert card.text.lstrip().startswith("# Mine\n\nAbout it.\n") and card.data.license == "apache-2.0"
    assert [result.metric_value for result in card.data.eval_results] == [0.7]
    assert (
        "| `learning_rate` | 0.001 |" in card.text and "/home/me" not in card.text and "`hidden_size`" not in card.text
    )
    (tmp_path / "card.yaml").write_text("license: mit")
    assert build(run, "model", tmp_path / "other", card=str(tmp_path / "card.yaml")).data.license == "mit"


def test_mteb_results_are_in_the_model_index(work, tmp_path):
    loaded = load_embedding_model(str(work / "mlm"), torch.float32)
    own = {"model": embedding_fingerprint(loaded), "dtype": "float32", "max_length": loaded.max_seq_length}
    result = {"task": "STS12", "type": "STS", "metric": "cosine_spearman", "score": 0.712345}
    result |= {"settings": own, "result": {"dataset_revision": "abc"}}
    file = tmp_path / "results" / "STS12.json"
    file.parent.mkdir()
    file.write_text(json.dumps(result))
    # They replace earlier results of the same tasks.
    shutil.copytree(work / "mlm", tmp_path / "mlm")
    earlier = ModelCard("---\nlicense: mit\n---\n")
    earlier.data.model_name, earlier.data.eval_results = "mlm", [result_of("STS12", 0.5), result_of("STS13", 0.6)]
    earlier.data.eval_results[0].metric_type = "cosine_spearman"
    earlier.data.eval_results[0].dataset_revision = "abc"
    earlier.save(tmp_path / "mlm" / "README.md")
    card = build(tmp_path, "mlm", tmp_path / "folder", mteb_results=str(file.parent))
    found = [(result.dataset_name, result.metric_value) for result in card.data.eval_results]
    assert found == [("STS13", 0.6), ("MTEB STS12", 0.7123)]
    # Of texts that were cut to less than the model reads, the card says so.
    file.write_text(json.dumps(result | {"settings": own | {"max_length": 16, "truncate_dim": 8}}))
    (found,) = gather_facts(work / "mlm", None, str(file.parent))["eval_results"]
    assert "16 tokens" in found.dataset_name and "8 dimensions" in found.dataset_name
    file.write_text(json.dumps(result | {"settings": own | {"model": "other"}}))
    with pytest.raises(ValueError, match="STS12.json"):
        gather_facts(work / "mlm", None, str(file.parent))
    with pytest.raises(ValueError, match="holds no results"):
        gather_facts(work / "mlm", None, str(work))


# What is refused, and what is built


def test_weights_keep_their_dtype(work, tmp_path):
    """Also where the config says another, to which loading would round them."""
    shutil.copytree(work / "mlm", tmp_path / "mlm")
    config = json.loads((tmp_path / "mlm" / "config.json").read_text()) | {"dtype": "bfloat16"}
    (tmp_path / "mlm" / "config.json").write_text(json.dumps(config))
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


DAMAGES = {
    "NaN": (with_nan, "layer_norm.weight"),
    "module": (edited("modules.json", "sentence_transformers.", "my."), "my."),
    "no tokenizer": (without_tokenizer, "has no tokenizer.*--tokenizer"),
    "tokenizer": (lambda folder: small_tokenizer(250).save_pretrained(folder), "ids up to 249"),
    "config": (lambda folder: (folder / "config.json").write_text('{"model_type": "bert"}'), "'bert'"),
    "class": (edited("config.json", '"NeoBERTModel"', '"BertModel"'), "BertModel"),
    "link": (lambda folder: (folder / "secret.md").symlink_to("/etc/hostname"), "secret.md"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_unhealthy_checkpoints_are_not_published(damage, work, tmp_path):
    change, message = DAMAGES[damage]
    shutil.copytree(work / "embedder", tmp_path / "source")
    change(tmp_path / "source")
    output = tmp_path / "output"
    error = main(["publish", str(tmp_path / "source"), "me/model", "--dry_run", "--output_dir", str(output)])
    assert re.search(message, error), error
    assert not list(tmp_path.glob("output*"))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["model"], "OWNER/NAME"),
        (["me/my model"], "my model"),
        (["me/model", "--output_dir", "."], ". exists"),
        (["me/model", "--card", "absent.yaml"], "absent.yaml"),
        (["me/model", "--card", "card.yaml"], "'licence'; did you mean 'license'"),
        (["me/model", "--dry"], "'--dry'"),
        (["me/model", "--onnx", "int4"], "int4"),
    ],
)
def test_wrong_requests_are_refused(arguments, message, work, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("card.yaml").write_text("licence: mit")
    assert message in main(["publish", str(work / "mlm"), *arguments, "--dry_run"])


def test_dry_run_prints_what_would_be_sent(work, tmp_path, capsys):
    small_model(NeoBERTForSequenceClassification, vocab_size=200, num_labels=3).save_pretrained(tmp_path / "classifier")
    output, tokenizer = tmp_path / "output", str(work / "mlm")
    command = ["publish", str(tmp_path / "classifier"), "me/classifier", "--tokenizer", tokenizer, "--dry_run"]
    assert main([*command, "--output_dir", str(output)]) is None
    printed = capsys.readouterr().out
    assert files_of(output) == FILES
    for name in FILES:
        assert re.search(rf"^ *{(output / name).stat().st_size:,}  {re.escape(name)}$", printed, re.MULTILINE), name
    card = ModelCard.load(output / "README.md")
    assert card.data.pipeline_tag == "text-classification" and "| Labels | LABEL_0, LABEL_1, LABEL_2 |" in card.text


def test_example_builds_the_same_folder(work, tmp_path):
    flags = [str(work / "mlm"), "me/mlm", "--card", str(work / "card.yaml"), "--dry_run", "true"]
    load_example("push_to_hub").main([*flags, "--output_dir", str(tmp_path / "example")])
    build(work, "mlm", tmp_path / "folder", card=str(work / "card.yaml"))
    assert files_of(tmp_path / "example") == FILES
    for name in FILES:
        assert (tmp_path / "example" / name).read_bytes() == (tmp_path / "folder" / name).read_bytes(), name


def test_original_checkpoint_becomes_a_repository(shared, tmp_path):
    """Its class names and its `auto_map`, which names code that is not there, give way to this package's."""
    small_tokenizer(500).save_pretrained(tmp_path / "tokenizer")
    build(shared / "reference", "published", tmp_path / "folder", tokenizer=str(tmp_path / "tokenizer"))
    source, folder = shared / "reference" / "published", tmp_path / "folder"
    config = json.loads((folder / "config.json").read_text())
    assert config["auto_map"] == AUTO_MAP and config["architectures"] == ["NeoBERTForMaskedLM"]
    before, after = (load_file(path / "model.safetensors") for path in (source, folder))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
