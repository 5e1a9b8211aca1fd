"""In whose space the vectors of a model lie: a student's folder names the teacher whose vectors it learned.

`teacher.json` holds the teacher's name and a hash of its weights, so that an index of the teacher's vectors can be
searched with the student, and with no other model.
"""

import json
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from neobert_hf.common.files import write_json
from neobert_hf.common.fingerprints import weights_fingerprint


TEACHER_FILE = "teacher.json"


def write_teacher(folder: Path, teacher: str) -> None:
    """Note in the folder of a student whose vectors it learned."""
    write_json(folder / TEACHER_FILE, {"teacher": teacher, "weights": weights_fingerprint(teacher)})


def teacher_of(student: str) -> dict[str, str] | None:
    """Whose vectors a model learned: `teacher`, its name, and `weights`, a hash of them; None if it does not say."""
    file = cached_file(student, TEACHER_FILE, _raise_exceptions_for_missing_entries=False)
    return json.loads(Path(file).read_text(encoding="utf-8")) if file is not None else None


def check_student(student: str, identity: dict[str, Any], where: str) -> None:
    """Refuse a model whose vectors lie in another space than those of an index.

    Args:
        student: folder or Hub id.
        identity: what the vectors of the index depend on.
        where: the index, for the message.

    Raises:
        ValueError: naming the models.
    """
    teacher = teacher_of(student)
    if teacher is None:
        raise ValueError(
            f"{student} has no {TEACHER_FILE}, which `distil` writes to say whose vectors a model learned: take a "
            f"student of {identity['model']}, with whose vectors {where} was made, or no `query_model`."
        )
    if teacher["weights"] != identity["weights"]:
        raise ValueError(
            f"{student} learned the vectors of {teacher['teacher']}, and {where} holds those of {identity['model']}: "
            "take a student of that model, or no `query_model`."
        )
