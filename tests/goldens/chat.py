"""Conversations through stand-ins for well known chat templates: `make.py chat`.

chat/NAME.jinja uses what the template of that model uses, in other words. chat.json holds what transformers makes of each, or what the template
refuses with. Where a template prints today's date there is the mark DATE.
"""

import json
from datetime import datetime
from pathlib import Path

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

DATE = "\u0000date"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells tomorrow's weather <in \"words\"> & degrees, naïvely.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "number", "default": 1.0, "enum": [1, 2.5, 1e-7]}},
            "required": ["place"],
            "strict": None,
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


def call(name: str, **arguments) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def says(role: str, content: str | None, **more) -> dict:
    return {"role": role, "content": content, **more}


SHORT = [says("user", "  Wie geht's? 🦀\n")]
TURNS = [says("system", " Be brief. "), says("user", "One?"), says("assistant", "Two."), says("user", "Three\nfour?")]
THOUGHTS = [
    says("user", "Why?"),
    says("assistant", "<think>\nLet me see.\n\n</think>\n\nBecause."),
    says("user", "And now?"),
    says("assistant", "<think>hm</think>Now.", reasoning_content=None),
]
CALLS = [
    says("system", "Use functions."),
    says("user", "Weather in Köln?"),
    says("assistant", None, tool_calls=[call("weather", place="Köln", days=2.0, exact=True, unit=None)]),
    says("tool", "{\"sky\": \"grey\"}"),
    says("assistant", "Grey."),
    says("user", "Elsewhere?"),
]
TWO_CALLS = [
    says("user", "Here and there?"),
    says("assistant", "I look.", tool_calls=[call("weather", place="here"), call("clock")]),
    says("tool", "sun"),
    says("tool", "noon"),
]
TWO_SILENT_CALLS = [TWO_CALLS[0], says("assistant", None, tool_calls=TWO_CALLS[1]["tool_calls"]), *TWO_CALLS[2:]]
OUT_OF_TURN = [says("user", "A"), says("user", "B")]
STRANGER = [says("user", "A"), says("assistant", "B"), says("user", "C"), says("judge", "D")]

# Template, messages, and what else there is.
CASES = [
    ("llama3", SHORT, {}),
    ("llama3", TURNS, {"date_string": "26 Jul 2024"}),
    ("llama3", CALLS, {"tools": [WEATHER, CLOCK]}),
    ("llama3", CALLS, {"tools": [WEATHER], "tools_in_user_message": False}),
    ("llama3", CALLS, {"builtin_tools": ["shell", "search", "sum"]}),
    ("llama3", TWO_CALLS, {"tools": [WEATHER]}),
    ("llama3", [says("system", "Alone.")], {"tools": [CLOCK]}),
    ("qwen2_5", SHORT, {}),
    ("qwen2_5", TURNS, {}),
    ("qwen2_5", CALLS, {"tools": [WEATHER, CLOCK]}),
    ("qwen2_5", TWO_CALLS, {"tools": [CLOCK]}),
    ("qwen3", SHORT, {"enable_thinking": False}),
    ("qwen3", TURNS, {"enable_thinking": True}),
    ("qwen3", THOUGHTS, {}),
    ("qwen3", CALLS, {"tools": [WEATHER]}),
    ("qwen3", TWO_CALLS, {}),
    ("qwen3", TWO_SILENT_CALLS, {"tools": [WEATHER, CLOCK]}),
    ("mixtral", SHORT, {}),
    ("mixtral", TURNS, {}),
    ("mixtral", OUT_OF_TURN, {}),
    ("mixtral", STRANGER, {}),
    ("deepseek_r1", SHORT, {}),
    ("deepseek_r1", TURNS, {}),
    ("deepseek_r1", THOUGHTS, {}),
    ("deepseek_r1", CALLS, {}),
    ("deepseek_r1", TWO_SILENT_CALLS, {}),
]


def make(here: Path, versions: dict[str, str], write_lines) -> None:
    cases = []
    for name, messages, more in CASES:
        for add_generation_prompt in [True, False]:
            source, tools = (here / "chat" / f"{name}.jinja").read_text(), more.get("tools")
            variables = {key: value for key, value in more.items() if key != "tools"}
            case = {"template": name, "messages": messages, "tools": tools, "variables": variables}
            case["add_generation_prompt"] = add_generation_prompt
            try:
                rendered, _ = render_jinja_template(
                    [messages], tools=tools, chat_template=source, add_generation_prompt=add_generation_prompt, **TOKENS, **variables
                )
                case["text"] = rendered[0].replace(datetime.now().strftime("%d %b %Y"), DATE)
            except TemplateError as error:
                case["refused"] = str(error)
            cases.append(case)
    write_lines(here / "chat.json", {**versions, "cases": cases})
    refused = sum("refused" in case for case in cases)
    print(f"{len(cases)} conversations, {refused} refused")
