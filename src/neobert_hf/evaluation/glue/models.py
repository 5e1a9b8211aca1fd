"""Classifiers for GLUE tasks: any encoder of Transformers with a new head."""

from transformers import AutoModelForSequenceClassification, PreTrainedModel

from neobert_hf.evaluation.glue.tasks import GlueTask
from neobert_hf.training.starting_points import StartingPoint, build_model, task_config


def build_classifier(start: StartingPoint, task: GlueTask, dropout: float) -> PreTrainedModel:
    """Any encoder of Transformers in float32, with a new head for the labels of the task."""
    problem = "single_label_classification" if task.labels is not None else "regression"
    config = task_config(start, task.labels or ["score"], problem, dropout)
    return build_model(start, AutoModelForSequenceClassification, config)
