"""A recipe: one function over its settings, which Python calls by keywords and a command by flags."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import wraps
from pathlib import Path
from typing import Any, get_type_hints

from neobert_hf.common.settings import parse_config, settings_of_keywords


@dataclass
class Result:
    """What a recipe made, and how good it is.

    Attributes:
        model: the folder of the model, or None if the recipe trains none.
        scores: metrics by name, or by split or task and then by name.
        before: the same metrics of the model before training, if they were measured.
        baseline: the same metrics of a simpler method, if there is one.
        output: the file or folder that a recipe without a model wrote, or what it found.
    """

    model: Path | None = None
    scores: dict[str, Any] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)
    baseline: dict[str, Any] = field(default_factory=dict)
    output: Any = None


def recipe(function: Callable[..., Any] | None = None, *, positional: tuple[str, ...] = ()) -> Callable[..., Any]:
    """Let a function over dataclasses of settings be called by keywords that are the names of the settings.

    Args:
        function: its parameters are annotated with the dataclasses.
        positional: settings that a command line may give first and without their flag.

    Returns:
        The function of keywords. Its `main(args)` takes a command line, and `kinds` are the dataclasses.

    Example:

    ```python
    >>> @recipe
    ... def greet(settings: GreetingSettings) -> str:
    ...     return f"{settings.word}, {settings.name}!"
    >>> greet(name="Ada"), greet.main(["--name", "Ada"])
    ('Hello, Ada!', 'Hello, Ada!')
    ```
    """
    if function is None:
        return lambda function: recipe(function, positional=positional)
    hints = get_type_hints(function)
    result = hints.pop("return", None)
    kinds = tuple(hints.values())

    @wraps(function)
    def call(*unnamed: Any, **settings: Any) -> Any:
        if unnamed:
            example = [*positional, *inspect.signature(call).parameters][0]
            raise TypeError(f"{function.__name__}() takes settings by name, such as `{example}=...`.")
        return function(*settings_of_keywords(kinds, settings, function.__name__))

    def main(args: list[str] | None = None) -> Any:
        return function(*parse_config(*kinds, args=args, positional=positional))

    call.main, call.kinds, call.positional = main, kinds, positional
    # Editors and `help()` show the settings.
    parameters = [
        inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, annotation=one.type)
        for kind in kinds
        for one in fields(kind)
        if one.init
    ]
    call.__signature__ = inspect.Signature(parameters, return_annotation=result)
    return call
