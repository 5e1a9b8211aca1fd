"""`neobert-hf compile`: compiled code for single texts, used where it gives what the model gives, and nowhere else."""

import copy
import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from sentence_transformers import SentenceTransformer
from torch import nn
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForSequenceClassification

from neobert_hf import NeoBERTForSequenceClassification
from neobert_hf.checkpoints import compile as compile_module
from neobert_hf.checkpoints.compile import CompileSettings, compile_encoder, use_compiled
from neobert_hf.cli import main
from tests.checkpoints.test_export import edit_json
from tests.helpers.models import small_model
from tests.helpers.small_tokenizer import small_tokenizer


# The C++ compiler takes half a minute.
pytestmark = pytest.mark.slow
IDS = torch.randint(5, 200, (1, 21), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=["float32", "int8"])
def work(tmp_path_factory, request):
    """A classifier in `model`, and its compiled encoder in `compiled`."""
    folder = tmp_path_factory.mktemp(f"compile_{request.param}")
    small_model(NeoBERTForSequenceClassification, vocab_size=200, num_labels=3).save_pretrained(folder / "model")
    small_tokenizer(200).save_pretrained(folder / "model")
    arguments = ["compile", str(folder / "model"), str(folder / "compiled"), "--precision", request.param]
    assert main(arguments) is None
    return folder, request.param


@pytest.fixture
def runs(monkeypatch):
    """How many tokens each text had that compiled code read."""
    seen, load = [], torch._inductor.aoti_load_package

    def load_counting(path):
        run = load(path)
        return lambda ids: (seen.append(ids.shape[1]), run(ids))[1]

    monkeypatch.setattr(torch._inductor, "aoti_load_package", load_counting)
    return seen


def loaded(folder, runs, cls=AutoModel):
    model = use_compiled(cls.from_pretrained(folder / "model").eval(), folder / "compiled")
    runs.clear()
    return model


def assert_near(found, expected, precision):
    if precision == "float32":
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    else:
        assert F.cosine_similarity(found, expected, dim=-1).min() > 0.99 and not torch.equal(found, expected)


def test_single_texts_of_any_length_are_compiled(work, runs):
    folder, precision = work
    plain, model = AutoModel.from_pretrained(folder / "model").eval(), loaded(folder, runs)
    with torch.no_grad():
        for length in (2, 3, 21, 64):
            ids = IDS.repeat(1, 4)[:, :length]
            for mask in (None, torch.ones_like(ids)):
                assert_near(model(ids, mask).last_hidden_state, plain(ids, mask).last_hidden_state, precision)
    assert runs == [2, 2, 3, 3, 21, 21, 64, 64]


def test_long_rows_go_one_by_one_in_int8(work, runs, monkeypatch):
    monkeypatch.setattr(compile_module, "LONG_ROW", 20)
    folder, precision = work
    plain, model = AutoModel.from_pretrained(folder / "model").eval(), loaded(folder, runs)
    ids = torch.cat([IDS, IDS.flip(1), IDS.roll(3)])
    with torch.no_grad():
        assert_near(model(ids)[0], plain(ids)[0], precision) if precision == "int8" else model(ids)
        for others in ((ids[:, :19],), (ids, (torch.arange(21) < torch.tensor([[21], [20], [21]])).long())):
            assert torch.equal(model(*others)[0], plain(*others)[0])
    assert runs == ([21] * 3 if precision == "int8" else [])


def test_everything_else_is_as_it_was(work, runs):
    folder, _ = work
    plain, model = AutoModel.from_pretrained(folder / "model").eval(), loaded(folder, runs)
    padded = torch.arange(21)[None] < 15
    asked = [
        ((IDS.repeat(2, 1),), {}),
        ((IDS, padded.long()), {}),
        ((IDS[:, :1],), {}),
        ((IDS,), {"output_hidden_states": True}),
        ((IDS,), {"return_dict": False}),
        ((IDS,), {"position_ids": torch.arange(3, 24)[None]}),
        ((), {"inputs_embeds": plain.get_input_embeddings()(IDS)}),
    ]
    with torch.no_grad():
        for arguments, options in asked:
            assert torch.equal(model(*arguments, **options)[0], plain(*arguments, **options)[0])
        hook = model.transformer_encoder[1].register_forward_hook(lambda *_: None)
        assert torch.equal(model(IDS)[0], plain(IDS)[0])
        hook.remove()
        everywhere = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
        assert torch.equal(model(IDS)[0], plain(IDS)[0])
        everywhere.remove()
    model(IDS)[0].sum().backward()
    assert model.transformer_encoder[0].qkv.weight.grad is not None and not runs
    with torch.no_grad():
        model(IDS)
    assert runs == [21]


