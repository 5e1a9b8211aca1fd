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
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import AutoConfig, AutoTokenizer

import neobert_hf
from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM, NeoBERTForSequenceClassification
from neobert_hf.cli import main
from neobert_hf.embeddings.inference import embedding_fingerprint, load_embedding_model
from neobert_hf.hub.card import gather_facts
from neobert_hf.hub.doctor import SERVED_FILES
from neobert_hf.hub.golden_outputs import GOLDEN_FILE
from neobert_hf.hub.publish import STALE, PublishSettings, build_folder, check_folder
from tests.helpers.examples import load_example
from tests.helpers.hub_clients import TEXTS, outputs
from tests.helpers.hub_server import TOKEN, HubServer
from tests.helpers.models import ROOT, small_config, small_model
from tests.helpers.small_tokenizer import small_tokenizer


AUTO_MAP = NeoBERTConfig.auto_classes
# Exports and pushes of whole folders take a minute each where the machine is busy.
pytestmark = pytest.mark.slow


CARD = """
license: mit
language: [en]
datasets: [tiiuae/falcon-refinedweb]
training_data: The first thousand documents.
hyperparameters: {learning_rate: 0.0006}
eval_results:
- {task_type: fill-mask, dataset_type: refinedweb, dataset_name: RefinedWeb, metric_type: perplexity, metric_value: 9.5}
limits: "- Letters only."
citation: "@misc{mine}"
"""
FILES = {
    "README.md",
    "config.json",
    GOLDEN_FILE,
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    *SERVED_FILES,
}
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
    # No pickle is published.
    (folder / "embedder" / "1_Pooling" / "pytorch_model.bin").touch()
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
        command += ["--card", str(work / "card.yaml")]
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
    assert {"modeling_neobert.py", "configuration_neobert.py", "cpu_neobert.py"} == SERVED_FILES.keys()
    for name, file in SERVED_FILES.items():
        assert repository.main[name] == file.read_bytes()


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
    assert not [one for one in between(hub, results, "branch") if one.startswith("PUT")]


def test_wrong_token_stops_before_work(published):
    hub, results, *_ = published
    assert "neobert-hf publish:" in results["wrong token"][0] and "nvalid" in results["wrong token"][0]
    assert between(hub, results, "wrong token") == ["GET /api/whoami-v2"] and "me/other" not in hub.repositories


def test_refused_upload_and_broken_connection_are_errors(published):
    hub, results, *_ = published
    assert re.search(
        "model.safetensors.*The storage is full.*Run the same command again", results["refused"][0], re.DOTALL
    )
    assert set(hub.repositories["me/refused"].main) == {".gitattributes"}
    assert "disconnected" in results["dropped"][0] and "Run the same command again" in results["dropped"][0]


def test_folder_of_a_refused_push_stays_and_is_taken_as_it_is(published, work, capsys):
    (work / "kept" / "notes.md").touch()
    command = ["publish", str(work / "mlm"), "me/refused", "--dry_run", "--output_dir", str(work / "kept")]
    assert main(command) is None
    printed = capsys.readouterr().out
    assert f"kept exists: it is used as it is, not built from {work / 'mlm'}" in printed and "notes.md" in printed
    # It is checked again: the doctor's part, and the card, which may have been edited.
    edit(work / "kept" / "README.md", "library_name:", "license: other\nlibrary_name:")
    assert "needs `license_name`" in main(command)
    with_nan(work / "kept", "model.layer_norm.weight")
    assert "the check of tensors failed" in main(command)
    assert "its card is not that of me/other" in main([*command[:2], "me/other", *command[3:]])


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
    types = [module["type"] for module in json.loads(repository.main["modules.json"])]
    assert types and all(name.startswith("sentence_transformers.") for name in types)


def test_files_of_an_earlier_model_go(published):
    """A masked LM in the place of an embedding model: with `modules.json` left it would load as one."""
    hub, results, *_ = published
    repository = hub.repositories["me/embedder"]
    assert results["other model"][0] is None
    assert set(repository.commits[repository.refs["mlm"]]) == FILES | {".gitattributes"}


def test_doctor_of_the_hub_repository(published):
    assert published[1]["doctor"][0] == 0


