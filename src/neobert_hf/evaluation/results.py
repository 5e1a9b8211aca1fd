"""What all evaluations share: the advice on results of something else."""

# What to do if a stored result depends on something else than this run.
ADVICE = "Give this model another `name`, use another `output_dir`, or delete the file to compute it again."
