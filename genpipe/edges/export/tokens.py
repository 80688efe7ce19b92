"""Token ids of a record as a trainer reads them: one sequence, and which of it the model wrote."""

from typing import Any, TypeGuard


def training_tokens(
    record: dict[str, Any], sample: int | None, *, asked_with_ids: bool
) -> tuple[list[int], list[int]] | None:
    """``input_ids`` and ``loss_mask`` of one sample; None where the ids of prompt or answer are not known.

    The mask is 1 over what the model wrote: the answer, and an earlier answer of the conversation where the
    last prompt has the very ids of that turn's prompt and answer at its beginning. Where the chat template
    has written them otherwise, such as without the thought, they are context like any other.

    Args:
        record: the record.
        sample: which of several, or None where there is one.
        asked_with_ids: the request's payload was ``input_ids``; else a member of that name is a field of the
            input like any other.
    """
    steps = record.get("steps") or ()
    ids = (steps[-1].get("token_ids") if steps else None) or record.get("token_ids") or {}
    prompt, output = ids.get("prompt"), ids.get("output")
    if prompt is None and asked_with_ids:
        # Who was asked with ids knows them.
        prompt = record.get("input_ids")
    if sample is not None:
        output = output[sample] if isinstance(output, list) and sample < len(output) else None
    if not (_are_ids(prompt) and _are_ids(output)):
        return None
    mask = [0] * len(prompt)
    for step in steps[:-1]:
        _mark(mask, prompt, step.get("token_ids") or {})
    return prompt + output, mask + [1] * len(output)


def _mark(mask: list[int], prompt: list[int], ids: dict[str, Any]) -> None:
    before, wrote = ids.get("prompt"), ids.get("output")
    if not _are_ids(before) or not _are_ids(wrote):
        return
    start, stop = len(before), len(before) + len(wrote)
    if prompt[:start] == before and prompt[start:stop] == wrote:
        mask[start:stop] = [1] * len(wrote)


def _are_ids(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and not isinstance(value[0], list)
