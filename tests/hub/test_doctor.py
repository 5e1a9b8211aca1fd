"""`neobert-hf doctor`: a healthy checkpoint is said to be so, and every kind of damage is found and named."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer
from transformers import AutoTokenizer

import neobert_hf
from neobert_hf import NeoBERTForMaskedLM, NeoBERTForSequenceClassification, NeoBERTModel
from neobert_hf.cli import main
from neobert_hf.common.files import write_json
from neobert_hf.hub.doctor import CHECKS, SERVED_FILES, diagnose
from neobert_hf.hub.golden_outputs import GOLDEN_FILE, compare_outputs, read_outputs, record_outputs
from tests.helpers.models import small_model
from tests.helpers.small_tokenizer import small_tokenizer


CLASSES = [getattr(neobert_hf, name) for name in neobert_hf.__all__ if name.startswith(("NeoBERTFor", "NeoBERTModel"))]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """A masked LM with everything that is checked but Sentence Transformers' files."""
    folder = tmp_path_factory.mktemp("healthy")
    model, tokenizer = small_model(NeoBERTForMaskedLM, vocab_size=200), small_tokenizer(200)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_json(folder / GOLDEN_FILE, record_outputs(model, tokenizer))
    for file in SERVED_FILES.values():
        shutil.copy(file, folder)
    edit_json(
        "config.json",
        auto_map={
            "AutoConfig": "configuration_neobert.NeoBERTConfig",
            "AutoModelForMaskedLM": "modeling_neobert.NeoBERTForMaskedLM",
        },
    )(folder)
    return folder


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    folder, encoder = tmp_path_factory.mktemp("embedder"), tmp_path_factory.mktemp("encoder")
    small_model(vocab_size=200).save_pretrained(encoder)
    small_tokenizer(200).save_pretrained(encoder)
    modules = [Transformer(str(encoder)), Pooling(64, pooling_mode=("mean", "cls")), Dense(128, 32)]
    SentenceTransformer(modules=modules).save_pretrained(str(folder))
    return folder


def edit_json(name, **changes):
    def damage(folder):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | changes))

    return damage


def edit_tensors(change):
    def damage(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def statuses(folder):
    return {finding.check: finding.status for finding in diagnose(folder)}


def test_a_healthy_checkpoint(healthy, capsys):
    assert main(["doctor", str(healthy)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:-1]] == [
        ["skip" if name == "sentence_transformers" else "ok", name] for name in CHECKS
    ]
    assert "16 tensors of a NeoBERTForMaskedLM, 83,464 float32 values" in lines[1]
    assert "as recorded; they differ by at most 0e+00 of the largest value (1e-04 allowed)" in lines[-2]
    assert lines[-1] == "Healthy."


def test_a_healthy_embedding_model(embedder):
    assert statuses(embedder) == {name: "skip" if name == "outputs" else "ok" for name in CHECKS}
    (text,) = [finding.text for finding in diagnose(embedder) if finding.check == "sentence_transformers"]
    assert text == "Transformer > Pooling > Dense, 32 dimensions"


def test_a_healthy_embedding_model_of_older_files(embedder, tmp_path):
    """A key for each mode of pooling; and no bias, but a projection around the layer."""
    shutil.copytree(embedder, tmp_path / "folder")
    modes = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}
    write_json(tmp_path / "folder" / "1_Pooling" / "config.json", {"word_embedding_dimension": 64} | modes)
    edit_json("2_Dense/config.json", bias=False, use_residual=True)(tmp_path / "folder")
    change = lambda t: t.update({"residual.weight": t["linear.weight"] + t.pop("linear.bias")[:, None]})  # noqa: E731
    edit_tensors(change)(tmp_path / "folder" / "2_Dense")
    assert statuses(tmp_path / "folder") == statuses(embedder)
    assert SentenceTransformer(str(tmp_path / "folder"), device="cpu").encode("a").shape == (32,)


def swap_layers(tensors):
    for name in [name for name in tensors if ".transformer_encoder.0." in name]:
        other = name.replace("encoder.0.", "encoder.1.")
        tensors[name], tensors[other] = tensors[other], tensors[name]


def other_words(folder):
    """Another vocabulary with the same number of entries and the same special ids."""
    values = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = values["model"]["vocab"]
    names = list(vocabulary)
    values["model"]["vocab"] = dict(zip(names[:5] + names[:4:-1], vocabulary.values()))
    (folder / "tokenizer.json").write_text(json.dumps(values))


def larger_vocabulary(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["neobert"])
    tokenizer.save_pretrained(folder)


def append(name, text):
    def damage(folder):
        with open(folder / name, "a", encoding="utf-8") as file:
            file.write(text)

    return damage