def test_weights_and_modules_that_change_end_it(work, runs, caplog):
    folder, _ = work
    model = loaded(folder, runs)
    with torch.no_grad():
        block, layer = model.transformer_encoder[0], model.transformer_encoder[0].qkv
        block.qkv = torch.nn.Linear(64, 192, bias=False)
        assert not torch.equal(model(IDS)[0], AutoModel.from_pretrained(folder / "model").eval()(IDS)[0])
        block.qkv = layer
        model(IDS)
        assert runs == [21]
        layer.weight.mul_(0.5)
        changed = AutoModel.from_pretrained(folder / "model").eval()
        changed.transformer_encoder[0].qkv.weight.mul_(0.5)
        for _ in range(2):
            assert torch.equal(model(IDS)[0], changed(IDS)[0])
    assert runs == [21] and "Weights have changed since `use_compiled`" in caplog.text


REPLACED = {
    "a parameter": lambda model: setattr(
        model.transformer_encoder[0].qkv, "weight", nn.Parameter(2 * model.transformer_encoder[0].qkv.weight)
    ),
    "all, by assigning": lambda model: model.load_state_dict(
        {name: 1.3 * tensor for name, tensor in model.state_dict().items()}, assign=True
    ),
    "a bias": lambda model: setattr(model.transformer_encoder[0].qkv, "bias", nn.Parameter(torch.ones(192))),
    "a forward": lambda model: setattr(model.transformer_encoder[0].wo, "forward", lambda states: 2 * states),
    "another layer": lambda model: model.transformer_encoder.append(copy.deepcopy(model.transformer_encoder[0])),
    "an eps": lambda model: setattr(model.transformer_encoder[0].attention_norm, "eps", 0.5),
}


@pytest.mark.parametrize("what", REPLACED)
@torch.no_grad()
def test_what_is_replaced_is_computed_with(work, runs, what):
    folder, _ = work
    model, plain = loaded(folder, runs), AutoModel.from_pretrained(folder / "model").eval()
    before = plain(IDS)[0]
    REPLACED[what](model)
    REPLACED[what](plain)
    found = model(IDS)[0]
    assert torch.equal(found, plain(IDS)[0]) and not torch.equal(found, before) and not runs


def test_settings_that_change_are_followed(work, runs):
    folder, _ = work
    model, plain = loaded(folder, runs), AutoModel.from_pretrained(folder / "model").eval()
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 8}
    with torch.no_grad():
        before = plain(IDS)[0]
        for each in (model, plain):
            each.config.rope_parameters = dict(yarn)
        assert torch.equal(model(IDS)[0], plain(IDS)[0]) and not torch.equal(model(IDS)[0], before)
        model = loaded(folder, runs)
        model.config.return_dict = False
        assert isinstance(model(IDS), tuple) and not runs
        # Asked for before.
        model = AutoModel.from_pretrained(folder / "model", output_hidden_states=True).eval()
        model = use_compiled(model, folder / "compiled")
        runs.clear()
        assert len(model(IDS).hidden_states) == 3 and not runs


def test_ids_of_no_word_are_said_to_be_that(work, runs):
    folder, _ = work
    model = loaded(folder, runs)
    for ids in ([5, -1, 7], [5, 200, 7]):
        with torch.no_grad(), pytest.raises(ValueError, match="`input_ids` runs from .* only 0 to 199 are allowed"):
            model(torch.tensor([ids]))


@pytest.mark.parametrize("int8", [False, True])
def test_a_prepared_model_may_take_it(work, runs, int8):
    folder, precision = work
    model = AutoModel.from_pretrained(folder / "model").eval().prepare_for_inference(int8=int8)
    use_compiled(model, folder / "compiled")
    runs.clear()
    with torch.no_grad():
        assert_near(model(IDS)[0], AutoModel.from_pretrained(folder / "model").eval()(IDS)[0], precision)
    assert runs == [21]


def test_merged_adapters_end_it(work, runs, caplog):
    """They are added to `.data`, which torch does not count."""
    folder, _ = work
    model = loaded(folder, runs)
    wrapped = get_peft_model(model, LoraConfig(target_modules=["wo"], init_lora_weights=False)).eval()
    with torch.no_grad():
        wrapped(IDS)
        merged = wrapped.merge_and_unload()
        changed = AutoModel.from_pretrained(folder / "model").eval()
        changed.load_state_dict(merged.state_dict())
        assert torch.equal(merged(IDS)[0], changed(IDS)[0])
    assert not runs and "Weights have changed since `use_compiled`" in caplog.text


