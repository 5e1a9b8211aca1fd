"""The config: published file, aliases, strictness."""

import json
import math

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForMaskedLM, GenerationConfig, PreTrainedConfig

from neobert_hf import NeoBERTConfig, NeoBERTModel
from tests.helpers.models import small_model


# ../shared/reference/README.md: the published config.json, in full.
PUBLISHED = {
    "architectures": ["NeoBERTLMHead"],
    "auto_map": {
        "AutoConfig": "model.NeoBERTConfig",
        "AutoModel": "model.NeoBERT",
        "AutoModelForMaskedLM": "model.NeoBERTLMHead",
        "AutoModelForSequenceClassification": "model.NeoBERTForSequenceClassification",
    },
    "classifier_init_range": 0.02,
    "decoder_init_range": 0.02,
    "dim_head": 64,
    "embedding_init_range": 0.02,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "kwargs": {
        "classifier_init_range": 0.02,
        "pretrained_model_name_or_path": "google-bert/bert-base-uncased",
        "trust_remote_code": True,
    },
    "max_length": 4096,
    "model_type": "neobert",
    "norm_eps": 1e-05,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "pad_token_id": 0,
    "pretrained_model_name_or_path": "google-bert/bert-base-uncased",
    "torch_dtype": "float32",
    "transformers_version": "4.48.2",
    "trust_remote_code": True,
    "vocab_size": 30522,
}


def test_published_config_is_the_default(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is NeoBERTConfig
    loaded, default = config.to_dict(), NeoBERTConfig().to_dict()
    differing = {key for key in loaded if loaded[key] != default.get(key)}
    assert differing == {"architectures", "auto_map", "dtype", "_name_or_path"}
    assert (config.max_position_embeddings, config.head_dim) == (4096, 64)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}


def test_aliases_are_read_and_written():
    config = NeoBERTConfig(max_position_embeddings=8192, hidden_size=512, num_attention_heads=8, head_dim=64)
    assert config.max_length == config.max_position_embeddings == 8192
    assert config.dim_head == config.head_dim == 64
    config.max_position_embeddings = 100
    assert config.max_length == 100
    assert "max_position_embeddings" not in config.to_dict() and config.to_dict()["max_length"] == 100


def test_saving_and_loading_keeps_everything(tmp_path):
    changes = dict(
        hidden_size=96,
        num_attention_heads=6,
        intermediate_size=100,
        num_hidden_layers=3,
        hidden_act="GELU",
        rope=True,
        rms_norm=False,
        norm_eps=1e-6,
        dropout=0.1,
        max_length=77,
        pad_token_id=3,
        classifier_pooling="mean",
        sparse_prediction=True,
        tie_word_embeddings=True,
        num_labels=7,
        problem_type="multi_label_classification",
        rope_parameters={"rope_type": "yarn", "factor": 2.0, "beta_fast": 16},
    )
    config = NeoBERTConfig(**changes)
    config.save_pretrained(tmp_path)
    again = NeoBERTConfig.from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict()
    assert again.hidden_act == "gelu" and again.num_labels == 7
    assert again.rope_parameters["original_max_position_embeddings"] == 77
    # Every field of the architecture is written: the original code's own defaults differ (1,024 tokens, eps 1e-6).
    written = json.loads((tmp_path / "config.json").read_text())
    assert {"max_length", "norm_eps", "dim_head", "vocab_size", "pad_token_id", "rope", "rms_norm"} <= set(written)


def test_overrides_at_loading_are_checked_and_completed(mlm_checkpoint):
    config = AutoConfig.from_pretrained(mlm_checkpoint, rope_parameters={"rope_type": "yarn", "factor": 4.0})
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert config.rope_parameters["original_max_position_embeddings"] == 64
    with pytest.raises(ValueError, match="dim_head"):
        NeoBERTConfig.from_pretrained(mlm_checkpoint, num_attention_heads=5)


