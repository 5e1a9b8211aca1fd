"""Distil a small NeoBERT from an embedding model, with nothing but texts of your own.

    python examples/distil.py --config configs/embeddings/distil.yaml \\
        --teacher sentence-transformers/all-MiniLM-L6-v2 --texts my_texts/ more.parquet --output_dir runs/distil

The student's vectors lie in the teacher's space, so it can search an index that the teacher made. After an
interruption, run the same command again: on a CPU it ends with the same weights, bit for bit. `output_dir` gets
`model/` (for `SentenceTransformer(...)`), `log.json`, checkpoints, and `teacher/`, which may be deleted afterwards.
"""

from pathlib import Path

from transformers import set_seed

from neobert_hf.common.run import output_folder
from neobert_hf.common.script_errors import run_script
from neobert_hf.common.settings import parse_config
from neobert_hf.distillation.student import StudentSettings, build_student, load_student
from neobert_hf.distillation.teacher import ask_teacher, choose_texts, load_teacher
from neobert_hf.distillation.trainer import DistilArguments, DistilSettings, DistilTrainer, run_identity
from neobert_hf.training.run import check_alone, newest_checkpoint


def main(args: list[str] | None = None) -> None:
    # 1. Settings
    settings, student_settings, arguments = parse_config(DistilSettings, StudentSettings, DistilArguments, args=args)
    check_alone(arguments)
    output = Path(arguments.output_dir)
    writes = ("model", "teacher", "log.json", "checkpoint-*")
    models = {"teacher": settings.teacher, "student": student_settings.student}
    with output_folder(output, "distil.py", writes, models, {"texts": settings.texts}):
        # 2. The teacher, the model that the student begins as if one is named, and texts of many lengths
        teacher = load_teacher(settings.teacher, arguments.device)
        start = load_student(student_settings, teacher)
        learned, held_out = choose_texts(settings.texts, settings.column, settings.passages)
        print(f"{len(learned):,} texts to learn from, {len(held_out):,} held out", flush=True)

        # 3. The checkpoint to go on from, if there is one
        identity = run_identity(settings, student_settings, arguments, learned)
        checkpoint = newest_checkpoint(output, identity)

        # 4. The teacher's token states and vectors of these texts
        learned = ask_teacher(teacher, identity["teacher"], learned, output / "teacher" / "learned")
        held_out = ask_teacher(teacher, identity["teacher"], held_out, output / "teacher" / "held_out")

        # 5. The student; a new one begins as a table of the mean states of each token
        set_seed(arguments.seed)
        student = build_student(student_settings, teacher, learned, start)

        # 6. Training to the end; then the model, its card and the log are saved
        trainer = DistilTrainer(student, settings, arguments, learned, held_out, identity)
        if checkpoint:
            print(f"resuming from {checkpoint}", flush=True)
        trainer.train_to_the_end(checkpoint)
        trainer.save_student()


if __name__ == "__main__":
    run_script(main)