def remove(name):
    return lambda folder: (folder / name).unlink()


def with_healthy_shards(folder):
    """Loading takes `model.safetensors`, which is damaged, and not the shards."""
    shutil.copy(folder / "model.safetensors", folder / "model-00001-of-00001.safetensors")
    names = dict.fromkeys(load_file(folder / "model.safetensors"), "model-00001-of-00001.safetensors")
    write_json(folder / "model.safetensors.index.json", {"weight_map": names})
    edit_tensors(lambda t: t[WO].fill_(torch.nan))(folder)


WO = "model.transformer_encoder.1.wo.weight"
# What is done to the folder: the check that fails, what it says. All others pass or could not be made.
DAMAGES = {
    "no config": (remove("config.json"), "config", "config.json does not exist"),
    "config cut": (lambda folder: os.truncate(folder / "config.json", 40), "config", "config.json is not valid JSON"),
    "other model": (edit_json("config.json", model_type="bert"), "config", "a model of type 'bert'"),
    "type of a value": (edit_json("config.json", hidden_size="64"), "config", "field 'hidden_size'"),
    "unknown key": (edit_json("config.json", dropuot=0.1), "config", "did you mean `dropout`"),
    "other class": (
        edit_json("config.json", architectures=["BertModel"]),
        "config",
        "`architectures` is ['BertModel']",
    ),
    "no weights": (remove("model.safetensors"), "tensors", "model.safetensors does not exist"),
    "shards beside it": (with_healthy_shards, "tensors", f"not finite: {WO}"),
    "truncated": (
        lambda folder: os.truncate(folder / "model.safetensors", 100_000),
        "tensors",
        "model.safetensors is damaged",
    ),
    "nan": (edit_tensors(lambda t: t[WO][0, 1].fill_(torch.nan)), "tensors", f"not finite: {WO}"),
    "missing": (edit_tensors(lambda t: t.pop(WO)), "tensors", f"missing: {WO}"),
    "extra": (edit_tensors(lambda t: t.update(extra=torch.ones(1))), "tensors", "unknown: extra"),
    "shape": (
        edit_tensors(lambda t: t.update({WO: torch.ones(64, 63)})),
        "tensors",
        f"{WO} (64, 63) instead of (64, 64)",
    ),
    "width": (
        edit_json("config.json", intermediate_size=192),
        "tensors",
        "ffn.w12.weight (128, 64) instead of (256, 64)",
    ),
    "dtype": (
        edit_tensors(lambda t: t.update({name: x.half() for name, x in t.items()})),
        "tensors",
        "dtype torch.float16, but config.json says torch.float32",
    ),
    "rotary table": (
        edit_tensors(lambda t: t.update({"model.freqs_cis": torch.zeros(64, 16, 2)})),
        "tensors",
        "model.freqs_cis differs by 1.0e+00",
    ),
    "more words": (larger_vocabulary, "tokenizer", "ids up to 200, but the embeddings have 200 rows"),
    "padding": (edit_json("config.json", pad_token_id=3), "tokenizer", "pads with 0, but config.json says 3"),
    "special id": (
        edit_json("config.json", mask_token_id=3),
        "tokenizer",
        "`mask_token_id` is 4 in the tokenizer and 3",
    ),
    "no mask": (edit_json("tokenizer_config.json", mask_token=None), "tokenizer", "the tokenizer has no mask_token"),
    "no tokenizer": (lambda folder: os.truncate(folder / "tokenizer.json", 99), "tokenizer", ""),
    "edited code": (
        append("modeling_neobert.py", "\n"),
        "code",
        "modeling_neobert.py differs from the file of the installed",
    ),
    "code missing": (remove("cpu_neobert.py"), "code", "cpu_neobert.py is missing"),
    "foreign code": (append("model.py", "pass\n"), "code", "model.py: not part of this package"),
    "stale auto_map": (
        edit_json("config.json", auto_map={"AutoModel": "model.NeoBERT"}),
        "code",
        "`auto_map` of config.json names model.NeoBERT, which is not part of this package",
    ),
    "unknown class": (
        edit_json("config.json", auto_map={"AutoModel": "modeling_neobert.NeoBERT"}),
        "code",
        "`auto_map` of config.json names modeling_neobert.NeoBERT",
    ),
    "other repository": (
        edit_json("config.json", auto_map={"AutoModel": "x/y--modeling_neobert.NeoBERTModel"}),
        "code",
        "`auto_map` of config.json names x/y--modeling_neobert.NeoBERTModel",
    ),
    "tokenizer of another repository": (
        edit_json("tokenizer_config.json", auto_map={"AutoTokenizer": ["x/y--own.Own", None]}),
        "code",
        "`auto_map` of tokenizer_config.json names x/y--own.Own",
    ),
    "tokenizer's older auto_map": (
        edit_json("tokenizer_config.json", auto_map=[None, "x/y--own.Own"]),
        "code",
        "`auto_map` of tokenizer_config.json names x/y--own.Own",
    ),
    "pipeline of another repository": (
        edit_json("config.json", custom_pipelines={"own": {"impl": "x/y--own.Own", "pt": ["AutoModel"]}}),
        "code",
        "`custom_pipelines` of config.json names x/y--own.Own",
    ),
    # Only the outputs can tell these.
    "part of a tensor": (edit_tensors(lambda t: t[WO][:8].zero_()), "outputs", "last_hidden_state: first is"),
    "decoder": (edit_tensors(lambda t: t["decoder.weight"][100:110].zero_()), "outputs", "logits: "),
    "swapped layers": (edit_tensors(swap_layers), "outputs", "last_hidden_state: first is"),
    "rope_theta": (
        edit_json("config.json", rope_parameters={"rope_type": "default", "rope_theta": 20_000.0}),
        "outputs",
        "last_hidden_state: first is",
    ),
    "epsilon": (edit_json("config.json", norm_eps=1e-2), "outputs", "last_hidden_state: first is"),
    "stale": (
        edit_tensors(lambda t: t[WO].mul_(1.01)),
        "outputs",
        "weights or config are not those of the recorded model",
    ),
    "other words": (other_words, "outputs", "the tokenizer gives wrong ids for the recorded text"),
    "golden cut": (
        lambda folder: os.truncate(folder / GOLDEN_FILE, 99),
        "outputs",
        "is not in the format of golden outputs",
    ),
    "lenient": (edit_json(GOLDEN_FILE, tolerance=100.0), "outputs", "or its tolerance is above 0.01"),
    "nothing recorded": (edit_json(GOLDEN_FILE, outputs={}), "outputs", "is not in the format of golden outputs"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_named(damage, healthy, tmp_path, capsys):
    change, check, message = DAMAGES[damage]
    shutil.copytree(healthy, tmp_path / "folder")
    change(tmp_path / "folder")
    assert main(["doctor", str(tmp_path / "folder")]) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert len(failed) == 1 and failed[0].split()[1] == check, failed
    assert message in failed[0]


def edit_dense(change):
    return lambda folder: edit_tensors(change)(folder / "2_Dense")


def remove_tokenizer(folder):
    for file in folder.glob("*token*"):
        file.unlink()


EMBEDDER_DAMAGES = {
    "no tokenizer": (remove_tokenizer, "no tokenizer: Sentence Transformers would make one"),
    "foreign module": (
        lambda folder: (folder / "modules.json").write_text('[{"type": "custom.Transformer", "path": ""}]'),
        "modules.json lists the module custom.Transformer",
    ),
    "no list": (lambda folder: (folder / "modules.json").write_text("{}x"), "modules.json is not valid JSON"),
    "no module": (lambda folder: (folder / "modules.json").write_text("[1]"), "modules.json must be a list of modules"),
    "other class": (edit_json("config_sentence_transformers.json", model_type="Other"), "`model_type` 'Other'"),
    "pooling": (
        edit_json("1_Pooling/config.json", embedding_dimension=768),
        "Pooling should output 1536 dimensions, but outputs [128]",
    ),
    "dense": (edit_json("1_Pooling/config.json", pooling_mode="mean"), "mat1 and mat2 shapes cannot be multiplied"),
    "missing": (remove("1_Pooling/config.json"), "embedding_dimension"),
    "no weights": (remove("2_Dense/model.safetensors"), "Could not find 'model.safetensors'"),
    "pickle": (
        lambda folder: (folder / "2_Dense/model.safetensors").rename(folder / "2_Dense/pytorch_model.bin"),
        "2_Dense/pytorch_model.bin is a pickle, which is never read",
    ),
    "shape": (edit_dense(lambda t: t.update({"linear.weight": torch.ones(5, 128)})), "size mismatch for linear.weight"),
    "no bias": (edit_dense(lambda t: t.pop("linear.bias")), 'Missing key(s) in state_dict: "linear.bias"'),
    "nan": (edit_dense(lambda t: t["linear.bias"].fill_(torch.nan)), "values that are not finite: 2.linear.bias"),
    "infinite": (edit_dense(lambda t: t["linear.weight"][0].fill_(torch.inf)), "not finite: 2.linear.weight"),
}


@pytest.mark.parametrize("damage", EMBEDDER_DAMAGES)
def test_damaged_sentence_transformers_files(damage, embedder, tmp_path):
    change, message = EMBEDDER_DAMAGES[damage]
    shutil.copytree(embedder, tmp_path / "folder")
    change(tmp_path / "folder")
    failed = [finding for finding in diagnose(tmp_path / "folder") if finding.status == "FAIL"]
    assert [finding.check for finding in failed] == ["sentence_transformers"] and message in failed[0].text


def test_every_kind_of_sentence_transformers_model(tmp_path):
    small_model(NeoBERTForMaskedLM, vocab_size=200, num_hidden_layers=1).save_pretrained(tmp_path / "encoder")
    small_model(NeoBERTForSequenceClassification, vocab_size=200, num_labels=1).save_pretrained(tmp_path / "scorer")
    for name, kind, expected in (
        ("encoder", SparseEncoder, "Transformer > SpladePooling, 200 dimensions"),
        ("encoder", MultiVectorEncoder, "Transformer > Dense > MultiVectorMask > Normalize, 128 dimensions"),
        ("scorer", CrossEncoder, "Transformer, 1 dimensions"),
    ):
        small_tokenizer(200).save_pretrained(tmp_path / name)
        folder = tmp_path / kind.__name__
        kind(str(tmp_path / name), device="cpu").save_pretrained(str(folder))
        (finding,) = [finding for finding in diagnose(folder) if finding.check == "sentence_transformers"]
        assert (finding.status, finding.text) == ("ok", expected)


def test_without_sentence_transformers_its_check_is_left_out(embedder, monkeypatch):
    monkeypatch.setattr("neobert_hf.hub.doctor.find_spec", lambda name: None)
    assert statuses(embedder)["sentence_transformers"] == "skip"


def test_no_code_of_the_folder_is_run(healthy, tmp_path):
    shutil.copytree(healthy, tmp_path / "folder")
    for name in (*SERVED_FILES, "tokenization_own.py"):
        append(name, f"\nopen({str(tmp_path / 'executed')!r}, 'w')\n")(tmp_path / "folder")
    auto_map = {"AutoConfig": "configuration_neobert.NeoBERTConfig", "AutoTokenizer": ["tokenization_own.Own", None]}
    edit_json("config.json", auto_map=auto_map)(tmp_path / "folder")
    edit_json("tokenizer_config.json", auto_map=auto_map, tokenizer_class="Own")(tmp_path / "folder")
    found = statuses(tmp_path / "folder")
    assert found["code"] == "FAIL" and found["config"] == found["tensors"] == "ok"
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_golden_outputs_of_every_class(cls, dtype, tmp_path):
    model = small_model(cls).to(dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    write_json(tmp_path / GOLDEN_FILE, record_outputs(model))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    model.save_pretrained(tmp_path)
    assert statuses(tmp_path)["outputs"] == "ok"
    golden = read_outputs(tmp_path / GOLDEN_FILE)
    assert compare_outputs(cls.from_pretrained(tmp_path, attn_implementation="eager"), golden) == 0.0
    assert compare_outputs(NeoBERTModel.from_pretrained(tmp_path), golden) == 0.0
    # Every tensor counts, even by 1%; the encoder's are the same in all classes.
    for name in before if cls is NeoBERTModel else [name for name in before if not name.startswith("model.")]:
        model.load_state_dict(before | {name: before[name] * 1.01 + 0.01})
        with pytest.raises(ValueError, match="was recorded. They differ by"):
            compare_outputs(model, golden)


def test_golden_outputs_of_another_class():
    golden = record_outputs(small_model())
    with pytest.raises(ValueError, match="the recorded model was a NeoBERTModel, this is a NeoBERTForMaskedLM"):
        compare_outputs(small_model(NeoBERTForMaskedLM), golden)
    with pytest.raises(ValueError, match=r"has the shape \[1, 64, 32\], but \[1, 64, 64\] was recorded"):
        compare_outputs(small_model(hidden_size=32), golden)


def test_the_recorded_original_layout(shared):
    """Healthy but for its code, which is not in the folder."""
    found = statuses(shared / "reference" / "published")
    assert found["config"] == found["tensors"] == "ok" and found["code"] == "FAIL"


def test_paths_that_are_none(tmp_path):
    (tmp_path / "file").touch()
    message = f"neobert-hf doctor: {tmp_path / 'file'} is a file; give the folder."
    assert main(["doctor", str(tmp_path / "file")]) == message
    assert main(["doctor", str(tmp_path / "nothing")]) == f"neobert-hf doctor: {tmp_path / 'nothing'} does not exist."
    assert main(["doctor", "/nowhere"]) == "neobert-hf doctor: /nowhere does not exist."
    assert "neobert-hf doctor: " in main(["doctor", "owner/nothing"])
