"""What all evaluations share: the name of a model, and the advice on results of something else."""

from pathlib import Path

from neobert_hf.common.paths import check_file_name


# What to do if a stored result depends on something else than this run.
ADVICE = "Give this model another `name`, use another `output_dir`, or delete the file to compute it again."


def name_of_model(name: str | None, model: str) -> str:
    """The name of a model in reports, and of its folder of results.

    Args:
        name: the name that the user gives; if None, the last part of `model`, so that a model that was moved still has
            its results. All our recipes call their model `model`: then it is the name of the folder around it.
        model: a folder or Hub id.

    Raises:
        ValueError: if no folder can have this name.
    """
    if name is None:
        path = Path(model).expanduser()
        parts = path.resolve().parts if path.exists() else path.parts
        name = parts[-2] if parts[-1:] == ("model",) and len(parts) > 1 else parts[-1]
    return check_file_name(name, "`name` of the model")
