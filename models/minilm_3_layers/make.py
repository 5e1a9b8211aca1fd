"""Make this model: from public text to its weights.

    pip install -e '.[embed]' gensim nltk lancedb
    python models/minilm_3_layers/make.py sentence-transformers/all-MiniLM-L6-v2 runs/small

Called again after an interruption, it goes on. The result is `runs/small/shipped_3_layers`.
"""

import json
import shutil
import sys
from pathlib import Path
from runpy import run_path

from sentence_transformers import SentenceTransformer

from neobert_hf.common.files import write_json
from neobert_hf.distillation import distil
from neobert_hf.embeddings.space import TEACHER_FILE


ROOT = Path(__file__).parents[2]


def make_model(teacher: str, work: Path) -> Path:
    """The folder of the model: three layers of the teacher, stored as float16, which loads as float32."""
    first = distil(
        teacher=teacher,
        student=teacher,
        layers=[1, 3, 5],
        texts=work / "texts.parquet",
        passages=25_000,
        eval_strategy="no",
        output_dir=work / "3_layers",
    ).model
    learned = distil(
        teacher=teacher,
        student=first,
        texts=work / "more_texts.parquet",
        passages=40_000,
        eval_strategy="no",
        output_dir=work / "3_layers_more",
    ).model
    output = work / "shipped_3_layers"
    SentenceTransformer(str(learned), device="cpu").half().save(str(output), create_model_card=False)
    config = output / "config.json"
    write_json(config, json.loads(config.read_text()) | {"dtype": "float32"})
    shutil.copy(learned / TEACHER_FILE, output)
    return output


if __name__ == "__main__":
    work = Path(sys.argv[2])
    run_path(str(ROOT / "models/distilled/make.py"))["make_data"](ROOT / "data/benchmark", work)
    print(make_model(sys.argv[1], work))