def expected(work: Path) -> dict[str, torch.Tensor]:
    model, tokenizer = NeoBERTForMaskedLM.from_pretrained(work / "mlm"), AutoTokenizer.from_pretrained(work / "mlm")
    embedder = SentenceTransformer(str(work / "embedder"))
    values = {"logits": outputs(model, tokenizer), "states": outputs(model.model, tokenizer)}
    return values | {"branch": values["logits"], "embeddings": embedder.encode(TEXTS, convert_to_tensor=True)}


def check_loaded(results: dict, work: Path) -> None:
    for name, tensor in expected(work).items():
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
        assert set(SERVED_FILES) <= files_of(work / name)
    # What was saved there is read here.
    for folder in (work / "again", work / "again_and_again"):
        model = NeoBERTForMaskedLM.from_pretrained(folder)
        assert torch.equal(outputs(model, AutoTokenizer.from_pretrained(work / "mlm")), results["logits"])


# The folder


def build(work: Path, source: str, folder: Path, **options) -> ModelCard:
    folder.mkdir()
    build_folder(PublishSettings(str(work / source), f"me/{source}", **options), folder)
    check_folder(folder)
    return ModelCard.load(folder / "README.md")


def test_card_tells_what_is_known(work, tmp_path):
    card = build(work, "mlm", tmp_path / "folder", card=str(work / "card.yaml"))
    data = card.data
    assert (data.license, data.language, data.pipeline_tag, data.library_name) == (
        "mit",
        ["en"],
        "fill-mask",
        "transformers",
    )
    (result,) = data.eval_results
    assert (result.dataset_name, result.metric_type, result.metric_value) == ("RefinedWeb", "perplexity", 9.5)
    assert data.to_dict()["model-index"][0]["name"] == "mlm"
    parameters = sum(one.numel() for one in NeoBERTForMaskedLM.from_pretrained(work / "mlm").parameters())
    for text in (
        f"| Parameters | {parameters:,}, stored in float32 |",
        "| Encoder | 2 layers x 64, 2 heads, SwiGLU of width 64, RMSNorm before each sub-layer |",
        "| Positions | RoPE, base 10,000 |",
        "Data: tiiuae/falcon-refinedweb.",
        "The first thousand documents.",
        "| `learning_rate` | 0.0006 |",
        "| RefinedWeb | perplexity | 9.5 |",
        "- Letters only.",
        "@misc{mine}",
        'AutoModelForMaskedLM.from_pretrained("me/mlm")',
        "lebreton2025neobert",
    ):
        assert text in card.text, text
    assert "{{" not in card.text and "{%" not in card.text and not re.search(r"\n{4}", card.text)


def test_the_card_of_an_embedding_model_says_where_texts_are_cut(work, tmp_path):
    shutil.copytree(work / "embedder", tmp_path / "embedder")
    model = SentenceTransformer(str(tmp_path / "embedder"), device="cpu")
    model.max_seq_length = 16
    model.save(str(tmp_path / "short"))
    text = build(tmp_path, "short", tmp_path / "folder").text
    assert "sequences of up to 16 tokens" in text and "Texts longer than 16 tokens are truncated" in text
    assert "it runs, with a warning" not in text and "64 tokens" not in text
    published = SentenceTransformer(str(tmp_path / "folder"), device="cpu")
    assert published.max_seq_length == 16
    text = build(work, "mlm", tmp_path / "mlm").text
    assert "up to 64 tokens" in text and "Beyond 64 tokens it runs, with a warning" in text


def test_card_leaves_out_what_is_not_known(work, tmp_path):
    card = build(work, "mlm", tmp_path / "folder")
    assert card.data.license is None and card.data.eval_results is None and card.data.language is None
    assert not re.search(r"## (Training|Evaluation)|None|More Information", card.text)


def test_golden_values_of_the_card_hold(work, tmp_path, capsys, monkeypatch):
    """Whoever copies the lines out of the card sees what it says. Here its `me/mlm` is a local folder."""
    (tmp_path / "me").mkdir()
    card = build(work, "mlm", tmp_path / "me" / "mlm")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", card.text, re.DOTALL) if "ids = " in block)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exec(code, {})
    values = torch.tensor([float(value) for value in re.search(r":4\]\)  # (.*)", card.text)[1].split(",")])
    found = torch.tensor(json.loads(re.search(r"tensor\((\[.*?\])", capsys.readouterr().out)[1]))
    assert (found - values).abs().max() < 1e-4  # four decimals


