"""The recipe that distils a small embedding model from a large one, with nothing but texts."""

from transformers import set_seed

from neobert_hf.common.fingerprints import model_fingerprint
from neobert_hf.common.recipe import Result, recipe
from neobert_hf.distillation.student import StudentSettings, build_student, check_vocabulary, load_student
from neobert_hf.distillation.teacher import checksum_of, choose_texts, compute_targets, load_teacher
from neobert_hf.distillation.trainer import DistilArguments, DistilSettings, DistilTrainer
from neobert_hf.embeddings.models import check_trained
from neobert_hf.training.run import Run, check_alone


@recipe
def distil(settings: DistilSettings, student_settings: StudentSettings, arguments: DistilArguments) -> Result:
    """Distil a small embedding model from a large one, with nothing but texts of your own.

    Called again after an interruption, it goes on from the newest complete checkpoint, on a CPU bit for bit.
    `output_dir` gets `model/` (for `SentenceTransformer(...)`), `log.json`, checkpoints, and `teacher/`, which may be
    deleted afterwards.

    Returns:
        The model's folder; the `cosine` to the teacher's vectors of held-out texts, also `before` training.
    """
    # 1. The run: what it writes, and whether the settings are those of its checkpoint
    check_alone(arguments)
    models = {"teacher": settings.teacher}
    if student_settings.student is not None:
        models["student"] = student_settings.student
    folder = {"inputs": models, "sources": {"texts": settings.texts}, "writes": ("teacher",), "leave_out": ("column",)}
    with Run.start("distil", arguments, settings, student_settings, **folder) as run:
        for name, path in models.items():
            check_trained(path, name)

        # 2. Texts of many lengths, to learn from and to measure on
        texts, held_out_texts = choose_texts(settings.texts, settings.column, settings.passages)
        print(f"{len(texts):,} texts to learn from, {len(held_out_texts):,} held out", flush=True)
        fingerprints = {name: model_fingerprint(path) for name, path in models.items()}
        run.identify(texts=checksum_of(texts), **fingerprints)

        # 3. The teacher, and the model that the student begins as if one is named
        teacher = load_teacher(settings.teacher, arguments.device)
        check_vocabulary(student_settings, teacher)
        start, of_teacher = load_student(student_settings, teacher, settings.teacher)

        # 4. The teacher's token states and vectors of these texts
        folder = run.folder / "teacher"
        targets = compute_targets(teacher, fingerprints["teacher"], texts, folder / "learned")
        held_out = compute_targets(teacher, fingerprints["teacher"], held_out_texts, folder / "held_out")

        # 5. The student; a new one begins as a table of the mean states of each token
        set_seed(arguments.seed)
        student = build_student(student_settings, teacher, targets, start, settings.nearest_texts, of_teacher)

        # 6. Training to the end; then the model, its card and the log are saved
        trainer = DistilTrainer(student, settings, arguments, targets, held_out, run)
        if run.checkpoint is not None:
            print(f"resuming from {run.checkpoint}", flush=True)
        trainer.train_to_the_end()
        return trainer.save_student()
