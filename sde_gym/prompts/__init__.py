"""Prompts: what models are given to continue, by name or from a file.

- `prompt.py`: the record and the order of the shipped sets
- `files.py`: files of JSON, ours and those of public prompt sets
- `reference.py`: a reference into the standard library, and its text
- `cutting.py`: how the list of references is made
- `library.py`: the shipped references as prompts
- `chat.py`: the shipped prompts for chat models
"""

from sde_gym.prompts.loading import PROMPT_SETS, load_prompts
from sde_gym.prompts.prompt import Prompt
from sde_gym.prompts.reference import resolve_source

__all__ = ["PROMPT_SETS", "Prompt", "load_prompts", "resolve_source"]
