"""Fine-tune and evaluate any encoder on GLUE as the paper does (section 5.1, appendix C), or on your own task.

    python examples/run_glue.py --config configs/glue/paper.yaml --model chandar-lab/NeoBERT --task all
    python examples/run_glue.py --config configs/glue/paper.yaml --model chandar-lab/NeoBERT --task all --grid true

Without `--grid` each task gets the hyperparameters of Table 6. RTE, STS-B, MRPC and QNLI start from the best MNLI
model. After an interruption, run the same command again: finished runs are not repeated, and an interrupted run
resumes, on a CPU bit for bit. To use several GPUs, start the command for each with other tasks (MNLI before those that
start from it); all may write to the same folder. `output_dir` gets a folder for each model, with a JSON file for each
run and the best model of each task, and a report on all models, `report.md`.
"""

from neobert_hf_cli import run


if __name__ == "__main__":
    run("run_glue")
