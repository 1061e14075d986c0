"""Renders a conversation to prompt text with the model's chat template, as Hugging Face's libraries (and so
vLLM) do.

A template is a program that came with a model, so it runs in jinja2's immutable sandbox, without private
attributes, without changing its arguments and without Python's builtins. It gets messages, tools, documents,
add_generation_prompt, the special tokens by name, the request's template kwargs, and the globals and filters
that templates use: `raise_exception`, `strftime_now`, `tojson`, loop controls, `{% generation %}`.

The template is the first that the folder has of: chat_template.jinja, chat_template.json,
tokenizer_config.json. From a list of named templates, `tool_use` is for requests with tools, and `default`
for the others.

A gateway without a local tokenizer does not import this module, nor jinja2.

Compiling takes some milliseconds, once. Rendering takes 50–150 µs for a conversation of ten messages, and
holds the GIL.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from perilune_gateway.request.tokens.conversation import (
    EFFORTS,
    Conversation,
    Form,
    Message,
    TemplateError,
    rewrites_answers,
    unthinking,
)

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class _Generation(Extension):
    """Renders `{% generation %}…{% endgeneration %}`, which marks assistant text for training, as its
    content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template. Raises TemplateError if it does not compile."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        local_time: Callable[[], datetime] = datetime.now,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: local_time().strftime(form)
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = environment.from_string(source)
            keeps_parts = _loops_over_content(environment.parse(source))
        except jinja2.TemplateError as error:
            raise TemplateError(f"{type(error).__name__}: {error}") from None
        self._keeps_parts = keeps_parts
        self.form = Form(
            keeps_parts=keeps_parts,
            system_first=_refuses_late_system(source),
            knows_developer="'developer'" in source or '"developer"' in source,
            unthinking=unthinking({effort: self._greeting(effort) for effort in ("none", *EFFORTS)}),
            rewrites_answers=rewrites_answers(self._tried),
        )
        """What the template expects of conversations, and what it does to them."""
        self.placeholders = self._placeholders() if keeps_parts else {}
        """Kind of medium → the text that the template writes for it; without those that it has no words
        for."""

    def _placeholders(self) -> Mapping[str, str]:
        found = {}
        plain = self._shown([])
        for kind in ("image", "audio", "video"):
            once, twice = self._shown([{"type": kind}]), self._shown([{"type": kind}] * 2)
            if plain is None or once is None or twice is None or once == plain:
                continue
            differ = (i for i, pair in enumerate(zip(plain, once, strict=False)) if pair[0] != pair[1])
            begin = next(differ, len(plain))
            own = once[begin : begin + len(once) - len(plain)]
            if own and twice == once[:begin] + own + once[begin:]:  # it is not numbered
                found[kind] = own
        return found

    def _shown(self, parts: list[dict[str, str]]) -> str | None:
        """Return a user's message with these parts as the template renders it; None if it refuses."""
        content = [*parts, {"type": "text", "text": "."}]
        try:
            return self.render(Conversation(messages=[{"role": "user", "content": content}]))
        except TemplateError:
            return None

    def _greeting(self, effort: str) -> str | None:
        """Return a greeting as the template renders it with this effort; None if it refuses."""
        told = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        return self._tried([{"role": "user", "content": "Hi"}], True, told)

    def _tried(self, messages: list[Message], begins: bool, told: Mapping[str, Any]) -> str | None:
        """Return the messages, whose contents are texts, as the template renders them; None if it refuses.
        `begins`: whether an answer begins after them. `told`: the template's arguments."""
        if self._keeps_parts:
            messages = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]
        try:
            return self.render(Conversation(messages=messages, template_kwargs=told), begins)
        except TemplateError:
            return None

    def render(
        self,
        conversation: Conversation,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Return the prompt text of a conversation. Raises TemplateError for any error inside the
        template."""
        messages = conversation.messages
        if continue_final_message:
            messages = _marked(messages)
        try:
            text = self._template.render(
                self._special_tokens
                | dict(conversation.template_kwargs)
                | {
                    "messages": messages,
                    "tools": conversation.tools,
                    "documents": conversation.documents,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except Exception as error:  # a template can fail in any way; all of them mean the same
            raise TemplateError(f"{type(error).__name__}: {error}") from None
        return _open_end(text) if continue_final_message else text


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """The templates of one tokenizer folder."""

    default: ChatTemplate
    with_tools: ChatTemplate
    source: str = ""
    """The source text of all templates."""

    def choose(self, tools: bool) -> ChatTemplate:
        return self.with_tools if tools else self.default


def load(folder: Path, local_time: Callable[[], datetime] = datetime.now) -> ChatTemplates | None:
    """Return the templates of a tokenizer folder; None if it has none. Raises TemplateError, OSError,
    ValueError."""
    config = _json_file(folder / "tokenizer_config.json")
    source: Any = config.get("chat_template")
    if (folder / "chat_template.jinja").exists():
        source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    elif named := _json_file(folder / "chat_template.json").get("chat_template"):
        source = named
    if not source:
        return None
    special = {name: token for name in SPECIAL_TOKENS if (token := _token_text(config.get(name)))}
    sources = {"default": source}
    if isinstance(source, list):
        sources = {entry["name"]: entry["template"] for entry in source}
    compiled = {name: ChatTemplate(text, special, local_time) for name, text in sources.items()}
    default = compiled.get("default") or next(iter(compiled.values()))
    with_tools = compiled.get("tool_use", default)
    if with_tools.form.system_first != default.form.system_first:  # one that refuses speaks for both
        for template in (default, with_tools):
            template.form = replace(template.form, system_first=True)
    return ChatTemplates(default, with_tools, "\n".join(sources.values()))


def _json_file(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return content if isinstance(content, dict) else {}


def _token_text(token: Any) -> str:
    """Return the token's text. The file has it as a string, or as an object with flags."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


_MARK = "\uf8ff-the-answer-goes-on-here "
"""Stands where the answer goes on; its space tells whether the template keeps spaces there."""


def _marked(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with a mark at the end of the last one. Raises TemplateError if that has no
    text."""
    last = messages[-1] if messages else {}
    content = last.get("content")
    if isinstance(content, list):
        at = max((i for i, part in enumerate(content) if "text" in part), default=-1)
        if at < 0:
            raise TemplateError("the last message has no text that could go on")
        content = [*content[:at], content[at] | {"text": content[at]["text"] + _MARK}, *content[at + 1 :]]
    elif isinstance(content, str):
        content += _MARK
    else:
        raise TemplateError("there is no message that could go on")
    return [*messages[:-1], last | {"content": content}]


def _open_end(text: str) -> str:
    """Remove what the template put after the last message, so that the engine continues that message."""
    at = text.rfind(_MARK.strip())
    if at < 0:
        raise TemplateError("the last message is not in the rendered text")
    return text[:at] if text.startswith(_MARK, at) else text[:at].rstrip()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON, whereas jinja2's own filter also escapes HTML and sorts keys."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _refuses_late_system(source: str) -> bool:
    """Return whether the template refuses a system message after a user's. As in vLLM, it has none of the
    usual functions and filters for this question, so that a template that calls one of them refuses, too."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    messages = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
    try:
        environment.from_string(source).render(messages=messages, add_generation_prompt=False)
    except Exception:  # a template can fail in any way
        return True
    return False


def _loops_over_content(template: nodes.Template) -> bool:
    """Return whether a `for` loops over a message's `content`; vLLM recognises templates that want parts by
    that."""
    lists = _aliases(template, "messages")
    loops = list(template.find_all(nodes.For))
    items = {
        loop.target.name
        for loop in loops
        if _root(loop.iter) in lists and isinstance(loop.target, nodes.Name)
    }
    return any(_content_owner(loop.iter) in items for loop in loops)


def _aliases(template: nodes.Template, name: str) -> set[str]:
    """Return `name` and all variables that are set from it, as in `{% set rest = messages[1:] %}`."""
    known: set[str] = set()
    new = {name}
    while new:
        known |= new
        new = {
            assign.target.name
            for assign in template.find_all(nodes.Assign)
            if isinstance(assign.target, nodes.Name) and _root(assign.node) in known
        } - known
    return known


def _peel(node: nodes.Node | None) -> nodes.Node | None:
    """Return the node without the filters, tests and slices around it."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    return node


def _root(node: nodes.Node) -> str:
    peeled = _peel(node)
    return peeled.name if isinstance(peeled, nodes.Name) else ""


def _content_owner(node: nodes.Node) -> str:
    """Return the variable `m` in `m.content` or `m['content']`; empty for any other node."""
    match _peel(node):
        case nodes.Getattr(node=nodes.Name(name=name), attr="content"):
            return str(name)
        case nodes.Getitem(node=nodes.Name(name=name), arg=nodes.Const(value="content")):
            return str(name)
    return ""
