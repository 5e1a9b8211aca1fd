"""examples/shrink_embeddings.py: what is left of an embedding model, and that it can be distilled."""

import json

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, StaticEmbedding, Transformer

from neobert_hf.embeddings.models import build_encoder
from tests.helpers.embedding_runs import run
from tests.helpers.examples import load_example
from tests.helpers.pretraining_runs import assert_same_weights, start


TEXTS = ["a list", "a function of two numbers", "what is the name of an object in the class statement"]


@pytest.fixture
def large(encoder, tmp_path) -> SentenceTransformer:
    """With prompts and a linear layer behind the pooling; lies in tmp_path / "large"."""
    layer = Dense(32, 16, activation_function=torch.nn.Identity())
    prompts = {"query": "the question ", "document": "a text "}
    model = SentenceTransformer(modules=[*build_encoder(str(encoder), 48), layer], prompts=prompts, device="cpu")
    model.save(str(tmp_path / "large"))
    return model.eval()


@pytest.fixture
def shrink(large, corpus, tmp_path):
    def cut(**changes) -> SentenceTransformer:
        settings = {"model": tmp_path / "large", "texts": corpus / "train.jsonl", "measured_texts": 40}
        settings |= {"fitted_texts": 200, "output_dir": tmp_path / "cut"} | changes
        flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
        load_example("shrink_embeddings").main(flags)
        return SentenceTransformer(str(tmp_path / "cut" / "model"), device="cpu").eval()

    return cut


def test_all_of_it_is_the_same_model(shrink, large, tmp_path):
    """The encoder to the bit. The linear layer is found again, from what it gives for texts."""
    small = shrink(num_hidden_layers=2, intermediate_size=48)
    for name, weight in large[0].state_dict().items():
        assert torch.equal(small[0].state_dict()[name], weight), name
    assert small.encode(TEXTS) == pytest.approx(large.encode(TEXTS), rel=1e-3, abs=1e-3)
    assert json.loads((tmp_path / "cut" / "report.json").read_text())["lost"] == pytest.approx(0, abs=1e-6)


def test_less_of_it_is_smaller_and_all_else_stays(shrink, large, data, tmp_path, capsys):
    small = shrink(num_hidden_layers=1, intermediate_size=24)
    config = small[0].model.config
    assert (config.num_hidden_layers, config.intermediate_size) == (1, 24)
    assert small[0].model.transformer_encoder[0].ffn.w3.weight.shape == (32, 16)
    assert small.prompts == large.prompts and small.get_embedding_dimension() == 16
    report = json.loads((tmp_path / "cut" / "report.json").read_text())
    (found,) = report["cut"]["rounds"]
    # Less is lost without the layer that went than without the other.
    assert report["cut"]["layers"] == [found.index(max(found))]
    assert 0 < min(found) < max(found) < 1 and report["cut"]["whole"] == pytest.approx(0, abs=1e-6)
    text = (tmp_path / "cut" / "report.md").read_text()
    assert text in capsys.readouterr().out and f"{report['parameters']['small']:,} of its" in text
    assert (tmp_path / "cut" / "shrink.png").stat().st_size > 10_000
    # The guide's next command brings it back nearer.
    settings = {"model": tmp_path / "cut" / "model", "teacher": tmp_path / "large", "distillation": "mse"}
    settings |= {"datasets": data / "datasets.yaml", "output_dir": tmp_path / "distilled", "eval_strategy": "no"}
    run("dense", settings | {"max_steps": 12, "per_device_train_batch_size": 32})
    log = json.loads((tmp_path / "distilled" / "log.json").read_text())
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert np.mean(losses[-3:]) < 0.5 * losses[0]