def test_another_length_is_not_taken_for_that_of_training(mlm_checkpoint, tmp_path):
    # YaRN scales from the length of training, here 64; the new length alone would say 256.
    yarn = {"rope_type": "yarn", "factor": 4.0}
    longer = NeoBERTConfig.from_pretrained(mlm_checkpoint, max_length=256, rope_parameters=yarn)
    assert (longer.max_length, longer.rope_parameters["original_max_position_embeddings"]) == (256, 64)
    longer.save_pretrained(tmp_path)
    longest = NeoBERTConfig.from_pretrained(tmp_path, max_length=512, rope_parameters={**yarn, "factor": 8.0})
    assert longest.rope_parameters == {"rope_type": "yarn", "factor": 8.0, "rope_theta": 10000.0} | {
        "original_max_position_embeddings": 64
    }
    known = NeoBERTConfig.from_pretrained(
        mlm_checkpoint, max_length=256, rope_parameters=yarn | {"original_max_position_embeddings": 128}
    )
    assert known.rope_parameters["original_max_position_embeddings"] == 128
    linear = NeoBERTConfig.from_pretrained(tmp_path, rope_parameters={"rope_type": "linear", "factor": 2.0})
    assert linear.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}


def test_misspelt_options_are_refused_at_loading(mlm_checkpoint):
    for load in (NeoBERTModel.from_pretrained, NeoBERTConfig.from_pretrained, AutoConfig.from_pretrained):
        with pytest.raises(ValueError, match="no `dropuot` .did you mean `dropout`"):
            load(mlm_checkpoint, dropuot=0.1)
    with pytest.raises(TypeError, match="flash"):
        NeoBERTModel.from_pretrained(mlm_checkpoint, flash=True)
    # Arguments of others that pass through here: AutoTokenizer hands its own to AutoConfig.
    AutoConfig.from_pretrained(mlm_checkpoint, use_fast=True, model_max_length=10, padding_side="left", revision="main")
    assert NeoBERTModel.from_pretrained(mlm_checkpoint, dropout=0.1).config.dropout == 0.1


def test_theta_survives_other_overrides(tmp_path):
    NeoBERTConfig(rope_theta=50000.0).save_pretrained(tmp_path)
    yarn = {"rope_type": "yarn", "factor": 2.0}
    for kwargs in ({"rope_parameters": yarn}, {"rope_scaling": yarn}):
        loaded = NeoBERTConfig.from_pretrained(tmp_path, **kwargs).rope_parameters
        assert (loaded["rope_theta"], loaded["rope_type"]) == (50000.0, "yarn")
    loaded = NeoBERTConfig.from_pretrained(tmp_path, rope_theta=7.0, rope_parameters=yarn).rope_parameters
    assert (loaded["rope_theta"], loaded["factor"]) == (7.0, 2.0)
    assert NeoBERTConfig.from_pretrained(tmp_path, rope_theta=7.0).rope_parameters["rope_theta"] == 7.0
    assert yarn == {"rope_type": "yarn", "factor": 2.0}


def test_rope_parameters_set_later_are_completed():
    config = NeoBERTConfig(num_hidden_layers=1)
    config.rope_parameters = {"rope_type": "yarn", "factor": 2.0}
    states = NeoBERTModel(config)(torch.tensor([[5, 6]])).last_hidden_state
    expected = NeoBERTConfig(num_hidden_layers=1, rope_parameters={"rope_type": "yarn", "factor": 2.0})
    assert states.isfinite().all() and config.rope_parameters == expected.rope_parameters