def test_a_second_one_takes_the_place_of_the_first(work, runs):
    folder, _ = work
    model = use_compiled(loaded(folder, runs), folder / "compiled")
    runs.clear()
    with torch.no_grad():
        model(IDS)
        model.layer_norm.weight.mul_(2)
        expected = AutoModel.from_pretrained(folder / "model").eval()
        expected.layer_norm.weight.mul_(2)
        for _ in range(2):
            assert torch.equal(model(IDS)[0], expected(IDS)[0])
    assert runs == [21] and "forward" not in vars(model)


def test_heads_and_sentence_transformers_use_it(work, runs):
    folder, precision = work
    model = loaded(folder, runs, AutoModelForSequenceClassification)
    with torch.no_grad():
        plain = AutoModelForSequenceClassification.from_pretrained(folder / "model").eval()
        assert_near(model(IDS, torch.ones_like(IDS)).logits, plain(IDS).logits, precision)
    assert runs == [21]
    encoder = SentenceTransformer(str(folder / "model"), device="cpu")
    expected = [encoder.encode(texts, convert_to_tensor=True) for texts in ("abc def", ["abc", "abcdef"])]
    use_compiled(encoder, folder / "compiled")
    runs.clear()
    assert_near(encoder.encode("abc def", convert_to_tensor=True)[None], expected[0][None], precision)
    assert torch.equal(encoder.encode(["abc", "abcdef"], convert_to_tensor=True), expected[1]) and len(runs) == 1


def test_files_of_something_else_are_refused(work, runs, tmp_path):
    folder, _ = work
    # Also of a token that the text of the check has not, and where bfloat16 would hide it.
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        use_compiled(AutoModel.from_pretrained(folder / "model", dtype=dtype).eval(), folder / "compiled")
        other = AutoModel.from_pretrained(folder / "model", dtype=dtype).eval()
        other.encoder.weight.data[199, 0] += 0.1
        with pytest.raises(
            ValueError, match="compiled was compiled from other weights than this model's: compile this model"
        ):
            use_compiled(other, folder / "compiled")
    config = AutoModel.from_pretrained(folder / "model").config
    config.norm_eps = 0.1
    other = AutoModel.from_pretrained(folder / "model", config=config).eval()
    with pytest.raises(ValueError, match="was compiled from a model with another config: compile this model"):
        use_compiled(other, folder / "compiled")
    model = AutoModel.from_pretrained(folder / "model").eval()
    content = json.loads((folder / "compiled" / "compiled.json").read_text())
    (tmp_path / "moved").mkdir()
    for changes, message in (
        ({"torch": "2.0.0"}, "was compiled with torch 2.0.0, but this is torch"),
        ({"cpu": [*content["cpu"], "avx2048"]}, "for a CPU with avx2048, unlike this one. Compile the model again"),
    ):
        (tmp_path / "moved" / "compiled.json").write_text(json.dumps(content | changes))
        with pytest.raises(ValueError, match=message):
            use_compiled(model, tmp_path / "moved")
    with pytest.raises(ValueError, match="has 0 encoders"):
        use_compiled(torch.nn.Linear(2, 2), folder / "compiled")
    with pytest.raises(TypeError, match="can neither|cannot be copied or pickled: do this before `use_compiled`"):
        copy.deepcopy(loaded(folder, runs))


def test_what_cannot_be_compiled_is_refused_before_work(work, tmp_path, monkeypatch):
    folder, precision = work
    error = main(["compile", str(folder / "model"), str(folder / "compiled")])
    assert "compiled exists already. Delete it" in error
    config = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}
    small_model(NeoBERTForSequenceClassification, vocab_size=200, num_labels=3).save_pretrained(tmp_path / "dynamic")
    edit_json(tmp_path / "dynamic" / "config.json", **config)
    with pytest.raises(ValueError, match="has RoPE of type 'dynamic', which depends on the longest text of a batch"):
        compile_encoder(CompileSettings(str(tmp_path / "dynamic"), str(tmp_path / "out")))
    # A file that computes something else is not kept.
    monkeypatch.setattr(compile_module, "LARGEST_DIFFERENCE", -1)
    monkeypatch.setattr(compile_module, "LEAST_COSINE", 2)
    monkeypatch.setattr(compile_module, "write_package", lambda *_: None)
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path: lambda ids: torch.zeros(1, ids.shape[1], 64))
    with pytest.raises(ValueError, match="The compiled encoder does not compute the same as PyTorch in float32"):
        compile_encoder(CompileSettings(str(folder / "model"), str(tmp_path / "out"), precision))
    assert not list(tmp_path.glob("out*"))
