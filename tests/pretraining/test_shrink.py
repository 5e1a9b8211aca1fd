"""examples/shrink.py: what is cut and why, that distillation learns, goes on and refuses."""

import copy
import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMaskedLM

from neobert_hf import NeoBERTForMaskedLM
from neobert_hf.modeling_neobert import swiglu_width
from neobert_hf.pretraining import preparing
from neobert_hf.pretraining.adapting import load_masked_lm
from neobert_hf.pretraining.shards import read_manifest
from neobert_hf.pretraining.shrinking import Distiller, masked_loss
from neobert_hf.training.cutting import CutSettings, cut_model
from neobert_hf.training.run_checkpoints import CheckpointError, complete_checkpoints
from tests.helpers.examples import load_example
from tests.helpers.models import ROOT, packed_batch, small_config, small_model
from tests.helpers.pretraining_runs import assert_same_weights, interrupted_behind, kill_twice, start, to_flags


example = load_example("shrink")
SMALL = {
    "config": ROOT / "configs" / "adapt" / "shrink.yaml",
    "num_hidden_layers": 1,
    "intermediate_size": 24,
    "measured_tokens": 512,
    "learning_rate": 5e-3,
    "max_steps": 12,
    "eval_steps": 3,
    "save_steps": 3,
    "logging_steps": 1,
    "global_batch_tokens": 512,
    "micro_batch_tokens": 256,
    "bf16": False,
    "use_cpu": True,
    "report_to": "none",
    "peak_tflops": 0.1,
}


NO_FOLDERS = {"train_data": None, "validation_data": None}


@pytest.fixture
def shrink_flags(finished, prepared, tmp_path):
    def build(output_dir=tmp_path / "run", **changes) -> list[str]:
        paths = {"model": finished / "model", "train_data": prepared / "train"}
        paths |= {"validation_data": prepared / "validation", "output_dir": output_dir}
        return to_flags(paths | SMALL | changes)

    return build


@pytest.fixture
def shrink(shrink_flags, tmp_path):
    """Runs the script in this process; its report."""

    def run(output_dir=tmp_path / "run", **changes) -> dict:
        example.main(shrink_flags(output_dir, **changes))
        return json.loads((output_dir / "report.json").read_text())

    return run


def labelled_batch() -> dict:
    ids, packing = packed_batch((30, 20, 14))
    labels = ids.clone()
    labels[:, ::2] = -100
    return {"input_ids": ids, "labels": labels, **packing}


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model(**labelled_batch()).logits


def cut(model, **sizes):
    sizes = CutSettings(**sizes).sizes(model.config)
    return cut_model(model, sizes, "masked loss", partial(masked_loss, model, [labelled_batch()]))


def test_all_layers_and_the_whole_mlp_are_the_same_model_to_the_bit():
    model = small_model(NeoBERTForMaskedLM, num_hidden_layers=3)
    whole = copy.deepcopy(model)
    found = cut(model, num_hidden_layers=3, intermediate_size=96)
    assert found.rounds == [] and found.layers == [0, 1, 2] and found.norms_cut == [0.0] * 3
    for (name, weight), (_, other) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        assert torch.equal(weight, other), name
    assert torch.equal(logits_of(model), logits_of(whole))


@pytest.mark.parametrize("tied", [False, True])
def test_a_cut_model_is_the_large_one_with_layers_skipped_and_units_zeroed(tmp_path, tied):
    model = small_model(NeoBERTForMaskedLM, num_hidden_layers=4, tie_word_embeddings=tied)
    large = copy.deepcopy(model)
    # Of 64 units 40 are kept: a multiple of 8, and what the config says.
    found = cut(model, num_hidden_layers=2, intermediate_size=60)
    assert found.widths == (64, 40) and len(found.layers) == 2
    blocks = [large.model.transformer_encoder[number] for number in found.layers]
    for block, small in zip(blocks, model.model.transformer_encoder):
        rows = {tuple(row) for row in small.ffn.w12.weight[:40].tolist()}
        zeroed = [row for row in range(64) if tuple(block.ffn.w12.weight[row].tolist()) not in rows]
        assert len(zeroed) == 24
        with torch.no_grad():
            block.ffn.w12.weight[64:][zeroed] = 0
    for number, block in enumerate(large.model.transformer_encoder):
        if number not in found.layers:
            block.register_forward_hook(lambda block, inputs, outputs: (inputs[0], None))
    torch.testing.assert_close(logits_of(model), logits_of(large), rtol=0, atol=1e-5)
    # Saved and loaded, by nothing but its config.
    model.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert (loaded.config.num_hidden_layers, loaded.config.intermediate_size) == (2, 60)
    assert torch.equal(logits_of(loaded), logits_of(model))
    assert loaded.num_parameters() == NeoBERTForMaskedLM(loaded.config).num_parameters() == model.num_parameters()


