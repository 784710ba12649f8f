"""Evaluation: tasks with scorers, methods on the same prompts in one process, statistics, and a report."""