def result_of(name: str, value: float) -> EvalResult:
    return EvalResult(task_type="sts", dataset_type=name, dataset_name=name, metric_type="spearman", metric_value=value)


def test_settings_of_the_run_and_of_an_earlier_card(work, tmp_path):
    """The embedder's own card, and the checkpoints beside it; paths of this machine are nobody's business."""
    run = tmp_path / "run"
    shutil.copytree(work / "embedder", run / "model")
    (run / "checkpoint-9").mkdir()
    settings = {"learning_rate": 0.001, "model": "/home/me/encoder", "hidden_size": 64, "bf16": False}
    settings["datasets"] = {"wordnet": {"rows": 60000}}
    # That the optimizer was deleted matters to training only.
    complete = {"files": {"optimizer.pt": 7}, "engine": "plain", "settings": settings, "cursor": {}}
    (run / "checkpoint-9" / "complete.json").write_text(json.dumps(complete))
    earlier = ModelCard.load(run / "model" / "README.md")
    earlier.data.license = "apache-2.0"
    earlier.data.eval_results, earlier.data.model_name = [result_of("sts", 0.7)], "earlier"
    earlier.save(run / "model" / "README.md")
    facts = gather_facts(run / "model")
    assert facts.hyperparameters == {"learning_rate": 0.001, "bf16": False}
    assert facts.license == "apache-2.0" and facts.training_data == "Mixture of wordnet (60,000 rows)."
    assert [one.metric_value for one in facts.eval_results] == [0.7]
    (tmp_path / "card.yaml").write_text("license: mit")
    ours = gather_facts(run / "model", str(tmp_path / "card.yaml"))
    assert ours.license == "mit" and ours.eval_results == facts.eval_results
    card = build(run, "model", tmp_path / "folder")
    assert card.data.library_name == "sentence-transformers" and card.data.pipeline_tag == "sentence-similarity"
    assert 'SentenceTransformer("me/model")' in card.text and "/home/me" not in card.content


def test_prompts_are_published_and_told(work, tmp_path):
    """The model that others load asks as the one that was trained, and its card says with what."""
    prompts = {"names": "Find | {{ it }}. ", "query": "Find it. ", "document": ""}
    model = SentenceTransformer(str(work / "embedder"), device="cpu")
    model.prompts = prompts
    model.save(str(tmp_path / "prompted"))
    card = build(tmp_path, "prompted", tmp_path / "folder")
    assert '- `query`: `"Find it. "`' in card.text and '- `names`: `"Find | {{ it }}. "`' in card.text
    assert "`document`:" not in card.text and not re.search(r"\n{4}", card.text)
    published = SentenceTransformer(str(tmp_path / "folder"), device="cpu")
    assert published.prompts == prompts and published.default_prompt_name is None
    assert (published.encode_query(TEXTS) == model.encode(TEXTS, prompt="Find it. ")).all()
    (code,) = re.findall(r"```python\n(queries = .*?)```", card.text, re.DOTALL)
    exec(code, {"model": published})
    assert "### Prompts" not in build(work, "embedder", tmp_path / "without").text
    config = tmp_path / "prompted" / "config_sentence_transformers.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"prompts": {"query": 3}}))
    with pytest.raises(ValueError, match="`prompts` in .* must hold a text for each name"):
        build(tmp_path, "prompted", tmp_path / "broken")


