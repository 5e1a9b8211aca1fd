"""A recipe called from Python: keywords become settings as a command line's words do."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from neobert_hf.common.recipe import recipe


@dataclass
class Places:
    """Settings that take one value or several."""

    source: list[str]
    more: list[str] | None = None
    lengths: list[int] = field(default_factory=list)
    model: str = "m"


@recipe
def places(settings: Places) -> Places:
    return settings


def test_paths_are_texts_and_one_value_is_a_list_where_several_are_taken():
    found = places(source=Path("a"), more="b", lengths=3, model=Path("x/y"))
    assert (
        found == Places(["a"], ["b"], [3], "x/y") == places.main("--source a --more b --lengths 3 --model x/y".split())
    )
    assert places(source=[Path("a"), "b"], more=None).source == ["a", "b"]


def test_a_setting_without_its_name_is_refused_with_one_by_name():
    with pytest.raises(TypeError, match="places.*source="):
        places("a")


def test_a_misspelt_configuration_of_the_package_is_named():
    with pytest.raises(FileNotFoundError, match="embeddings/small.yaml"):
        places(source="a", config="embeddings/smal.yaml")
