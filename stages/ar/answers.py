"""What a request gets when its last answer has ended: one `Finished`, however many answers there are."""

import time
from collections.abc import Sequence as Many

from proto.messages import Answer, Tensor, Text, Tokens, Usage, Value
from stages.ar.sequence import Sequence
from stages.engine import Finished


def finished(answers: Many[Sequence]) -> Finished:
    """Of all answers to one prompt, by choice. The prompt counts once; reason and times are the first answer's."""
    first = answers[0]
    outputs: dict[str, Value] = {}
    said = first.said
    if "text" in first.wanted:
        more = tuple(
            Answer(part.text, one.finish_reason or "stop", tuple(one.logprobs), part.reasoning, part.tool_calls)
            for one in answers[1:]
            for part in (one.said,)
        )
        outputs["text"] = Text(
            text=said.text,
            logprobs=tuple(first.logprobs),
            prompt_logprobs=tuple(first.scores),
            more=more,
            reasoning=said.reasoning,
            tool_calls=said.tool_calls,
        )
    if "tokens" in first.wanted:
        outputs["tokens"] = Tokens(ids=first.answer)
    if first.visible:
        outputs["hidden"] = Tensor(tensor=0)
    completed = sum(one.usage.completion_tokens for one in answers)
    return Finished(
        request=first.job.request,
        outputs=outputs,
        tensors=tuple(first.visible),
        finish_reason=first.finish_reason or "stop",
        usage=Usage(prompt_tokens=first.usage.prompt_tokens, completion_tokens=completed),
        detail=first.clocks.detail(time.perf_counter()),
    )