def test_the_layers_and_units_that_add_nothing_go_first():
    model = small_model(NeoBERTForMaskedLM, num_hidden_layers=4)
    with torch.no_grad():
        for number in (1, 2):
            model.model.transformer_encoder[number].wo.weight.zero_()
            model.model.transformer_encoder[number].ffn.w3.weight.zero_()
        for number, idle in ((0, [3, 17]), (3, [20, 63])):
            # Large weights that no activation reaches do not count, nor do large activations that nothing reads.
            mlp = model.model.transformer_encoder[number].ffn
            mlp.w12.weight[64 + idle[0]] = 0
            mlp.w3.weight[:, idle[0]] *= 100
            mlp.w12.weight[idle[1]] *= 100
            mlp.w3.weight[:, idle[1]] = 0
    before = logits_of(model)
    found = cut(model, num_hidden_layers=2, intermediate_size=84)
    assert found.layers == [0, 3] and found.widths == (64, 56)
    assert [[number for number, value in enumerate(each) if value is None] for each in found.rounds] == [[], [1]]
    # Without what adds nothing the loss is the same; six units of each MLP did add something, and little.
    assert found.rounds[1][2] == pytest.approx(found.whole, abs=1e-6)
    assert found.rounds[0][0] != pytest.approx(found.whole, abs=1e-3)
    assert 0 < max(found.norms_cut) < 6 / 56
    for number in (0, 1):
        # None is left that no activation reaches, and none that nothing reads.
        mlp = model.model.transformer_encoder[number].ffn
        assert (mlp.w12.weight.norm(dim=1) > 0).all() and (mlp.w3.weight.norm(dim=0) > 0).all()
    assert not torch.equal(before, logits_of(model))
    text = "\n".join(found.lines())
    assert re.search(r"^\| 1 \| [+-]0\.0000 \| 1 \| [+-]0\.0000 \|  \|$", text, re.MULTILINE), text
    assert re.search(r"^\| 3 \| [+-][\d.]+ \|  \|  \| [\d.]+% \|$", text, re.MULTILINE), text


def test_every_width_that_a_config_can_say_is_cut_exactly():
    for size in range(2, 97, 5):
        model = small_model(NeoBERTForMaskedLM)
        cut(model, intermediate_size=size)
        width = swiglu_width(small_config(intermediate_size=size))
        for block in model.model.transformer_encoder:
            assert (block.ffn.w12.weight.shape, block.ffn.w3.weight.shape) == ((2 * width, 64), (64, width))


def test_gelu_models_lose_layers_only():
    model = small_model(NeoBERTForMaskedLM, hidden_act="gelu")
    with pytest.raises(ValueError, match="`intermediate_size` is 48, but the model has `hidden_act` 'gelu'"):
        cut(model, intermediate_size=48)
    assert len(cut(model, num_hidden_layers=1).layers) == len(model.model.transformer_encoder) == 1


def test_a_run_distils_and_reports(shrink, finished, tmp_path, capsys):
    report, folder = shrink(), tmp_path / "run"
    losses = report["losses"]
    assert losses["distilled"] < losses["cut"] - 0.1 and report["steps"] == 12
    model = AutoModelForMaskedLM.from_pretrained(folder / "model")
    large = AutoModelForMaskedLM.from_pretrained(finished / "model")
    assert isinstance(model, NeoBERTForMaskedLM) and not model.config.sparse_prediction
    assert (model.config.num_hidden_layers, swiglu_width(model.config)) == (1, 16)
    assert report["parameters"] == {"large": large.num_parameters(), "small": model.num_parameters()}
    text = (folder / "report.md").read_text()
    assert text in capsys.readouterr().out and "did not fall" not in text
    for name, value in losses.items():
        assert re.search(rf"^\| {name} \| [\d,]+ \| {value:.3f} \|$", text, re.MULTILINE), text
    assert "without 1 of its 2 layers, and with 16 of the 32 units" in text
    assert (folder / "shrink.png").stat().st_size > 10_000
    log = json.loads((folder / "log.json").read_text())
    assert [entry["step"] for entry in log if "eval_loss" in entry] == [0, 3, 6, 9, 12]
    # The last held-out loss of training, by the Trainer, is that of the report.
    assert log[-2]["eval_loss"] == pytest.approx(losses["distilled"], abs=1e-5)
    assert not any("perplexity" in entry for entry in log if "loss" in entry)
    # The same command does nothing but write the report again.
    newest = complete_checkpoints(folder)[-1].stat().st_mtime_ns
    assert shrink() == report
    assert complete_checkpoints(folder)[-1].stat().st_mtime_ns == newest