def part(model: SentenceTransformer, end: int) -> SentenceTransformer:
    return SentenceTransformer(modules=list(model)[:end], prompts=model.prompts, device="cpu")


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_a_linear_layer_is_fitted_to_what_is_left(shrink, large, corpus, tmp_path, layers):
    """One layer in place of none, one or several. Of all linear layers it is the best, for queries and documents."""
    for _ in range(1 - layers):
        del large[2]
    if layers == 2:
        large.append(Dense(16, 12, activation_function=torch.nn.Tanh()))
    large.save(str(tmp_path / "large"))
    large.append(Normalize()).save(str(tmp_path / "normalized"))
    small, normalized = shrink(num_hidden_layers=1), shrink(num_hidden_layers=1, model=tmp_path / "normalized")
    assert [type(module) for module in normalized] == [Transformer, Pooling, Dense, Normalize]
    assert torch.equal(small[2].linear.weight, normalized[2].linear.weight) and small.prompts == large.prompts
    assert small[2].linear.weight.shape == ((32, 16, 12)[layers], 32)

    texts = [json.loads(line)["text"] for line in (corpus / "train.jsonl").read_text().splitlines()][:200]
    found, states, wanted = (
        np.concatenate([model.encode_document(texts), model.encode_query(texts)]).astype(np.float64)
        for model in (small, part(small, 2), part(large, -1))
    )
    states = np.c_[states, np.ones(len(states))]
    best = states @ np.linalg.lstsq(states, wanted, rcond=None)[0]
    share, least = (np.square(vectors - wanted).mean() / wanted.var(0).mean() for vectors in (found, best))
    assert 0.01 < least <= share < 1.1 * least
    report = json.loads((tmp_path / "cut" / "report.json").read_text())
    # By leave-one-out, which is more than on the texts themselves.
    assert share < report["lost"] < 1.5 * share
    assert f"{report['lost']:.1%} of their variance is lost" in (tmp_path / "cut" / "report.md").read_text()


@pytest.mark.slow
def test_killed_twice_it_cuts_the_same_model(large, corpus, tmp_path):
    """While it measures, and as it writes: nothing is left half done, and the third run ends as one that was let be."""
    flags = ["--model", f"{tmp_path}/large", "--texts", f"{corpus}/train.jsonl", "--num_hidden_layers", "1"]
    flags += ["--measured_texts", "300"]
    start([*flags, "--output_dir", f"{tmp_path}/whole"], script="shrink_embeddings").finish()
    output = tmp_path / "run"
    for folder, sign in ((tmp_path, ".run.lock"), (output, "model.*.partial")):
        assert not list(folder.glob(sign))
        run = start([*flags, "--output_dir", str(output)], script="shrink_embeddings")
        while not list(folder.glob(sign)):
            assert all(process.is_alive() for process in run.processes), run.output
        run.kill()
    assert not (output / "report.md").exists()
    start([*flags, "--output_dir", str(output)], script="shrink_embeddings").finish()
    assert_same_weights(output, tmp_path / "whole")
    assert (output / "report.md").read_text() == (tmp_path / "whole" / "report.md").read_text()
    assert not list(output.glob("*.partial"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "are both unset: set one of them, or both"),
        ({"num_hidden_layers": 3}, "`num_hidden_layers` is 3; it must be at most that of the large model, 2"),
        ({"intermediate_size": 1}, "`intermediate_size` is 1; it must be"),
        ({"num_hidden_layers": 1, "measured_texts": 0}, "`measured_texts` is 0"),
        ({"num_hidden_layers": 1, "fitted_texts": 1}, "`fitted_texts` is 1"),
        ({"num_hidden_layers": 1, "model": "./nowhere"}, "`model` is './nowhere', but there is no such file"),
        ({"num_hidden_layers": 1, "texts": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"num_hidden_layers": 1, "column": "body"}, "body"),
    ],
)
def test_bad_input_is_refused(shrink, tmp_path, change, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        shrink(**change)
    assert not (tmp_path / "cut").exists()


def test_texts_without_text_and_other_models_are_refused(shrink, tokenizer, tmp_path):
    (tmp_path / "empty.jsonl").write_text('{"text": " "}\n')
    with pytest.raises(ValueError, match="holds 0 texts in the column 'text'; it must hold two"):
        shrink(num_hidden_layers=1, texts=tmp_path / "empty.jsonl")
    static = StaticEmbedding(tokenizer.backend_tokenizer, embedding_dim=8)
    SentenceTransformer(modules=[static]).save(str(tmp_path / "static"))
    with pytest.raises(
        ValueError, match="begins with StaticEmbedding; it must be an embedding model with a NeoBERT encoder"
    ):
        shrink(num_hidden_layers=1, model=tmp_path / "static")
