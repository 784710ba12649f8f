"""A draft for other engines: stock Hugging Face folders and GGUF files, compared before they are called done."""