def test_the_three_losses_are_of_one_precision(shrink, tmp_path):
    """Accelerate wraps the model that is trained in autocast."""
    report = shrink(bf16=True, max_steps=2)
    # Again, nothing is trained, and so nothing wrapped.
    assert shrink(bf16=True, max_steps=2)["losses"] == report["losses"]


@pytest.fixture
def large(finished, tmp_path) -> Path:
    """Without dropout, so that its loss can be computed again."""
    model = load_masked_lm(str(finished / "model"), dropout=0.0)
    model.save_pretrained(tmp_path / "large")
    for file in (finished / "model").glob("tokenizer*"):
        shutil.copy(file, tmp_path / "large")
    return tmp_path / "large"


def first_loss(folder: Path) -> float:
    return next(entry["loss"] for entry in json.loads((folder / "log.json").read_text()) if "loss" in entry)


def test_a_model_that_is_its_teacher_has_nothing_to_learn_from_it(shrink, large, tmp_path):
    """Whole, and with the masked loss switched off."""
    report = shrink(model=large, num_hidden_layers=2, intermediate_size=None, mlm_weight=0, max_steps=1)
    assert first_loss(tmp_path / "run") == pytest.approx(0, abs=1e-5)
    # Weights that lie elsewhere in memory may be multiplied in another order.
    assert list(report["losses"].values()) == pytest.approx([report["losses"]["large"]] * 3, abs=1e-5)
    assert "did not fall" in (tmp_path / "run" / "report.md").read_text()


@pytest.mark.parametrize(("states", "layout"), [("cosine", "packed"), ("mse", "padded")])
def test_the_loss_is_its_formula(shrink, large, tmp_path, monkeypatch, states, layout):
    """Over both micro-batches of a step, with dense logits and without Torch's losses."""
    seen, counts, compute_loss = [], [], Distiller.compute_loss

    def record(trainer, model, inputs, num_items_in_batch=None):
        if layout == "padded":
            # The documents of the test are all as long as the model reads: one of them becomes shorter.
            filling = {"input_ids": trainer.processing_class.pad_token_id, "attention_mask": 0, "labels": -100}
            for name, value in filling.items():
                inputs[name][0, 20:] = value
        seen.append(dict(inputs))
        counts.append(num_items_in_batch)
        return compute_loss(trainer, model, inputs, num_items_in_batch=num_items_in_batch)

    monkeypatch.setattr(Distiller, "compute_loss", record)
    weights = {"temperature": 3, "states_weight": 0.7, "mlm_weight": 0.3}
    shrink(model=large, states=states, layout=layout, max_steps=1, **weights)
    models = [AutoModelForMaskedLM.from_pretrained(folder).eval() for folder in (tmp_path / "run" / "start", large)]
    expected = 0
    for inputs, labels in zip(seen, counts):
        chosen = (wanted := inputs.pop("labels")) != -100
        with torch.no_grad():
            small, taught = (model(**inputs, output_hidden_states=True) for model in models)
        own, other = ((each.logits[chosen].double() / 3).softmax(-1) for each in (small, taught))
        real = inputs["input_ids"] != models[0].config.pad_token_id
        first, second = (each.hidden_states[-1][real].double() for each in (small, taught))
        cosine = (first * second).sum(1) / first.norm(dim=1) / second.norm(dim=1)
        distance = (1 - cosine if states == "cosine" else ((first - second) ** 2).mean(1)).mean()
        masked = -small.logits[chosen].double().log_softmax(-1).gather(1, wanted[chosen][:, None]).sum()
        expected += (9 * (other * (other.log() - own.log())).sum() + 0.3 * masked) / labels
        expected += 0.7 * distance * chosen.sum() / labels
    assert len(seen) == 2 and first_loss(tmp_path / "run") == pytest.approx(expected.item(), rel=1e-5)


def test_an_interrupted_run_goes_on_to_the_same_bits(shrink, tmp_path):
    whole = shrink(tmp_path / "whole")

    with interrupted_behind("checkpoint-6"):
        shrink()
    assert shrink() == whole
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
    for name, value in (("temperature", 3.0), ("states", "mse"), ("states_weight", 1.0), ("mlm_weight", 0.0)):
        with pytest.raises(CheckpointError, match=rf"{name}: \S+ there, {value!r} now"):
            shrink(**{name: value})
    with pytest.raises(ValueError, match="(?s)start was made with other settings.*intermediate_size: 24 there, 36 now"):
        shrink(intermediate_size=36)