def test_callers_dictionary_is_left_alone():
    parameters = {"rope_type": "linear", "factor": 2.0}
    NeoBERTConfig(rope_parameters=parameters)
    assert parameters == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"dropuot": 0.1}, "no `dropuot` .did you mean `dropout`"),
        ({"num_hidden_layer": 3}, "no `num_hidden_layer` .did you mean `num_hidden_layers`"),
        ({"max_lenght": 512}, "no `max_lenght` .did you mean `max_length`"),
        ({"max_position_embedding": 512}, "no `max_position_embedding` .did you mean `max_position_embeddings`"),
        ({"rms_nrom": False}, "no `rms_nrom` .did you mean `rms_norm`"),
        ({"Hidden_Size": 64}, "no `Hidden_Size` .did you mean `hidden_size`"),
        ({"rope_tetha": 5e5}, "no `rope_tetha` .did you mean `rope_theta`"),
        ({"problem_typ": "regression"}, "no `problem_typ` .did you mean `problem_type`"),
        ({"per_layer_config": {0: {"dropout": 0.1}}}, "all layers of NeoBERT are alike"),
        ({"num_attention_heads": 5}, "`hidden_size` .768. must be `num_attention_heads` .5."),
        ({"num_attention_heads": 0}, "`num_attention_heads` is 0"),
        ({"dim_head": 32}, "`dim_head` .32."),
        ({"hidden_size": 36, "num_attention_heads": 12}, "RoPE rotates pairs"),
        ({"hidden_act": "relu"}, "`hidden_act` is 'relu'.*'swiglu', 'gelu'"),
        ({"dropout": 1.5}, r"`dropout` is 1.5, it must be in \[0, 1\)"),
        ({"pad_token_id": 40000}, "`pad_token_id` is 40000"),
        ({"classifier_pooling": "max"}, "classifier_pooling"),
        ({"hidden_size": "768"}, "hidden_size"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "'default', 'linear', 'dynamic', 'yarn', 'longrope'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "lacks .'factor'."),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 0.5}}, r"'factor'.. is 0.5, it must be a number in .1, "),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "betafast": 3}}, "does not have .'betafast'."),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": -1}},
            r"'rope_theta'.. is -1, it must be a number in .1, ",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            r"a list of .* = 32 numbers",
        ),
        ({"rope": False, "rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "no effect with `rope=False`"),
    ],
)
def test_bad_values_are_named(changes, message):
    with pytest.raises(Exception, match=message) as error:
        NeoBERTConfig(**changes)
    assert isinstance(error.value, ValueError) or "StrictDataclass" in type(error.value).__name__


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1])
@pytest.mark.parametrize(
    "name",
    ["norm_eps", "dropout", "classifier_dropout", "rope_theta"]
    + ["embedding_init_range", "decoder_init_range", "classifier_init_range"]
    + [f"yarn.{key}" for key in ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")]
    + ["linear.factor", "dynamic.factor", "longrope.factor", "longrope.attention_factor", "longrope.long_factor"],
)
def test_numbers_that_compute_nothing_are_refused(name, value):
    """NaN most of all, which passes every `x < 1`."""
    rope_type, _, key = name.rpartition(".")
    changes = {name: value}
    if rope_type:
        base = LONGROPE if rope_type == "longrope" else {"rope_type": rope_type, "factor": 2.0}
        base = base | ({"mscale": 1.0, "mscale_all_dim": 1.0} if key.startswith("mscale") else {})
        changes = {"rope_parameters": base | {key: [2.0] * 31 + [value] if key == "long_factor" else value}}
    with pytest.raises(ValueError, match=f"`{key}`|'{key}'"):
        NeoBERTConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_eps": 0}, "`norm_eps` is 0"),
        ({"intermediate_size": 1}, "`intermediate_size` is 1, it must be 2 or more"),
        ({"num_labels": 0}, "`num_labels` is 0"),
        ({"num_labels": 10**9}, "`num_labels` is 1000000000"),
        ({"num_labels": 3, "id2label": {0: "a", 1: "b"}}, "`num_labels` is 3, but `id2label` has 2"),
        (
            {"id2label": {0: "a", 1: "b"}, "label2id": {"a": 1, "b": 0}},
            "`id2label` .* and `label2id` .* must agree",
        ),
        ({"id2label": {1: "a", 2: "b"}}, "`id2label`.* is .* give the ids 0, 1, 2"),
        ({"id2label": {0: "a", 1: "a"}}, "`id2label`.* is .* give the ids 0, 1, 2"),
        ({"id2label": {}}, "`id2label`.* is {}, it must give"),
        ({"label2id": {}}, "`label2id`.* is {}, it must give"),
        ({"problem_type": "classification"}, "`problem_type` is 'classification'"),
        ({"is_decoder": True}, "`is_decoder` is True"),
        ({"is_encoder_decoder": True}, "`is_encoder_decoder` is True"),
        ({"add_cross_attention": True}, "`add_cross_attention` is True"),
        ({"pruned_heads": {"0": [1]}}, "`pruned_heads` is"),
        ({"model_type": "bert"}, "`model_type` is 'bert'"),
        ({"dtype": "int8"}, "`dtype` is 'int8'"),
        ({"dtype": torch.int8}, "`dtype` is 'int8'"),
        ({"torch_dtype": "float33"}, "`dtype` is 'float33'"),
        ({"num_hidden_layers": 10**9}, "`num_hidden_layers` is 1000000000"),
        ({"vocab_size": 10**10}, "about 15,360,198,772,224 parameters"),
        ({"hidden_size": 12 * 10**6}, "parameters .*`hidden_size` 12,000,000"),
        ({"max_length": 2**24 + 1}, "`max_length` is 16777217"),
        ({"rope_scaling": "yarn"}, "`rope_scaling` is 'yarn', it must be a mapping"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "`rope_type` is .'yarn'."),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 0.5}},
            "`beta_fast` .* below",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_slow": 40}},
            "`beta_fast` .* below",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}}, "one of `mscale`"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": 1}}, "'truncate'"),
        ({"rope_parameters": LONGROPE | {"long_factor": 2.0}}, "'long_factor'.* a list of"),
        ({"rope_parameters": LONGROPE | {"original_max_position_embeddings": 1}}, "'original_max_position_embeddings'"),
        (
            {"hidden_size": 24, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "'dynamic' needs a `dim_head` of 4",
        ),
    ],
)
def test_what_nobody_can_mean_is_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        NeoBERTConfig(**changes)


