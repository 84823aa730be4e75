"""Chat messages and tools, from OpenAI's spelling to what goes to a stage."""

from collections.abc import Mapping

from omni.api import bodies
from proto.errors import InvalidRequest
from proto.messages import ChatMessage, ToolCall
from proto.params import Json


def to_message(message: bodies.MessageBody, index: int) -> ChatMessage:
    """Text parts are joined with line breaks. `developer` is the newer word for `system`."""
    where = f"messages[{index}]"
    role = "system" if message.role == "developer" else message.role
    for field in ("tool_calls", "reasoning_content", "reasoning"):
        if getattr(message, field) and role != "assistant":
            raise InvalidRequest(f"{where}.{field}: only messages of role assistant have it", field=f"{where}.{field}")
    if (message.tool_call_id is not None) != (role == "tool"):
        problem = "missing; say which call this answers" if role == "tool" else "only messages of role tool have it"
        raise InvalidRequest(f"{where}.tool_call_id: {problem}", field=f"{where}.tool_call_id")
    if message.content is None and not message.tool_calls:
        raise InvalidRequest(f"{where}.content is missing", field=f"{where}.content")
    return ChatMessage(
        role,
        _content(message.content, where),
        tuple(ToolCall(one.function.name, one.function.arguments, one.id) for one in message.tool_calls or ()),
        message.reasoning_content or message.reasoning or "",
        message.tool_call_id or "",
        message.name or "",
    )


def _content(content: str | list[dict[str, Json]] | None, where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, f"{where}.content[{place}]") for place, part in enumerate(content or ()))


def _part(part: Mapping[str, Json], where: str) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        raise InvalidRequest(f"{where}: parts of type {kind!r} are not supported here; send text", field=where)
    if not isinstance(text, str) or len(part) != 2:
        raise InvalidRequest(f'{where}: a text part is {{"type": "text", "text": "..."}}', field=where)
    return text


def tools_of(body: bodies.ChatBody) -> tuple[dict[str, Json], ...]:
    """The functions that the answer may call: those of `tools`, unless `tool_choice` says none."""
    if body.tool_choice not in (None, "auto", "none"):
        raise InvalidRequest(
            'tool_choice: the model decides whether it calls a tool; send "auto" or "none", and say in a message what you want',
            field="tool_choice",
        )
    if body.tools and body.parallel_tool_calls is False and body.tool_choice != "none":
        raise InvalidRequest(
            "parallel_tool_calls: answers may call several tools; leave it out", field="parallel_tool_calls"
        )
    return () if body.tool_choice == "none" else tuple(_tool(one) for one in body.tools or ())


def _tool(tool: bodies.ToolBody) -> dict[str, Json]:
    function = tool.function
    return {
        "type": "function",
        "function": {
            "name": function.name,
            "description": function.description or "",
            "parameters": function.parameters or {"type": "object", "properties": {}},
        },
    }
