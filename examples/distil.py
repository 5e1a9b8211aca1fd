"""Distil a small NeoBERT from an embedding model, with nothing but texts of your own.

    python examples/distil.py --config configs/embeddings/distil.yaml \\
        --teacher sentence-transformers/all-MiniLM-L6-v2 --texts my_texts/ more.parquet --output_dir runs/distil

The student's vectors lie in the teacher's space, so it can search an index that the teacher made. After an
interruption, run the same command again: on a CPU it ends with the same weights, bit for bit. `output_dir` gets
`model/` (for `SentenceTransformer(...)`), `log.json`, `checkpoint.pt`, and `teacher/`, which may be deleted afterwards.
"""

from pathlib import Path

import torch

from neobert_hf.common.files import output_folder
from neobert_hf.common.fingerprints import model_fingerprint
from neobert_hf.common.script_errors import run_script
from neobert_hf.common.settings import parse_config
from neobert_hf.embeddings.distil import CHECKPOINT, DistilSettings, Training, read_checkpoint, save_student
from neobert_hf.embeddings.student import build_student, cosine_to_teacher, initialise, used_entries
from neobert_hf.embeddings.teacher import ask_teacher, choose_texts, load_teacher


def main(args: list[str] | None = None) -> None:
    # 1. Settings
    (settings,) = parse_config(DistilSettings, args=args)
    output = Path(settings.output_dir)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    writes = ("model", "teacher", "log.json", CHECKPOINT)
    with output_folder(output, "distil.py", writes, {"teacher": settings.teacher}, {"texts": settings.texts}):
        # 2. Texts of many lengths, cut from those of the user
        teacher = load_teacher(settings.teacher, device)
        learned, held_out = choose_texts(settings.texts, settings.column, settings.passages)
        print(f"{len(learned):,} texts to learn from, {len(held_out):,} held out", flush=True)

        # 3. The checkpoint to go on from, if there is one
        checkpoint = read_checkpoint(settings, learned)

        # 4. The teacher's token states and vectors of these texts
        fingerprint = model_fingerprint(settings.teacher)
        measured = held_out, ask_teacher(teacher, fingerprint, held_out, output / "teacher" / "held_out")
        answers = ask_teacher(teacher, fingerprint, learned, output / "teacher" / "learned")

        # 5. The student, which begins as a table of the mean states of each token
        torch.manual_seed(settings.seed)
        kept = used_entries(teacher.tokenizer, answers) if settings.vocabulary == "used" else None
        student = build_student(settings.sizes(), kept, teacher, answers)
        training = Training(student, settings, (learned, answers), measured)
        if checkpoint is not None:
            training.resume(checkpoint)
        else:
            initialise(student, teacher, answers)
            cosine = cosine_to_teacher(student, *measured)
            print(f"{training.last_step:,} steps; cosine to the teacher before the first: {cosine:.4f}", flush=True)

        # 6. Training to the end; then the model, its card and the log are saved
        training.run()
        print(save_student(training), flush=True)


if __name__ == "__main__":
    run_script(main)
