"""Read an export with SpecForge's own reader, and hold what it makes of it against what is in the file.

For a file of ``genpipe export DIR FILE --format sharegpt``, with or without ``--token-ids``. It needs an
environment with SpecForge (0.2.0 was used) and what its reader imports; of its requirements these are enough:
``pip install torch transformers datasets && pip install --no-deps specforge``. A tokenizer of single bytes is
made here, so that nothing is downloaded.

    python scripts/check_specforge.py FILE [--template qwen3-thinking]

Exits with 1 where the reader trains on something else than what the model wrote.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHATML = """
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.reasoning_content -%}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- message.content or '' -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' + call.function.name + '</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
"""
LENGTH_MAX = 1 << 22


def byte_tokenizer() -> Any:
    """A token for each byte, and the marks of ChatML."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # type: ignore[import-not-found]
    from transformers import PreTrainedTokenizerFast  # type: ignore[import-not-found]

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: place for place, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens(
        {"pad_token": "<pad>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    )
    fast.chat_template = CHATML
    return fast


def read(path: Path, tokenizer: Any, template: str) -> Sequence[dict[str, Any]]:
    """What SpecForge makes of the file."""
    from specforge.data.prompt_builder import prepare_prompt_tasks  # type: ignore[import-not-found]

    tasks: Sequence[dict[str, Any]] = prepare_prompt_tasks(
        path,
        tokenizer,
        chat_template=template,
        max_length=LENGTH_MAX,
        is_preformatted=False,
        train_only_last_turn=False,
        cache_dir=None,
        cache_key=None,
        num_proc=None,
    )
    return tasks


def text_to_train(row: dict[str, Any], *, thinks: bool) -> str:
    """What the model wrote in one row, as the template writes it."""
    text = ""
    for turn in row["conversations"]:
        if turn["role"] != "assistant":
            continue
        if thinks and turn.get("reasoning_content"):
            text += f"<think>\n{turn['reasoning_content']}\n</think>\n\n"
        calls = "".join(
            f"<tool_call>{call['function']['name']}</tool_call>" for call in turn.get("tool_calls") or []
        )
        text += f"{turn['content']}{calls}<|im_end|>\n"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description="Read an export with SpecForge's own reader.")
    parser.add_argument("file", type=Path, help="an export of the format sharegpt, as .jsonl")
    parser.add_argument("--template", default="qwen3-thinking", help="SpecForge's chat template, of ChatML")
    given = parser.parse_args()
    rows = [json.loads(line) for line in given.file.read_bytes().split(b"\n")[:-1]]
    tokenizer = byte_tokenizer()
    tasks = [task["payload"] for task in read(given.file, tokenizer, given.template)]
    if "input_ids" in rows[0]:
        wanted = [(row["input_ids"], row["loss_mask"]) for row in rows]
        is_same = [(task["input_ids"], task["loss_mask"]) for task in tasks] == wanted
        print("token ids and masks of the file", "are what it reads" if is_same else "ARE NOT what it reads")
    else:
        # The reader shuffles.
        trained = Counter(
            tokenizer.decode(
                [token for token, on in zip(task["input_ids"], task["loss_mask"], strict=True) if on]
            )
            for task in tasks
        )
        is_same = trained == Counter(text_to_train(row, thinks="thinking" in given.template) for row in rows)
        print("what it trains on", "is what the model wrote" if is_same else "IS NOT what the model wrote")
    ones = sum(sum(task["loss_mask"]) for task in tasks)
    print(f"{len(rows)} rows, {len(tasks)} read, {ones} tokens to train on")
    return 0 if is_same and len(rows) == len(tasks) else 1


if __name__ == "__main__":
    sys.exit(main())