def test_files_with_wrong_types_are_value_errors(tmp_path):
    """Which is what commands print; `strict` raises its own."""
    for changes in ({"hidden_size": "768"}, {"rope_parameters": 5}, {"hidden_act": 5}):
        (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | changes))
        with pytest.raises(ValueError, match=min(changes)):
            NeoBERTConfig.from_pretrained(tmp_path)


def test_names_of_labels_are_completed_and_replaced(tmp_path):
    names = {0: "a", 1: "b", 2: "c"}
    # The names that Transformers makes up for `label2id` contradict nobody.
    for given in ({"id2label": names}, {"label2id": {"a": 0, "b": 1, "c": 2}}):
        config = NeoBERTConfig(**given)
        assert (config.id2label, config.label2id, config.num_labels) == (names, {"a": 0, "b": 1, "c": 2}, 3)
    config = NeoBERTConfig()
    config.id2label = names
    config.save_pretrained(tmp_path)
    assert NeoBERTConfig.from_pretrained(tmp_path).label2id == {"a": 0, "b": 1, "c": 2}
    # Overrides at loading: as many labels keep their names, others do not.
    assert NeoBERTConfig.from_pretrained(tmp_path, num_labels=3).id2label == names
    assert NeoBERTConfig.from_pretrained(tmp_path, num_labels=2).label2id == {"LABEL_0": 0, "LABEL_1": 1}
    assert NeoBERTConfig.from_pretrained(tmp_path, id2label={0: "x", 1: "y"}).label2id == {"x": 0, "y": 1}
    config.label2id = {"z": 0}
    with pytest.raises(ValueError, match="must agree"):
        NeoBERTModel(config)


def test_values_set_later_are_checked_when_the_model_is_built():
    config = NeoBERTConfig()
    config.num_attention_heads = 7
    with pytest.raises(ValueError, match="num_attention_heads"):
        NeoBERTModel(config)


CONTRADICTIONS = [
    ({"max_position_embeddings": 512, "max_length": 4096}, "`max_position_embeddings` is 512 and `max_length` is 4096"),
    ({"head_dim": 32, "dim_head": 64}, "`head_dim` is 32 and `dim_head` is 64"),
    (
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "`rope_theta` is 500000.0 and `rope_parameters.'rope_theta'.` is 10000.0",
    ),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
        "`rope_scaling.'rope_type'.` is 'yarn' and `rope_parameters.'rope_type'.` is 'default'",
    ),
    ({"rope_scaling": {"type": "linear"}, "rope_parameters": {"rope_type": "default"}}, "type 'linear' and rope_type"),
]


@pytest.mark.parametrize("names, message", CONTRADICTIONS)
def test_names_that_contradict_are_refused(names, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        NeoBERTConfig(**names)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | names))
    with pytest.raises(ValueError, match=message):
        AutoConfig.from_pretrained(tmp_path)


def test_older_names_assigned_to_a_finished_config():
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = NeoBERTConfig(**sizes)
    config.rope_scaling = {"rope_type": "yarn", "factor": 2.0}
    assert NeoBERTModel(config).config.rope_parameters["factor"] == 2.0
    assert config.rope_parameters["rope_theta"] == 10000.0
    config.rope_theta = 5e5
    with pytest.raises(ValueError, match="`rope_theta` is 500000.0 and `rope_parameters.'rope_theta'.` is 10000.0"):
        NeoBERTModel(config)


