"""genpipe: fan prompts out over SGLang servers, lose nothing, and say why it is not faster."""

__version__ = "0.1.0"
