"""Distillation: a small student learns from what a teacher computed for texts."""