def test_another_teacher_is_refused(shrink, finished, tmp_path):
    """By its weights, not only by where it lies; also if the cut model is made anew."""
    shrink(max_steps=3)
    other = load_masked_lm(str(finished / "model"))
    other.decoder.bias.data[5] += 1
    other.save_pretrained(tmp_path / "other")
    for file in (finished / "model").glob("tokenizer*"):
        shutil.copy(file, tmp_path / "other")
    with pytest.raises(ValueError, match="(?s)start was made with other settings.*model: "):
        shrink(max_steps=3, model=tmp_path / "other")
    (tmp_path / "run" / "start").rename(tmp_path / "aside")
    with pytest.raises(CheckpointError, match="teacher: "):
        shrink(max_steps=3, model=tmp_path / "other")


@pytest.mark.slow
def test_killed_twice_ends_with_the_same_bits(shrink_flags, tmp_path):
    changes = {"max_steps": 36, "eval_steps": 4, "save_steps": 4}
    start(shrink_flags(tmp_path / "whole", **changes), script="shrink").finish()
    output = kill_twice(shrink_flags(**changes), tmp_path / "run", "shrink")
    assert re.search(r"resuming from \S+checkpoint-[1-9]", output)
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
    reports = [json.loads((tmp_path / name / "report.json").read_text()) for name in ("run", "whole")]
    assert reports[0] == reports[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None, "intermediate_size": None}, "are both unset: set one of them, or both"),
        ({"num_hidden_layers": 3}, "`num_hidden_layers` is 3; it must be at most that of the large model, 2"),
        ({"num_hidden_layers": 0}, "`num_hidden_layers` is 0; it must be"),
        ({"intermediate_size": 56}, "`intermediate_size` is 56; it must be at most that of the large model, 48"),
        ({"intermediate_size": 1}, "`intermediate_size` is 1; it must be"),
        ({"temperature": 0}, "`temperature` is 0"),
        ({"states_weight": -1}, "`states_weight` is -1"),
        ({"mlm_weight": float("nan")}, "`mlm_weight` is nan"),
        ({"measured_tokens": 0}, "`measured_tokens` is 0"),
        ({"replay_share": 0.5}, "`replay_share` is 0.5"),
        ({"model": "./nowhere"}, "`model` is './nowhere', but there is no such file or folder"),
        ({"train_data": "nowhere"}, "nowhere"),
        ({"validation_data": "nowhere"}, "nowhere"),
        ({"micro_batch_tokens": 32, "global_batch_tokens": 32}, "less than one document of `max_length` = 64"),
        ({"global_batch_tokens": 500}, "must be a multiple of"),
        ({"text": "a.jsonl"}, "`text` is .*a.jsonl', `train_data` .*: give `text`, or both folders in its place"),
        ({"train_data": None, "validation_data": None}, "`text` is None, .*: give `text`, or both folders"),
        ({"validation_data": None}, "`text` is None, .* and `validation_data` None: give `text`, or both folders"),
        ({"text_subset": "en"}, "`text_subset` is for raw text, and `train_data` is prepared already"),
        (NO_FOLDERS | {"text": ROOT / "README.md", "text_subset": "en"}, "is local and has no subset 'en'"),
        ({"held_out_share": 0.2}, "`held_out_share` is for raw text, and `train_data` is prepared already"),
        (NO_FOLDERS | {"text": "./nowhere.jsonl"}, "'.*nowhere.jsonl'.* no such file|nowhere.jsonl' matches no file"),
        ({"max_length": 64}, "Unknown argument '--max_length'"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(shrink, tmp_path, change, message):
    with pytest.raises((ValueError, FileNotFoundError), match="(?s)" + message):
        shrink(**change)
    assert not (tmp_path / "run" / "start").exists()


def test_raw_text_is_prepared_on_the_way(shrink, prepared, tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "start_workers", ThreadPoolExecutor)
    raw = NO_FOLDERS | {"text": prepared / "train.jsonl", "held_out_share": 0.1, "max_steps": 3}
    report = shrink(**raw)
    held_out, train = (read_manifest(str(tmp_path / "run" / "data" / part)) for part in ("held_out", "train"))
    assert held_out.source["part"] == "held_out" and train.source["part"] == "train"
    assert 0.05 < held_out.source_documents / (held_out.source_documents + train.source_documents) < 0.2
    assert report["steps"] == 3 and report["losses"]["distilled"] < report["losses"]["cut"]
    # Once more, nothing is prepared or trained anew.
    assert shrink(**raw) == report
    with pytest.raises(ValueError, match="held_out_share"):
        shrink(**raw | {"held_out_share": 0.2})


def test_text_of_another_tokenizer_is_refused(shrink, tmp_path):
    small_model(NeoBERTForMaskedLM).save_pretrained(tmp_path / "other")
    from tests.helpers.small_tokenizer import small_tokenizer

    small_tokenizer(model_max_length=64).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="was prepared with another tokenizer than that of .*other"):
        shrink(model=tmp_path / "other")
