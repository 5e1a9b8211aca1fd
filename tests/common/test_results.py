"""Results that somebody changed, or a disk."""

import json
import math

import pytest

from neobert_hf.common.results import ResultError, read_result, write_result


KEYS = {"score", "settings"}
RESULT = {
    "score": 0.583,
    "metrics": {"accuracy": 0.6, "mcc": -0.25},
    "settings": {"seed": 0},
    "evaluations": [0.5, 0.583],
}


def test_another_byte_anywhere_is_an_error(tmp_path):
    file = tmp_path / "result.json"
    write_result(file, RESULT)
    assert read_result(file, KEYS) == RESULT
    written = file.read_bytes()
    for place in range(len(written)):
        for bit in (1, 0x80):
            file.write_bytes(written[:place] + bytes([written[place] ^ bit]) + written[place + 1 :])
            try:
                found = read_result(file, KEYS)
            except ResultError:
                continue
            # Settings are compared with those of the run.
            assert {name: found[name] for name in RESULT} | {"settings": 0} == RESULT | {"settings": 0}


@pytest.mark.parametrize("value", [7.0, -1.5, math.nan, math.inf, None, "0.5", True])
def test_scores_that_cannot_be_are_refused_in_results_without_a_checksum(tmp_path, value):
    file = tmp_path / "result.json"
    file.write_text(json.dumps(RESULT))
    assert read_result(file, KEYS) == RESULT
    for changed in ({"score": value}, {"metrics": {"accuracy": value}}):
        file.write_text(json.dumps(RESULT | changed))
        with pytest.raises(ResultError, match=r"result.json: `\w+` is .*; it must be from -1 to 1"):
            read_result(file, KEYS)
    file.write_text(json.dumps(RESULT | {"score": None, "metrics": {}, "error": "The loss is nan."}))
    assert read_result(file, KEYS)["score"] is None


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"score": 1}', '{"score": 1, "settings": 3}', "\0\0", '"x"'])
def test_other_files_are_no_results(tmp_path, content):
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(ResultError, match="result.json is not a result of this script"):
        read_result(tmp_path / "result.json", KEYS)