def test_names_that_agree_are_one_setting(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 2.0}
    names = {"max_position_embeddings": 512, "max_length": 512, "head_dim": 64, "dim_head": None}
    rope = {"rope_theta": 5e5, "rope_scaling": yarn, "rope_parameters": {**yarn, "rope_theta": 5e5}}
    (tmp_path / "config.json").write_text(json.dumps(names | rope))
    for config in (NeoBERTConfig(**names, **rope), NeoBERTConfig.from_pretrained(tmp_path)):
        assert (config.max_length, config.dim_head) == (512, 64)
        assert config.rope_parameters == {**yarn, "rope_theta": 5e5, "original_max_position_embeddings": 512}
    # An override is no contradiction, under whichever name the file and the caller know the setting.
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    for name in ("max_length", "max_position_embeddings"):
        assert NeoBERTConfig.from_pretrained(tmp_path, **{name: 128}).max_length == 128


def test_default_rope_may_carry_the_trained_length():
    """Transformers' own tests leave it there when they go back from a scaled type; it changes nothing."""
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "original_max_position_embeddings": 16384}
    model, expected = small_model(rope_parameters=parameters), small_model()
    assert model.config.rope_parameters == parameters
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(model(ids).last_hidden_state, expected(ids).last_hidden_state)


@pytest.fixture
def warnings_of(caplog):
    """The warnings about a config, each of which is given once a process."""
    transformers.utils.logging.enable_propagation()

    def collect(build) -> list[str]:
        transformers.utils.logging.warning_once.cache_clear()
        caplog.clear()
        build()
        return [record.message for record in caplog.records if "The config holds" in record.message]

    return collect


NOTES = {"run": {"name": "a", "steps": 10}, "flash_attention": True, "hidden_dropout_prob": 0.1, "push_to_hub": False}


def test_notes_are_kept_named_and_saved(mlm_checkpoint, tmp_path, warnings_of):
    """A user's, a tool's, or a newer Transformers': none makes a checkpoint unloadable, none is lost."""
    stored = json.loads((mlm_checkpoint / "config.json").read_text())
    (mlm_checkpoint / "config.json").write_text(json.dumps(stored | NOTES))

    def load():
        for _ in range(2):
            AutoModelForMaskedLM.from_pretrained(mlm_checkpoint).save_pretrained(tmp_path / "again")

    warnings = warnings_of(load)
    assert len(warnings) == 1 and all(f"`{name}`" in warnings[0] for name in NOTES)
    for loaded in (AutoConfig.from_pretrained(tmp_path / "again"), NeoBERTConfig(**NOTES)):
        assert {name: getattr(loaded, name) for name in NOTES} == NOTES


def test_keys_of_transformers_and_its_companions_pass(tmp_path, warnings_of):
    extra = {
        "sentence_transformers": {"version": "6"},
        "transformers.js_config": {"use_external_data_format": True},
        "sep_token_id": 102,
        "use_cache": False,
        "attn_implementation": "eager",
        "name_or_path": "x",
        "num_labels": 3,
        "_own": 1,
    }
    assert not warnings_of(lambda: NeoBERTConfig(**extra).save_pretrained(tmp_path))
    loaded = []
    assert not warnings_of(lambda: loaded.append(AutoConfig.from_pretrained(tmp_path, dtype=torch.bfloat16)))
    assert (loaded[0].sep_token_id, loaded[0].num_labels, loaded[0].dtype) == (102, 3, torch.bfloat16)
    assert loaded[0].sentence_transformers == {"version": "6"} and "auto_map" in loaded[0].to_dict()


def test_no_name_of_transformers_is_taken_for_a_misspelt_one():
    names = {name.lstrip("_") for name in dir(PreTrainedConfig)} | set(GenerationConfig().to_dict())
    # Of Transformers 4, whose checkpoints are read by this class as well.
    names |= set(
        "add_cross_attention cls_token_id cross_attention_hidden_size finetuning_task is_decoder mask_token_id prefix "
        "pruned_heads sep_token_id task_specific_params tf_legacy_loss tie_encoder_decoder tokenizer_class torchscript "
        "unk_token_id use_bfloat16".split()
    )
    # Of BERT, which people convert from.
    names |= set("attention_probs_dropout_prob hidden_dropout_prob layer_norm_eps position_embedding_type".split())
    for name in names:
        NeoBERTConfig._refuse_misspelt_keys([name])
