"""The jobs, each `deepspeed train/X.py --recipe R`, the recipe schema, and one small training loop."""
