"""An OpenAI-compatible server on a decoder: one thread that runs a batch, and a FastAPI application before it.

    draftsmith serve runs/quickstart/bundle          # pip install 'draftsmith[serve]'
"""