@pytest.mark.parametrize(
    "text, message",
    [
        ("licence: mit", "'licence'; did you mean 'license'"),
        ("- mit", "holds a list"),
        ("license: [mit]", "license"),
        ("eval_results: [{task: fill-mask}]", "eval_results"),
        ("license: {", "not valid YAML"),
        ("license: other", "needs `license_name` and `license_link`"),
        ("base_model: [runs/small/model]", "runs/small/model"),
        (
            "eval_results: [{task_type: sts, dataset_type: sts, dataset_name: STS, metric_type: r, metric_value: }]",
            "of STS",
        ),
    ],
)
def test_wrong_card_files_are_refused(text, message, work, tmp_path):
    (tmp_path / "card.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        gather_facts(work / "mlm", str(tmp_path / "card.yaml"))


@pytest.mark.parametrize(
    "name", [reference.split(".")[1] for key, reference in AUTO_MAP.items() if key != "AutoConfig"]
)
def test_every_class_saves_the_whole_auto_map_and_its_code(name, tmp_path):
    small_model(getattr(neobert_hf, name)).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == AUTO_MAP
    assert files_of(tmp_path) == {"config.json", "model.safetensors", *SERVED_FILES}


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
    assert files_of(tmp_path) == {"config.json", "configuration_neobert.py"}


def test_weights_keep_their_dtype(work, tmp_path):
    """Also where the config says another, to which loading would round them."""
    shutil.copytree(work / "mlm", tmp_path / "mlm")
    config = json.loads((tmp_path / "mlm" / "config.json").read_text()) | {"dtype": "bfloat16"}
    (tmp_path / "mlm" / "config.json").write_text(json.dumps(config))
    build(tmp_path, "mlm", tmp_path / "folder")
    before, after = (load_file(folder / "model.safetensors") for folder in (work / "mlm", tmp_path / "folder"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((tmp_path / "folder" / "config.json").read_text())["dtype"] == "float32"


def test_publishing_a_published_folder_changes_nothing(work, tmp_path):
    card = str(work / "card.yaml")
    build(work, "embedder", tmp_path / "embedder", card=card)
    # What its card says, or no more than a part of it, need not be said again.
    (tmp_path / "part.yaml").write_text("license: mit")
    build(tmp_path, "embedder", tmp_path / "again", card=str(tmp_path / "part.yaml"))
    assert files_of(tmp_path / "embedder") == files_of(tmp_path / "again") == FILES | SENTENCE_FILES
    for name in FILES | SENTENCE_FILES:
        assert (tmp_path / "embedder" / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def edited(work: Path, folder: Path, change) -> Path:
    shutil.copytree(work / "embedder", folder)
    change(folder)
    return folder


def with_nan(folder: Path, name: str = "layer_norm.weight") -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name][0] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def with_foreign_module(folder: Path) -> None:
    edit(folder / "modules.json", "sentence_transformers.", "my.")


def with_another_tokenizer(folder: Path) -> None:
    small_tokenizer(250).save_pretrained(folder)


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("token*"):
        file.unlink()


DAMAGES = {
    "NaN": (with_nan, "not finite: layer_norm.weight"),
    "module": (with_foreign_module, "lists the module my.*trust_remote_code"),
    "no tokenizer": (without_tokenizer, "has no tokenizer.*--tokenizer"),
    "tokenizer cut": (lambda folder: os.truncate(folder / "tokenizer.json", 99), "The tokenizer of .*source cannot be"),
    "tokenizer": (with_another_tokenizer, "Nothing is sent: the check of tokenizer failed"),
    "config": (lambda folder: (folder / "config.json").write_text('{"model_type": "bert"}'), "of type 'bert'"),
    "class": (
        lambda folder: edit(folder / "config.json", '"NeoBERTModel"', '"BertModel"'),
        "`architectures` is .'BertModel'",
    ),
    "modules of no known class": (
        lambda folder: edit(folder / "config_sentence_transformers.json", '"SentenceTransformer"', '"Other"'),
        "`model_type` 'Other'",
    ),
    "card": (lambda folder: (folder / "README.md").write_text("---\nlicense: {\n---\n"), "README.md cannot be read"),
    "weights": (lambda folder: (folder / "model.safetensors").write_bytes(b"12"), "is damaged"),
    "code": (
        lambda folder: edit(
            folder / "tokenizer_config.json", "{", '{"auto_map": {"AutoTokenizer": ["x/y--own.Own", null]},'
        ),
        "Nothing is sent: the check of code failed",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_unhealthy_checkpoints_are_not_published(damage, work, tmp_path):
    change, message = DAMAGES[damage]
    source = edited(work, tmp_path / "source", change)
    output = tmp_path / "output"
    error = main(["publish", str(source), "me/model", "--dry_run", "--output_dir", str(output)])
    assert re.search(message, error), error
    assert not list(tmp_path.glob("output*"))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["model"], "must be OWNER/NAME"),
        (["me/my model"], "Repo id must use"),
        (["me/model", "--pr", "--revision", "v2"], "leave out"),
        (["me/model", "--output_dir", "."], ". exists, but its card is not that of me/model"),
        (["me/model", "--card", "absent.yaml"], "absent.yaml"),
        (["me/model", "--dry"], "Unknown argument '--dry'"),
        (["me/model", "--precisions", "int8"], "add `--onnx`"),
        (["me/model", "--onnx", "--precisions", "int4"], "There is no precision int4"),
    ],
)
def test_wrong_requests_are_refused(arguments, message, work):
    assert message in main(["publish", str(work / "mlm"), *arguments, "--dry_run"])


def test_missing_packages_are_named_before_work(work, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.delitem(sys.modules, "neobert_hf.hub.export", raising=False)
    monkeypatch.chdir(tmp_path)
    expected = "neobert-hf {}: onnxruntime is not installed: pip install 'neobert_hf[export]'"
    assert main(["export", str(work / "mlm"), "exported"]) == expected.format("export")
    assert main(["publish", "nowhere", "me/x", "--dry_run", "--onnx"]) == expected.format("publish")
    assert not files_of(tmp_path)


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


def test_mteb_results_are_in_the_model_index(work, tmp_path):
    loaded = load_embedding_model(str(work / "mlm"), torch.float32)
    own = {"model": embedding_fingerprint(loaded), "dtype": "float32", "max_length": loaded.max_seq_length}
    result = {"task": "STS12", "type": "STS", "metric": "cosine_spearman", "score": 0.71}
    result |= {"settings": own, "result": {"dataset_revision": "abc"}}
    shutil.copytree(work / "mlm", tmp_path / "mlm")
    earlier = [result_of("STS12", 0.5), result_of("STS13", 0.6)]
    earlier[0].metric_type = "cosine_spearman"
    data = ModelCardData(eval_results=earlier, model_name="mlm")
    (tmp_path / "mlm" / "README.md").write_text(f"---\n{data}\n---\n")
    (tmp_path / "STS12.json").write_text(json.dumps(result))
    found = gather_facts(tmp_path / "mlm", None, str(tmp_path)).eval_results
    assert [(one.dataset_name, one.metric_value) for one in found] == [("STS13", 0.6), ("MTEB STS12", 0.71)]
    facts = gather_facts(work / "mlm", str(work / "card.yaml"), str(tmp_path))
    assert [(one.dataset_name, one.metric_value) for one in facts.eval_results] == [
        ("RefinedWeb", 9.5), ("MTEB STS12", 0.71)
    ]  # fmt: skip
    # Of texts that were cut to less than the model reads, the card says so.
    (tmp_path / "STS12.json").write_text(json.dumps(result | {"settings": own | {"max_length": 16}}))
    (found,) = gather_facts(work / "mlm", None, str(tmp_path)).eval_results
    assert found.dataset_name == "MTEB STS12, texts cut at 16 tokens"
    with pytest.raises(ValueError, match="holds no results"):
        gather_facts(work / "mlm", None, str(work))
    with pytest.raises(ValueError, match="config.json is not a result"):
        gather_facts(work / "mlm", None, str(work / "mlm"))
    for name, value, message in (
        ("model", "other", "STS12.json is not a result of .*mlm in its present state"),
        ("truncate_dim", 8, "STS12.json was measured with `truncate_dim` 8"),
    ):
        (tmp_path / "STS12.json").write_text(json.dumps(result | {"settings": result["settings"] | {name: value}}))
        with pytest.raises(ValueError, match=message):
            gather_facts(work / "mlm", None, str(tmp_path))


def test_example_builds_the_same_folder(work, tmp_path, capsys):
    flags = [str(work / "mlm"), "me/mlm", "--card", str(work / "card.yaml"), "--dry_run", "true"]
    for _ in range(2):
        load_example("push_to_hub").main([*flags, "--output_dir", str(tmp_path / "example")])
    printed = capsys.readouterr().out
    assert "example exists: it is used as it is" in printed and printed.count("Not sent.") == 2
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
